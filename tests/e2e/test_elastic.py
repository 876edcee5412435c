"""The RAM tier grows and shrinks while it serves; memory is measured from outside."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import omlxd
from scripts.daemon_process import CHECKOUT, DaemonProcess
from tests.e2e.blocks import chain, payload

MIB = 1 << 20
NBYTES = MIB

GROUPS = Path("/sys/fs/cgroup")

IN_GROUP = """
import sys
from pathlib import Path
def into_group():
    Path(sys.argv[1], "cgroup.procs").write_text("0")
"""
FILLER = """
import omlxd
from tests.e2e.blocks import chain, payload
with omlxd.connect(sys.argv[2]) as cache:
    keys = chain(5, 160)
    space = cache.namespace(model="elastic", fingerprint="f")
    into_group()
    print(space.store_keys(keys, [payload(key, 1 << 20) for key in keys], timeout=30.0).stored)
"""
BALLAST = """
from omlxd.storage.control_group import within
into_group()
held = []
while within(1 << 50, 1 << 50)[1] > 12 << 20:
    held.append(b"x" * (1 << 20))
print("full", flush=True)
sys.stdin.read()
"""


def _is_empty(file: Path) -> bool:
    return not file.read_text()


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with 384 MiB, in which everything that a test starts may use up all there is."""
    for parent, limit in ((GROUPS, "memory.max"), (GROUPS / "memory", "memory.limit_in_bytes")):
        folder = parent / f"omlxd-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            members = folder / "cgroup.procs"
            if (folder / limit).exists() and members.exists():  # else it is a folder like any other
                (folder / limit).write_text(str(384 * MIB))
                yield folder
                until(partial(_is_empty, members), "somebody is left in the group")
                folder.rmdir()
                return
            folder.rmdir()
    pytest.skip(
        "no control group with a limit of its own can be made here (that takes root, and a writable /sys/fs/cgroup)"
    )


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def shared_memory(pid: int) -> int:
    """Bytes of memory behind the segments of a daemon, whoever maps them."""
    total = 0
    seen = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            path = f"/proc/{pid}/fd/{name}"
            if "omlxd-segment" in os.readlink(path):
                status = os.stat(path)
                if status.st_ino not in seen:
                    seen.add(status.st_ino)
                    total += status.st_blocks * 512
        except OSError:
            continue
    return total


def mapped_shared(pid: int) -> int:
    """What the system says that a process has of shared memory, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssShmem in /proc")


def until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def fill(space: omlxd.Space, seed: int, blocks: int) -> list[bytes]:
    keys = chain(seed, blocks)
    result = space.store_keys(keys, [payload(key, NBYTES) for key in keys], timeout=30.0)
    assert result.stored == blocks, result
    return keys


def test_a_smaller_budget_gives_memory_back_and_a_larger_one_takes_it_again(tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path, ram_size="192MiB", ssd_size="1GiB", ram_segment="64MiB") as daemon,
        omlxd.connect(daemon.socket) as cache,
    ):
        space = cache.namespace(model="elastic", fingerprint="f")
        keys = fill(space, 1, 160)
        with space.load_keys(keys) as lease:
            assert len([block.view for block in lease]) == 160, "this process has all of it mapped"
        assert shared_memory(daemon.pid) >= 160 * MIB
        cache.call("resize", ram_bytes=48 * MIB)
        until(lambda: shared_memory(daemon.pid) <= 48 * MIB, "the memory does not go back")
        until(lambda: mapped_shared(daemon.pid) <= 49 * MIB, "the daemon keeps it")
        until(lambda: mapped_shared(os.getpid()) <= 97 * MIB, "this process, which has all mapped twice, keeps it")
        cache.call("resize", ram_bytes=192 * MIB)
        with space.load_keys(keys) as lease:
            for block in lease:
                assert bytes(block.view) == payload(block.key, NBYTES)
            assert len(lease) == 160, lease.stopped
        assert shared_memory(daemon.pid) > 100 * MIB


def test_leased_blocks_outlast_a_smaller_budget(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, ram_size="96MiB", ssd_size="512MiB") as daemon, omlxd.connect(daemon.socket) as cache:
        space = cache.namespace(model="elastic", fingerprint="f")
        keys = fill(space, 2, 64)
        with space.load_keys(keys) as lease:
            views = [block.view for block in lease]
            cache.call("resize", ram_bytes=16 * MIB)
            others = chain(3, 20)
            space.store_keys(others, [payload(key, NBYTES) for key in others], timeout=0.2)
            for key, view in zip(keys, views, strict=True):
                assert bytes(view) == payload(key, NBYTES)
            lease.check()
            assert shared_memory(daemon.pid) >= 64 * MIB
        until(lambda: shared_memory(daemon.pid) <= 16 * MIB, "what was leased does not go back")


def test_the_memory_of_a_cleared_tier_goes_back_though_engines_have_it_mapped(tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path, ram_size="128MiB", ssd_size="0", ram_segment="32MiB") as daemon,
        omlxd.connect(daemon.socket) as cache,
    ):
        space = cache.namespace(model="elastic", fingerprint="f")
        keys = fill(space, 4, 100)
        with space.load_keys(keys) as lease:
            assert sum(len(bytes(block.view)) for block in lease) == 100 * MIB
        cache.call("clear")
        until(lambda: shared_memory(daemon.pid) == 0, "the daemon keeps memory")
        until(lambda: mapped_shared(os.getpid()) < MIB, "this process keeps memory")


def test_where_others_use_up_all_memory_the_tier_gives_way(tmp_path: Path, group: Path) -> None:
    """For real: a process takes what is left in a control group until there is next to none."""
    with DaemonProcess(tmp_path, ram_size="192MiB", ssd_size="1GiB", ram_segment="64MiB") as daemon:
        (group / "cgroup.procs").write_text(str(daemon.pid))
        filler = subprocess.run(
            [sys.executable, "-c", IN_GROUP + FILLER, str(group), str(daemon.socket)],
            cwd=CHECKOUT,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert filler.stdout == "160\n"
        assert shared_memory(daemon.pid) >= 160 * MIB
        ballast = subprocess.Popen(
            [sys.executable, "-c", IN_GROUP + BALLAST, str(group)],
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert ballast.stdout is not None
            assert ballast.stdout.readline() == b"full\n"
            until(lambda: shared_memory(daemon.pid) <= 121 * MIB, "it does not give way")
            with omlxd.connect(daemon.socket) as cache:
                stats = cache.stats()
                assert stats["ram"]["limit"] < 128 * MIB
                assert any("short of memory" in warning for warning in stats["warnings"])
                keys = chain(5, 160)
                with cache.namespace(model="elastic", fingerprint="f").load_keys(keys, timeout=20.0) as lease:
                    read = [bytes(block.view) == payload(block.key, NBYTES) for block in lease]
                assert all(read)
                assert len(read) >= 40, "what fits is served, from RAM and the SSD"
            assert ballast.poll() is None, "the system had to end nobody"
        finally:
            ballast.kill()
            ballast.wait()
            daemon.stop()
