"""A real daemon for each test, in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.daemon_process import DaemonProcess

StartDaemon = Callable[..., DaemonProcess]


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[StartDaemon]:
    """Starts daemons with given settings (``ram_size="64MiB"``); all are ended with the test."""
    started: list[DaemonProcess] = []

    def start(name: str = "daemon", **settings: str) -> DaemonProcess:
        daemon = DaemonProcess(tmp_path / name, **settings)
        started.append(daemon)
        daemon.start()
        return daemon

    yield start
    for daemon in started:
        daemon.kill()
        daemon.close()


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> DaemonProcess:
    """A small daemon: 64 MiB of RAM, 256 MiB of SSD."""
    return start_daemon(ram_size="64MiB", ssd_size="256MiB")
