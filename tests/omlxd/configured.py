"""A real daemon whose settings are in a file, so that a test can change them while it runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import omlxd
from omlxd.client import Cache
from omlxd.schema import Stats
from scripts.daemon_process import CHECKOUT, DaemonProcess

T = TypeVar("T")

PATIENCE_SECONDS = 30.0
SMALL = {
    "ram": {"size": '"64MiB"'},
    "ssd": {"size": '"256MiB"', "min_free": '"0"'},
    "daemon": {},
    "metrics": {},
    "models": {"grace_seconds": "0.05"},
}


class ConfiguredDaemon(DaemonProcess):
    """`omlxd serve` with a configuration file of its own."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.file = directory / "conf" / "config.toml"
        self.file.parent.mkdir(parents=True)
        self.tables = {name: dict(table) for name, table in SMALL.items()}
        self.tables["ssd"]["path"] = f'"{directory / "store"}"'
        self.write()

    @property
    def environment(self) -> dict[str, str]:
        """Nothing of ours but the file and the socket."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("OMLXD_")}
        return {
            **clean,
            "OMLXD_CONFIG": str(self.file),
            "OMLXD_SOCKET": str(self.socket),
            "PYTHONPATH": str(CHECKOUT),
        }

    def write(self, extra: str = "") -> None:
        """Write the file from ``tables``."""
        lines = []
        for name, table in self.tables.items():
            lines += [f"[{name}]", *(f"{key} = {value}" for key, value in table.items())]
        self.file.write_text("\n".join([*lines, extra, ""]))

    def set(self, key: str, value: str) -> None:
        """Change one setting, as TOML has it, and write the file."""
        section, _, name = key.partition(".")
        self.tables[section][name] = value
        self.write()

    def reap(self) -> None:
        """It has been told to end by somebody else: wait until it has."""
        if self._process is not None:
            assert self._process.wait(PATIENCE_SECONDS) == 0
            self._process = None

    def connect(self) -> Cache:
        """A client."""
        return omlxd.connect(self.socket, name="test")


def stats_of(cache: Cache) -> Stats:
    return cast("Stats", cache.call("stats"))


def wait_for(what: Callable[[], T]) -> T:
    """What ``what`` gives once that is something; fails when it does not come."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen")


def fill(
    cache: Cache, *, model: str = "org/model", blocks: int, nbytes: int = 1 << 20, byte: int | None = None
) -> None:
    """Store one chain of ``blocks`` blocks, of random bytes or of one byte."""
    space = cache.namespace(model=model, fingerprint="f", block_tokens=16)
    payloads = [os.urandom(nbytes) if byte is None else bytes([byte]) * nbytes for _ in range(blocks)]
    result = space.store(list(range(16 * blocks)), payloads)
    assert result.stored + result.present == blocks, result
