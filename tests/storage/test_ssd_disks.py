"""Sick disks: full, read-only, gone and back. Real mounts, so root only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from omlxd.storage.ssd import SsdTier
from tests.storage.ssd_store import (
    assert_exact,
    chain_of,
    disk_usage,
    do_chores,
    key_of,
    open_tier,
    read_all,
    restore,
    spill,
)

MIB = 1 << 20

pytestmark = [
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
    subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    path = tmp_path / "volume"
    path.mkdir()
    mount("-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path))
    yield path
    while os.path.ismount(path):
        unmount(path)


def free_space(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def probe(tier: SsdTier) -> None:
    tier.observe(tier.probe())


def test_a_full_disk_trims_the_tier_and_never_loses_everything(volume: Path) -> None:
    tier = open_tier(volume / "store", limit=64 * MIB)  # free_space says "plenty": the disk itself has to refuse
    stored = 0
    for number in range(40):
        outcome = spill(tier, chain_of(number, [1 * MIB]))
        stored += outcome is not None and outcome.stored
        if tier.state == "full":
            break
    assert tier.state == "full"
    assert 15 < stored < 24
    assert read_all(tier) == stored, "what is there is served"
    assert not tier.writable
    for number in range(100, 130):
        probe(tier)
        do_chores(tier)
        spill(tier, chain_of(number, [1 * MIB]))
    assert tier.counts["state_ok"] > 0, "it got going again"
    assert any(key_of(number, 0) in tier for number in range(100, 130))
    assert len(tier) > 10
    assert_exact(tier)
    tier.close()


def test_a_disk_that_others_fill_is_left_alone_above_the_floor(volume: Path) -> None:
    tier = open_tier(volume / "store", limit=64 * MIB, min_free=6 * MIB, free_space=free_space)
    for number in range(30):
        spill(tier, chain_of(number, [1 * MIB]))
        assert free_space(volume) >= 6 * MIB
    (volume / "other").write_bytes(bytes(5 * MIB))
    probe(tier)
    do_chores(tier)
    assert free_space(volume) >= 6 * MIB
    assert tier.state == "ok"
    assert len(tier) >= 8
    assert_exact(tier)
    tier.close()


def test_a_mount_that_turns_read_only_is_served_from_and_written_to_again_later(volume: Path) -> None:
    tier = open_tier(volume / "store", limit=16 * MIB)
    spill(tier, chain_of("a", [300_000] * 3))
    # A file system is made read-only under open files by the kernel only, after an error; here by a bind mount of the same one.
    tier.close()
    mount("-o", "remount,ro", str(volume))
    tier = open_tier(volume / "store", limit=16 * MIB)
    assert tier.state == "read-only"
    assert "read-only" in tier.reason
    assert not tier.writable
    assert read_all(tier) == 3
    assert spill(tier, chain_of("b", [1000])) is None
    assert tier.counts["declined_read-only"] == 1
    probe(tier)
    assert tier.state == "read-only"
    mount("-o", "remount,rw", str(volume))
    probe(tier)
    assert tier.state == "ok", tier.reason
    spill(tier, chain_of("b", [1000]))
    assert read_all(tier) == 4
    tier.close()


def test_an_empty_read_only_disk_is_an_error_of_the_disk(volume: Path) -> None:
    mount("-o", "remount,ro", str(volume))
    with pytest.raises(OSError, match="Read-only file system"):
        open_tier(volume / "store")


def test_a_volume_that_vanishes_is_said_to_be_gone_and_taken_up_again(tmp_path: Path, volume: Path) -> None:
    point = tmp_path / "point"
    point.mkdir()
    mount("--bind", str(volume), str(point))
    try:
        tier = open_tier(point / "store", limit=16 * MIB)
        metas = chain_of("a", [300_000] * 3)
        spill(tier, metas)
        unmount(point)
        probe(tier)
        assert tier.state == "gone"
        assert all(meta.key not in tier for meta in metas)
        assert spill(tier, chain_of("b", [1000])) is None
        probe(tier)
        assert tier.state == "gone"
        assert not (point / "store").exists(), "no store is begun on the disk under the mount point"
        mount("--bind", str(volume), str(point))
        probe(tier)
        assert tier.state == "ok", tier.reason
        assert read_all(tier) == 3
        spill(tier, chain_of("b", [1000]))
        assert restore(tier, key_of("b", 0))
        assert disk_usage(point / "store") == tier.used_bytes
        tier.close()
    finally:
        unmount(point)


def test_a_mount_point_with_a_folder_of_the_same_name_is_not_mistaken_for_the_volume(
    tmp_path: Path, volume: Path
) -> None:
    point = tmp_path / "point"
    (point / "store").mkdir(parents=True)
    mount("--bind", str(volume), str(point))
    try:
        tier = open_tier(point / "store", limit=16 * MIB)
        spill(tier, chain_of("a", [300_000]))
        unmount(point)
        probe(tier)
        probe(tier)
        assert tier.state == "gone"
        assert "not the volume" in tier.reason
        assert list((point / "store").iterdir()) == []
        tier.close()
    finally:
        unmount(point)
