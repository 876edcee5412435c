"""What happens rarely: no descriptors left, one client too many, a socket file that somebody deletes, frames at their limit."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

import omlxd
from scripts.daemon_process import DaemonProcess
from tests.e2e.blocks import chain, payload
from tests.e2e.conftest import StartDaemon


def space_of(cache: omlxd.Cache) -> omlxd.Space:
    return cache.namespace(model="org/odd", fingerprint="f", block_tokens=16)


def soon(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def answers(daemon: DaemonProcess) -> bool:
    try:
        with omlxd.connect(daemon.socket, timeout=1.0) as cache:
            return bool(cache.stats())
    except omlxd.Unavailable:
        return False


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of another process can be set on Linux only")
def test_out_of_descriptors_newcomers_wait_and_the_log_is_not_flooded(daemon: DaemonProcess) -> None:
    with omlxd.connect(daemon.socket) as cache:
        hashes = chain(1, 4)
        space = space_of(cache)
        space.store_keys(hashes, [payload(key, 5000) for key in hashes])
        most = len(os.listdir(f"/proc/{daemon.pid}/fd")) + 2
        limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (most, limits[1]))
        with ExitStack() as stack:
            for _ in range(6):
                stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(daemon.socket))
            time.sleep(2.5)
            assert 1 <= daemon.log.read_text().count("could not be accepted") <= 5
            with space.load_keys(hashes) as lease:
                assert [bytes(block.view) for block in lease] == [payload(key, 5000) for key in hashes]
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)
        assert soon(lambda: answers(daemon))


def test_one_client_too_many_is_told_why(daemon: DaemonProcess) -> None:
    with ExitStack() as stack:
        for _ in range(512):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(daemon.socket))
        with pytest.raises(omlxd.Unavailable, match="512 clients are connected"):
            omlxd.connect(daemon.socket)


def test_what_does_not_fit_a_frame_is_refused_as_the_daemon_would_and_what_can_be_put_can_be_got(
    daemon: DaemonProcess,
) -> None:
    with omlxd.connect(daemon.socket) as cache:
        space = space_of(cache)
        key, other = chain(2, 2)
        most = (64 << 20) - 1024
        assert space.put(key, bytes(most))
        assert space.get(key) == bytes(most)
        for too_large in (most + 1, 65 << 20):
            with pytest.raises(omlxd.Refused, match="bytes"):
                space.put(other, bytes(too_large))
        assert space.get(key) is not None, "the connection goes on"


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_socket_file_that_was_deleted_is_made_again(start_daemon: StartDaemon, what: str) -> None:
    daemon = start_daemon()
    with omlxd.connect(daemon.socket) as before:
        if what == "file":
            daemon.socket.unlink()
        else:
            shutil.rmtree(daemon.socket.parent)
        assert soon(lambda: answers(daemon))
        assert before.stats(), "who was connected stays so"
    again = subprocess.run(
        [sys.executable, "-m", "omlxd", "serve"],
        env=daemon.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert again.returncode == 1
    assert f"pid {daemon.pid}" in again.stderr
    assert answers(daemon)


def test_a_pipe_in_the_place_of_the_configuration_holds_up_nobody(
    start_daemon: StartDaemon, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("config") / "config.toml"
    daemon = start_daemon(config=str(file))
    with omlxd.connect(daemon.socket) as cache:
        os.mkfifo(file)
        assert soon(lambda: any("not a regular file" in text for text in cache.stats()["warnings"]))


def test_a_crowd_of_newcomers_is_waited_for_and_a_stopped_daemon_is_named(daemon: DaemonProcess) -> None:
    os.kill(daemon.pid, signal.SIGSTOP)
    with ExitStack() as stack:
        try:
            while True:
                newcomer = stack.enter_context(socket.socket(socket.AF_UNIX))
                newcomer.setblocking(False)
                newcomer.connect(str(daemon.socket))
        except BlockingIOError:
            pass  # the queue is full
        with pytest.raises(omlxd.Unavailable, match="takes no more connections"):
            omlxd.connect(daemon.socket, timeout=0.2)
        timer = threading.Timer(0.5, os.kill, (daemon.pid, signal.SIGCONT))
        timer.start()
        assert answers(daemon), "it is waited for"
        timer.join()


def test_a_size_that_depends_on_a_disk_which_has_gone_is_refused_and_the_rest_applied(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    file = tmp_path / "config" / "config.toml"
    file.write_text('[ssd]\nmin_free = "0"\n')
    daemon = DaemonProcess(tmp_path / "daemon", config=str(file))
    daemon._settings = {name: value for name, value in daemon._settings.items() if name != "ssd_min_free"}
    with daemon, omlxd.connect(daemon.socket) as cache:
        shutil.rmtree(daemon.directory / "store")
        file.write_text('[ram]\npolicy = "arc"\n[ssd]\nmin_free = "1MiB"\npolicy = "arc"\n')
        outcome = cache.call("reload")
        assert {"ram.policy", "ssd.policy"} <= set(outcome["applied"])
        assert "disk" in outcome["refused"]["ssd.min_free"]
        assert "Traceback" not in daemon.log.read_text()
