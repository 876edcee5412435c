"""A real daemon in a directory of its own, as a child process. For the demo, the benchmark and the model tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

CHECKOUT: Final = Path(__file__).resolve().parent.parent
START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 120.0
POLL_SECONDS: Final = 0.02


class DaemonFailedError(RuntimeError):
    """It did not start, or did not stop; the message ends with what it wrote."""


class DaemonProcess:
    """``omlxd serve`` with its store, socket and log in ``directory``. Not started by itself."""

    def __init__(self, directory: Path, **settings: str) -> None:
        """``settings``: configuration values by section and key, ``ram_size="64MiB"``; kept over restarts."""
        self.directory = directory
        # A socket's path may have 103 bytes at most on macOS; the directory's may be longer.
        self._short = tempfile.TemporaryDirectory(prefix="omlxd-")
        self.socket = Path(self._short.name) / "s"
        self.log = directory / "daemon.log"
        self._settings: Mapping[str, str] = {
            "daemon_socket": str(self.socket),
            "ssd_path": str(directory / "store"),
            "ram_size": "1GiB",
            "ssd_size": "4GiB",
            "ssd_min_free": "0",
            **settings,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> DaemonProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the daemon, and of every program that is to find it; no setting of the shell's is in it."""
        ours = {f"OMLXD_{name.upper()}": value for name, value in self._settings.items()}
        path = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
        theirs = {name: value for name, value in os.environ.items() if not name.startswith("OMLXD_")}
        return {**theirs, **ours, "OMLXD_SOCKET": str(self.socket), "PYTHONPATH": path}

    def start(self) -> None:
        """Start it and wait until it takes connections. Raises :class:`DaemonFailedError`."""
        import omlxd

        self.directory.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "omlxd", "serve"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C in the terminal is for us, and we stop it
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                omlxd.connect(self.socket).close()
                return
            except omlxd.Unavailable:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise DaemonFailedError(f"the daemon did not start:\n{self._last_words()}") from None
                time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Ask it to drain and end, and wait for that. Raises :class:`DaemonFailedError` when it doesn't."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise DaemonFailedError(
                f"the daemon did not end within {STOP_SECONDS:.0f} s:\n{self._last_words()}"
            ) from None
        self._process = None
        if code:
            raise DaemonFailedError(f"the daemon ended with exit code {code}:\n{self._last_words()}")

    @property
    def pid(self) -> int:
        """Process id; 0 when it does not run."""
        return self._process.pid if self._process is not None else 0

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """End it, and remove the socket's directory. What it stored stays in ``directory``."""
        try:
            self.stop()
        finally:
            self._short.cleanup()

    def _last_words(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]
