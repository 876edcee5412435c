"""A Valkey (or Redis) server on loopback as a child process, with nothing on the disk. For the demo and the benchmark."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from types import TracebackType
from typing import Final

INSTALL: Final = "valkey-server or redis-server is needed: apt-get install redis-server, or brew install valkey"
START_SECONDS: Final = 20.0


class ValkeyProcess:
    """Runs for the length of a ``with``. ``prefix``: words before its command (``ip netns exec ...``)."""

    def __init__(self, *, address: str = "127.0.0.1", prefix: tuple[str, ...] = ()) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.address = address
        self._prefix = prefix

    @property
    def url(self) -> str:
        """For ``[remote] url``."""
        return f"valkey://{self.address}:{self.port}"

    def __enter__(self) -> ValkeyProcess:
        binary = shutil.which("valkey-server") or shutil.which("redis-server")
        if binary is None:
            raise SystemExit(INSTALL)
        self._folder = tempfile.TemporaryDirectory(prefix="omlxd-valkey-")
        options = ["--port", str(self.port), "--bind", self.address, "--save", "", "--protected-mode", "no"]
        self._process = subprocess.Popen(
            [*self._prefix, binary, *options, "--dir", self._folder.name],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_SECONDS
        while True:
            with socket.socket() as probe:
                if probe.connect_ex((self.address, self.port)) == 0:
                    return self
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                raise SystemExit(f"the server did not start at {self.address}:{self.port}")
            time.sleep(0.02)

    def pause(self) -> None:
        """It stays connected and does not answer."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """After ``pause``."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._folder.cleanup()
