"""Random clients and random operator commands against one daemon, for as long as asked; then a verdict.

    ./scripts/soak --seconds 3600 --seed 7

What must hold all the time: every loaded block has the bytes that its key says, no exception and no error in the
daemon's log, and at the end, with everybody gone, no lease, no reservation, as many descriptors as at the beginning,
and private memory as flat as it was after the first quarter.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

import omlxd
from omlxd.client import Cache
from scripts.daemon_process import DaemonProcess

MODELS = [("org/small", 4 << 10), ("org/middle", 256 << 10), ("org/large", 2 << 20)]
BLOCK_TOKENS = 16
MAX_BLOCKS = 12
ROOM_SECONDS = 2.0
SETTINGS = [
    ("ram", "size", ['"32MiB"', '"64MiB"', '"96MiB"']),
    ("ram", "policy", ['"lru"', '"arc"', '"prefix"']),
    ("ssd", "size", ['"96MiB"', '"192MiB"', '"256MiB"']),
    ("ssd", "policy", ['"lru"', '"arc"', '"prefix"']),
    ("ssd", "mode", ['"write_back"', '"write_through"', '"second_touch"']),
    ("ssd", "codec", ['"auto"', '"raw"', '"zstd"', '"zstd-planes"']),
    ("ssd", "max_dirty", ['"8MiB"', '"auto"']),
    ("ssd", "size", ['"nonsense"']),
]


@dataclass
class Report:
    """What happened."""

    seconds: float = 0.0
    done: Counter[str] = field(default_factory=Counter)
    wrong_bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    private_mib: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    log_troubles: list[str] = field(default_factory=list)
    left_over: dict[str, int] = field(default_factory=dict)
    unavailable: list[str] = field(default_factory=list)
    """What engines and operators were told when the daemon did not answer in time."""

    @property
    def memory_growth_mib(self) -> float:
        """Private memory in the last quarter over that in the second one, medians."""
        quarter = max(1, len(self.private_mib) // 4)
        return float(np.median(self.private_mib[-quarter:]) - np.median(self.private_mib[quarter : 2 * quarter]))

    def problems(self) -> list[str]:
        """What must not be."""
        found = [*self.failures, *(f"log: {line}" for line in self.log_troubles)]
        if len(self.unavailable) > self.done.total() / 1000:
            found.append(f"engines had no answer {len(self.unavailable)} times: {self.unavailable[0]}")
        if self.wrong_bytes:
            found.append(f"{self.wrong_bytes} blocks had wrong bytes")
        found += [f"{count} {what} are left over" for what, count in self.left_over.items() if count]
        if self.descriptors[-1] > self.descriptors[0] + 4:
            found.append(f"descriptors went from {self.descriptors[0]} to {self.descriptors[-1]}")
        if self.memory_growth_mib > 64:
            found.append(f"private memory grew by {self.memory_growth_mib:.0f} MiB")
        return found


def content(chain_hash: bytes, nbytes: int) -> bytes:
    """The only right payload of a block."""
    word = np.frombuffer(chain_hash[:8], np.uint64)
    return np.repeat(word, -(-nbytes // 8)).tobytes()[:nbytes]


class SizedByFile(DaemonProcess):
    """Takes its sizes from the configuration file, which the environment would override."""

    @property
    def environment(self) -> dict[str, str]:
        """Without the sizes."""
        found = super().environment
        return {name: found[name] for name in found if name not in ("OMLXD_RAM_SIZE", "OMLXD_SSD_SIZE")}


def private_mib(process: psutil.Process) -> float:
    """Memory that is the process's own: the shared arena, whose size is set, is not in it."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return float(process.memory_full_info().uss) / (1 << 20)  # not Linux
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def descriptors(process: psutil.Process) -> int:
    """Open descriptors, those of the arena's segments aside: how many segments there are follows the RAM tier's size."""
    folder = Path(f"/proc/{process.pid}/fd")
    if not folder.is_dir():
        return int(process.num_fds())  # not Linux
    count = 0
    for link in folder.iterdir():
        with suppress(FileNotFoundError):
            count += "omlxd-segment" not in str(link.readlink())
    return count


class Soak:
    """One run."""

    def __init__(self, directory: Path, seconds: float, seed: int) -> None:
        self.report = Report()
        self._directory = directory
        self._seconds = seconds
        self._seed = seed
        self._file = directory / "config.toml"
        self._tables = {"ram": {"size": '"64MiB"'}, "ssd": {"size": '"192MiB"'}}
        self._write()
        self._daemon = SizedByFile(directory / "daemon", config=str(self._file), models_grace_seconds="1")
        self._end = 0.0

    def run(self, clients: int = 3) -> Report:
        """Start everything, wait, look."""
        with self._daemon:
            process = psutil.Process(self._daemon.pid)
            self._sample(process)
            began = time.monotonic()
            self._end = began + self._seconds
            work = [threading.Thread(target=self._guard, args=(self._client, number)) for number in range(clients)]
            work += [threading.Thread(target=self._guard, args=(self._operator, number)) for number in (100, 101)]
            work.append(threading.Thread(target=self._guard, args=(self._file_changes, 200)))
            for thread in work:
                thread.start()
            while any(thread.is_alive() for thread in work):
                self._sample(process)
                time.sleep(0.5)
            self.report.seconds = time.monotonic() - began
            self._look(process)
        log = self._daemon.log.read_text(errors="replace")
        marks = ("Traceback", "CRITICAL", "failed in the daemon", "exception was never retrieved", "was never awaited")
        self.report.log_troubles = [line for line in log.splitlines() if any(mark in line for mark in marks)][:20]
        return self.report

    def _guard(self, work: object, number: int) -> None:
        try:
            assert callable(work)
            work(random.Random(self._seed * 1000 + number))
        except Exception as error:
            self.report.failures.append(f"{getattr(work, '__name__', work)} {number}: {type(error).__name__}: {error}")

    def _going_on(self) -> bool:
        return time.monotonic() < self._end

    def _client(self, dice: random.Random) -> None:
        while self._going_on():
            try:
                with omlxd.connect(self._daemon.socket, name="soak engine") as cache:
                    for _ in range(dice.randrange(5, 60)):
                        if not self._going_on() or not self._use(cache, dice):
                            break
            except omlxd.Unavailable as error:  # an engine would compute, and come back
                self.report.unavailable.append(str(error))

    def _use(self, cache: Cache, dice: random.Random) -> bool:
        """One request of an engine; False once the connection is to be left."""
        model, nbytes = dice.choice(MODELS)
        space = cache.namespace(model=model, fingerprint="f", block_tokens=BLOCK_TOKENS)
        chat, blocks = dice.randrange(40), dice.randrange(1, MAX_BLOCKS)
        tokens = [chat * 1000 + index for index in range(blocks * BLOCK_TOKENS)]
        hashes = space.hashes(tokens)
        if dice.random() < 0.5:
            space.store(tokens, [content(one, nbytes) for one in hashes], timeout=ROOM_SECONDS)
            self.report.done["store"] += 1
        elif dice.random() < 0.2:
            space.match(tokens, prefetch=dice.random() < 0.5)
            self.report.done["match"] += 1
        else:
            with space.load(tokens, timeout=ROOM_SECONDS) as lease:
                for index, block in enumerate(lease):
                    if bytes(block.view) != content(hashes[index], nbytes):
                        self.report.wrong_bytes += 1
                self.report.done["load"] += 1
                if dice.random() < 0.05:
                    cache.close()  # gone without a word, lease in hand
                    return False
        return True

    def _operator(self, dice: random.Random) -> None:
        while self._going_on():
            try:
                with omlxd.connect(self._daemon.socket, name="soak operator") as cache:
                    for _ in range(dice.randrange(1, 10)):
                        if self._going_on():
                            self._command(cache, dice)
            except omlxd.Unavailable as error:
                self.report.unavailable.append(f"operator: {error}")

    def _command(self, cache: Cache, dice: random.Random) -> None:
        rows = cache.call("list", limit=200)["blocks"]
        key = dice.choice(rows)["key"] if rows else b"\0" * 36
        model = dice.choice(MODELS)[0]
        choices: list[tuple[int, str, dict[str, object]]] = [
            (10, "stats", {}),
            (5, "leases", {}),
            (3, "settings", {}),
            (3, "reload", {}),
            (10, "list", {"tier": "ssd", "prefix": key.hex()[:2]}),
            (10, "remove", {"keys": key}),
            (10, "pin", {"keys": key, "ttl": dice.choice([0.1, 5.0])}),
            (5, "unpin", {}),
            (10, "warm", {"keys": key}),
            (10, "peek", {"keys": key}),
            (3, "retire", {"namespace": model}),
            (1, "clear", {"namespace": model, "tier": dice.choice(["all", "ram", "ssd"])}),
            (3, "clear", {"older_than": 20.0}),
            (1, "clear", {"retired": True}),
            (5, "flush", {}),
            (5, "subscribe", {}),
            (3, "resize", {"ram_bytes": dice.choice([32 << 20, 64 << 20])}),
            (3, "nonsense", {"keys": 7}),
            (3, "clear", {"tier": "moon"}),
        ]
        ((_, verb, fields),) = dice.choices(choices, [weight for weight, _, _ in choices])
        try:
            for _ in cache.stream(verb, timeout=60.0, **fields):
                if verb == "subscribe":
                    break  # its events go on coming to a connection that does not read them
        except omlxd.Refused as refusal:
            self.report.refused[f"{verb}: {refusal.code}"] += 1
        self.report.done[verb] += 1
        time.sleep(dice.uniform(0, 0.1))

    def _file_changes(self, dice: random.Random) -> None:
        while self._going_on():
            section, key, values = dice.choice(SETTINGS)
            self._tables[section][key] = dice.choice(values)
            self._write()
            self.report.done["file"] += 1
            time.sleep(dice.uniform(0.1, 2.0))
            if self._tables["ssd"]["size"] == '"nonsense"':
                self._tables["ssd"]["size"] = '"192MiB"'
                self._write()

    def _write(self) -> None:
        lines = []
        for name, table in self._tables.items():
            lines += [f"[{name}]", *(f"{key} = {value}" for key, value in table.items())]
        self._file.write_text("\n".join(lines) + "\n")

    def _sample(self, process: psutil.Process) -> None:
        self.report.private_mib.append(private_mib(process))
        self.report.descriptors.append(descriptors(process))

    def _look(self, process: psutil.Process) -> None:
        """Everybody has gone: what is left?"""
        with omlxd.connect(self._daemon.socket, name="soak") as cache:
            cache.call("unpin")
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                stats = cache.call("stats")
                ram = stats["ram"]
                left = {
                    "leases": ram["leases"],
                    "reservations": ram["reservations"],
                    "clients": len(stats["clients"]) - 1,
                }
                if not any(left.values()):
                    break
                time.sleep(0.2)
            self.report.left_over = left
        self._sample(process)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="omlxd-soak-") as folder:
        report = Soak(Path(folder), options.seconds, options.seed).run()
    problems = report.problems()
    if options.json:
        print(json.dumps({**vars(report), "memory_growth_mib": report.memory_growth_mib, "problems": problems}))
    else:
        print(f"{report.seconds:.0f} s: " + ", ".join(f"{count:,} {what}" for what, count in report.done.most_common()))
        print(f"refused: {dict(report.refused)}; not answered in time: {len(report.unavailable)}")
        print(f"descriptors {report.descriptors[0]} to {report.descriptors[-1]}, at most {max(report.descriptors)}")
        print(
            f"private memory {report.private_mib[0]:.0f} to {report.private_mib[-1]:.0f} MiB, "
            f"second to last quarter {report.memory_growth_mib:+.1f} MiB"
        )
        for problem in problems:
            print(f"PROBLEM {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
