"""A daemon whose disk is full, read-only, gone, exchanged, or was never there: it lives, serves from RAM, and says so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import omlxd
from omlxd.schema import SsdStats, Stats
from scripts.daemon_process import CHECKOUT, DaemonProcess
from tests.e2e.blocks import chain, payload
from tests.e2e.conftest import StartDaemon
from tests.omlxd.configured import ConfiguredDaemon, stats_of, wait_for

NBYTES = 200_000
BLOCKS = 5
MIB = 1 << 20

needs_mounts = [
    pytest.mark.root,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0,
        reason="NOT TESTED: full, read-only and vanishing disks need Linux and root, to mount file systems",
    ),
]


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"NOT TESTED: mount {' '.join(arguments)} is not allowed here: {done.stderr.strip()}")


def unmount(path: Path) -> None:
    subprocess.run(["umount", "-l", str(path)], capture_output=True, check=True)


class Disk:
    """A small file system that can be taken away and brought back: a bind mount of a tmpfs that stays elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.point = folder / "volume"
        self._kept = folder / "kept"
        self.point.mkdir()
        self._kept.mkdir()
        mount("-t", "tmpfs", "-o", "size=24m", "tmpfs", str(self._kept))

    def plug_in(self, how: str = "rw") -> None:
        mount("--bind", str(self._kept), str(self.point))
        self.remount(how)

    def pull_out(self) -> None:
        unmount(self.point)

    def remount(self, how: str) -> None:
        mount("-o", f"remount,bind,{how}", str(self.point))

    def throw_away(self) -> None:
        for path in (self.point, self._kept):
            while os.path.ismount(path):
                unmount(path)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path)
    yield made
    made.throw_away()


@pytest.fixture(autouse=True)
def _state_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def stats(daemon: DaemonProcess) -> Stats:
    with omlxd.connect(daemon.socket) as cache:
        return stats_of(cache)


def ssd(daemon: DaemonProcess) -> SsdStats:
    found = stats(daemon)["ssd"]
    assert found is not None
    return found


def store(daemon: DaemonProcess, number: int, *, flush: bool = True) -> list[bytes]:
    keys = chain(number, BLOCKS)
    with omlxd.connect(daemon.socket) as cache:
        space = cache.namespace(model="org/model", fingerprint="f")
        space.store_keys(keys, [payload(key, NBYTES) for key in keys])
        if flush:
            cache.call("flush", timeout=60)
    return keys


def have(daemon: DaemonProcess, keys: list[bytes]) -> int:
    """Load what there is, and look at every byte of it; how many blocks."""
    with omlxd.connect(daemon.socket) as cache:
        space = cache.namespace(model="org/model", fingerprint="f")
        with space.load_keys(keys, timeout=10) as lease:
            got = [bytes(block.view) for block in lease]
    assert got == [payload(key, NBYTES) for key in keys[: len(got)]]
    return len(got)


def flush(daemon: DaemonProcess) -> None:
    with omlxd.connect(daemon.socket) as cache:
        cache.call("flush", timeout=60)


def forget_ram(daemon: DaemonProcess) -> None:
    with omlxd.connect(daemon.socket) as cache:
        cache.call("clear", tier="ram", timeout=60)


def assert_works(daemon: DaemonProcess, number: int) -> None:
    """It stores, and serves what it has stored."""
    assert have(daemon, store(daemon, number)) == BLOCKS


# -- the file under a running daemon ----------------------------------------------------------------


def _delete(file: Path) -> None:
    file.unlink()


def _zero(file: Path) -> None:
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.write(bytes(size))


def _truncate(file: Path) -> None:
    os.truncate(file, 4096)


@pytest.mark.parametrize("harm", [_delete, _zero, _truncate])
def test_a_file_that_is_deleted_zeroed_or_cut_under_the_daemon_is_noticed_and_begun_anew(
    daemon: DaemonProcess, harm: Callable[[Path], None]
) -> None:
    keys = store(daemon, 1)
    pid = daemon.pid
    harm(daemon.directory / "store" / "data.mdb")
    assert have(daemon, keys) == BLOCKS, "RAM has it"
    wait_for(lambda: "is back, with" in daemon.log.read_text() and ssd(daemon)["state"] == "ok")
    assert_works(daemon, 2)
    forget_ram(daemon)
    assert have(daemon, chain(2, BLOCKS)) == BLOCKS, "the new file takes and gives"
    assert daemon.pid == pid
    assert have(daemon, keys) in (0, BLOCKS), "whole or not at all"


# -- the disk under a running daemon ------------------------------------------------------------------


class TestMounts:
    pytestmark = needs_mounts

    def test_a_full_disk_costs_old_blocks_only(self, disk: Disk, start_daemon: StartDaemon) -> None:
        disk.plug_in()
        daemon = start_daemon(ram_size="16MiB", ssd_size="200MiB", ssd_path=str(disk.point / "store"), ssd_codec="raw")
        (disk.point / "of-somebody-else").write_bytes(bytes(4 * MIB))
        for number in range(40):
            store(daemon, number, flush=number % 5 == 0)
        assert have(daemon, chain(39, BLOCKS)) == BLOCKS
        wait_for(lambda: ssd(daemon)["state"] == "ok")
        assert ssd(daemon)["blocks"] > 20
        assert_works(daemon, 100)
        assert "Traceback" not in daemon.log.read_text()

    def test_a_disk_that_comes_back_read_only_is_read(self, disk: Disk, start_daemon: StartDaemon) -> None:
        """(The kernel refuses to make a mount read-only under an open file; a disk with errors is mounted so again.)"""
        disk.plug_in()
        daemon = start_daemon(ram_size="64MiB", ssd_size="16MiB", ssd_path=str(disk.point / "store"))
        keys = store(daemon, 1)
        forget_ram(daemon)
        disk.pull_out()
        wait_for(lambda: ssd(daemon)["state"] == "gone")
        disk.plug_in("ro")
        wait_for(lambda: ssd(daemon)["state"] == "read-only")
        assert any("read-only" in warning for warning in stats(daemon)["warnings"])
        store(daemon, 2)
        assert have(daemon, keys) == BLOCKS, "from the SSD"
        assert have(daemon, chain(2, BLOCKS)) == BLOCKS, "from RAM"
        disk.remount("rw")
        wait_for(lambda: ssd(daemon)["state"] == "ok")
        flush(daemon)
        assert ssd(daemon)["blocks"] == 2 * BLOCKS
        assert "Traceback" not in daemon.log.read_text()

    def test_a_volume_that_goes_and_comes_back_is_used_again(self, disk: Disk, start_daemon: StartDaemon) -> None:
        disk.plug_in()
        daemon = start_daemon(ram_size="64MiB", ssd_size="16MiB", ssd_path=str(disk.point / "store"))
        keys = store(daemon, 1)
        forget_ram(daemon)
        disk.pull_out()
        wait_for(lambda: ssd(daemon)["state"] == "gone")
        assert any("gone" in warning for warning in stats(daemon)["warnings"])
        assert have(daemon, keys) == 0, "the SSD is not promised"
        assert_works(daemon, 2)
        assert not (disk.point / "store").exists(), "nothing is begun on the disk under the mount point"
        disk.plug_in()
        wait_for(lambda: ssd(daemon)["state"] == "ok")
        assert have(daemon, keys) == BLOCKS
        flush(daemon)
        assert ssd(daemon)["blocks"] == 2 * BLOCKS
        assert "Traceback" not in daemon.log.read_text()

    def test_a_volume_that_is_not_there_at_the_start_is_waited_for(self, disk: Disk, start_daemon: StartDaemon) -> None:
        disk.plug_in()
        settings = {"ram_size": "64MiB", "ssd_size": "16MiB", "ssd_path": str(disk.point / "store")}
        daemon = start_daemon(**settings)
        keys = store(daemon, 1)
        daemon.stop()
        disk.pull_out()
        daemon.start()
        assert stats(daemon)["ssd"] is None
        assert any(f"not mounted at {disk.point}" in warning for warning in stats(daemon)["warnings"])
        assert not (disk.point / "store").exists(), "nothing is begun on the disk under the mount point"
        assert have(daemon, store_without_ssd(daemon, 2)) == BLOCKS
        disk.plug_in()
        wait_for(lambda: stats(daemon)["ssd"])
        assert stats(daemon)["warnings"] == []
        assert have(daemon, keys) == BLOCKS, "what was stored before"
        flush(daemon)
        assert ssd(daemon)["blocks"] == 2 * BLOCKS
        forget_ram(daemon)
        assert have(daemon, chain(2, BLOCKS)) == BLOCKS, "what was stored meanwhile has been written"
        daemon.stop()
        daemon.start()
        assert have(daemon, chain(2, BLOCKS)) == BLOCKS
        assert "Traceback" not in daemon.log.read_text()

    def test_a_disk_that_is_read_only_at_the_start_is_read(self, disk: Disk, start_daemon: StartDaemon) -> None:
        disk.plug_in()
        daemon = start_daemon(ram_size="64MiB", ssd_size="16MiB", ssd_path=str(disk.point / "store"))
        keys = store(daemon, 1)
        daemon.stop()
        disk.remount("ro")
        daemon.start()
        assert ssd(daemon)["state"] == "read-only"
        assert have(daemon, keys) == BLOCKS
        disk.remount("rw")
        wait_for(lambda: ssd(daemon)["state"] == "ok")
        assert_works(daemon, 2)


def store_without_ssd(daemon: DaemonProcess, number: int) -> list[bytes]:
    return store(daemon, number, flush=False)


# -- settings and neighbours ------------------------------------------------------------------------------


def test_a_folder_that_can_t_be_made_yet_is_waited_for(tmp_path: Path, start_daemon: StartDaemon) -> None:
    """Three folders are missing: that is no fresh store but a volume that is not there."""
    wanted = tmp_path / "disk" / "a" / "b" / "store"
    daemon = start_daemon(ram_size="64MiB", ssd_size="64MiB", ssd_path=str(wanted))
    assert stats(daemon)["ssd"] is None
    assert any("as if its volume were not mounted" in warning for warning in stats(daemon)["warnings"])
    assert stats(daemon)["health"] == "trouble"
    store(daemon, 1, flush=False)
    wanted.parent.mkdir(parents=True)
    wait_for(lambda: stats(daemon)["ssd"])
    flush(daemon)
    assert ssd(daemon)["blocks"] == BLOCKS
    assert stats(daemon)["health"] == "ok"


def test_a_second_daemon_on_the_same_store_is_told_who_has_it(daemon: DaemonProcess, tmp_path: Path) -> None:
    other = DaemonProcess(tmp_path / "other", ssd_path=str(daemon.directory / "store"), ram_size="64MiB")
    try:
        done = serve(other)
    finally:
        other.close()
    assert done.returncode == 1
    assert f"process {daemon.pid}" in done.stderr
    assert "Traceback" not in done.stderr
    assert_works(daemon, 1)


@pytest.mark.parametrize("size", ["1MiB", "5", "4194303"])
def test_a_limit_that_is_too_small_for_any_store_is_a_configuration_error(tmp_path: Path, size: str) -> None:
    daemon = DaemonProcess(tmp_path / "daemon", ssd_size=size)
    try:
        done = serve(daemon)
    finally:
        daemon.close()
    assert done.returncode == 78
    assert f"ssd.size = '{size}'" in done.stderr
    assert "4.0 MiB are the least" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_share_of_the_volume_that_is_too_small_leaves_ram_alone(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(ram_size="64MiB", ssd_size="0.000001%")
    found = stats(daemon)
    assert found["ssd"] is None
    assert any("too full for an SSD tier" in warning for warning in found["warnings"])
    assert have(daemon, store_without_ssd(daemon, 1)) == BLOCKS


def test_a_size_that_is_corrected_while_the_daemon_runs_brings_the_tier(tmp_path: Path) -> None:
    daemon = ConfiguredDaemon(tmp_path / "daemon")
    try:
        daemon.set("ssd.size", '"0.000001%"')
        daemon.start()
        store_without_ssd(daemon, 1)
        assert stats(daemon)["ssd"] is None
        daemon.set("ssd.size", '"64MiB"')
        wait_for(lambda: stats(daemon)["ssd"])
        assert stats(daemon)["warnings"] == []
        flush(daemon)
        assert ssd(daemon)["blocks"] == BLOCKS
        assert ssd(daemon)["limit"] == 64 * MIB
    finally:
        daemon.kill()
        daemon.close()


def serve(daemon: DaemonProcess) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    daemon.directory.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "omlxd", "serve"],
        env=daemon.environment,
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
