"""verify, gc, compact, export and import."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from omlxd.storage.ssd import ArchiveBroken, Missing, SsdError, SsdTier
from omlxd.storage.ssd_data_file import DATA_NAME
from omlxd.storage.ssd_verify import VerifyReport
from tests.storage.ssd_store import (
    NAMESPACE,
    OTHER,
    assert_exact,
    chain_of,
    disk_usage,
    do_chores,
    key_of,
    open_tier,
    payload_of,
    restore,
    spill,
    spill_in_groups,
)
from tests.storage.test_ssd_damage import harm_payload

MIB = 1 << 20


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SsdTier]:
    opened = open_tier(tmp_path / "store", limit=32 * MIB, codec="zstd-planes")
    yield opened
    opened.close(clean=False)


# -- verify ---------------------------------------------------------------------------------------


def test_verify_reads_every_record_and_names_the_damaged_ones(tier: SsdTier) -> None:
    metas = chain_of("a", [300_000] * 10)
    spill(tier, metas)
    report = tier.verify()
    assert (report.blocks, report.stored_bytes, report.damaged, report.trouble) == (10, 3_000_000, [], "")
    for at in (3, 7):
        harm_payload(tier, metas[at].key, 1234)
    report = tier.verify()
    assert sorted(key for key, _ in report.damaged) == sorted(metas[at].key for at in (3, 7))
    assert all("checksum" in reason for _, reason in report.damaged)
    for key, reason in report.damaged:
        tier.damaged(key, reason)
    do_chores(tier)
    assert tier.verify().damaged == []
    assert_exact(tier)


def test_verify_can_be_ended_and_resumed(tier: SsdTier) -> None:
    spill(tier, chain_of("a", [1000] * 600))
    first = tier.verify(progress=lambda report: report.blocks < 250)
    assert first.blocks == 250
    second = tier.verify(after=first.resume_after)
    assert second.blocks == 350
    assert second.resume_after == b""


def test_verify_can_be_slowed_down(tier: SsdTier) -> None:
    from omlxd.storage.ssd_verify import verify

    spill(tier, chain_of("a", [100_000] * 10))
    slept: list[float] = []
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(seconds)

    verify(tier._environment, tier._reader, bytes_per_second=500_000, timer=lambda: now, sleep=sleep)
    assert sum(slept) == pytest.approx(2.0)


def test_verify_of_a_disk_that_is_gone_says_so(tier: SsdTier) -> None:
    spill(tier, chain_of("a", [100_000] * 3))

    def remove(report: VerifyReport) -> bool:
        (tier.path / DATA_NAME).unlink(missing_ok=True)
        return True

    report = tier.verify(progress=remove)
    assert report.blocks == 3, "what is open can be read"
    assert "deleted" in report.trouble


# -- gc and compact -------------------------------------------------------------------------------


def test_a_dry_run_tells_what_will_leave_and_changes_nothing(tier: SsdTier) -> None:
    old, new = chain_of("old", [1 * MIB] * 10), chain_of("new", [1 * MIB] * 10, OTHER)
    spill_in_groups(tier, old)
    spill_in_groups(tier, new)
    assert tier.forecast().blocks == 0
    tier.limit = 16 * MIB
    forecast = tier.forecast()
    before = disk_usage(tier.path)
    assert len(tier) == 20
    assert set(forecast.by_namespace) == {NAMESPACE}
    assert forecast.stored_bytes == forecast.by_namespace[NAMESPACE] == forecast.blocks * MIB
    do_chores(tier)
    assert 20 - len(tier) == forecast.blocks
    assert [meta.position for meta in old if meta.key in tier] == list(range(10 - forecast.blocks)), "tails first"
    if tier.counts["returned_bytes"]:
        assert abs(before - disk_usage(tier.path) - forecast.returned_bytes) < MIB


def test_collect_gives_free_pages_back(tier: SsdTier) -> None:
    spill_in_groups(tier, chain_of("a", [1 * MIB] * 20))
    tier.discard([key_of("a", at) for at in range(5, 20)], "removed")
    tier.collect()
    do_chores(tier)
    if not tier.counts["returned_bytes"]:
        pytest.skip("this file system cannot make holes in files")
    assert disk_usage(tier.path) == tier.used_bytes < 7 * MIB
    assert_exact(tier)


def test_a_rewrite_makes_the_file_itself_small_while_it_is_read_from(tier: SsdTier) -> None:
    spill_in_groups(tier, chain_of("a", [1 * MIB] * 20))
    tier.discard([key_of("a", at) for at in range(5, 20)], "removed")
    do_chores(tier)
    keys = [key_of("a", at) for at in range(5)]
    stop = threading.Event()
    served = 0
    wrong: list[bytes] = []

    def keep_reading() -> None:
        nonlocal served
        buffer = bytearray(1 * MIB)
        while not stop.is_set():
            for key in keys:
                try:
                    tier.read_into(key, memoryview(buffer))
                except Missing:
                    continue  # the file was being exchanged
                served += 1
                if buffer != payload_of(key, 1 * MIB):
                    wrong.append(key)

    reader = threading.Thread(target=keep_reading)
    reader.start()
    try:
        for _ in range(5):
            tier.rewrite()
    finally:
        stop.set()
        reader.join()
    assert served > 0
    assert wrong == []
    assert (tier.path / DATA_NAME).stat().st_size < 7 * MIB
    tier.observe(tier.probe())
    assert_exact(tier)
    spill_in_groups(tier, chain_of("b", [1 * MIB] * 10))
    assert_exact(tier)


def test_a_rewrite_that_would_cross_the_limit_is_refused(tier: SsdTier) -> None:
    spill_in_groups(tier, chain_of("a", [1 * MIB] * 20))
    with pytest.raises(SsdError, match="does not fit the limit"):
        tier.rewrite()
    assert_exact(tier)


def test_an_unfinished_copy_is_removed_at_the_start(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    spill(tier, chain_of("a", [1000]))
    tier.close(clean=False)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / DATA_NAME).write_bytes(b"half")
    tier = open_tier(tmp_path)
    assert not (tmp_path / "copy").exists()
    assert len(tier) == 1
    tier.close()


# -- archives -------------------------------------------------------------------------------------


def filled(tier: SsdTier) -> Path:
    tier.register_namespace(NAMESPACE, {"model": "org/name"})
    tier.register_namespace(OTHER, {"model": "org/other"})
    spill_in_groups(tier, chain_of("a", [300_000] * 5))
    spill_in_groups(tier, chain_of("b", [70_000] * 5, OTHER))
    file = tier.path.parent / "blocks.omlxd"
    assert tier.export(sorted(tier.entries), file) == 10
    return file


def test_what_was_exported_is_imported_byte_for_byte_into_an_empty_store(tier: SsdTier, tmp_path: Path) -> None:
    file = filled(tier)
    assert file.stat().st_mode & 0o777 == 0o600
    other = open_tier(tmp_path / "other", codec="raw")
    assert other.import_(file) == 10
    assert_exact(other)
    assert {space.id: space.descriptor for space in other.namespaces()} == {
        NAMESPACE: {"model": "org/name"},
        OTHER: {"model": "org/other"},
    }
    for key, entry in tier.entries.items():
        twin = other.meta(key)
        assert twin is not None
        assert (twin.parent, twin.position, twin.stored_bytes) == (entry.parent, entry.position, entry.stored_bytes)
    assert other.import_(file) == 0, "what is there is not written again"
    other.close()


def test_a_chain_is_exported_from_its_head(tier: SsdTier, tmp_path: Path) -> None:
    filled(tier)
    assert tier.chain(key_of("a", 2)) == [key_of("a", at) for at in range(3)]
    assert tier.chain(key_of("nobody", 0)) == []
    assert tier.export(tier.chain(key_of("a", 2)), tmp_path / "chain") == 3


def test_damaged_records_are_left_out_of_an_export(tier: SsdTier, tmp_path: Path) -> None:
    filled(tier)
    harm_payload(tier, key_of("a", 1), 100)
    assert tier.export(sorted(tier.entries), tmp_path / "file") == 9


@pytest.mark.parametrize("harm", ["cut", "flip", "longer", "empty", "foreign", "missing_end"])
def test_an_archive_that_is_not_whole_gives_nothing(tier: SsdTier, tmp_path: Path, harm: str) -> None:
    file = filled(tier)
    data = file.read_bytes()
    if harm == "cut":
        data = data[: len(data) // 2]
    elif harm == "flip":
        at = random.Random(1).randrange(len(data))
        data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    elif harm == "longer":
        data += b"x"
    elif harm == "empty":
        data = b""
    elif harm == "foreign":
        data = b"PK\x03\x04" + data
    else:
        import xxhash

        whole = data[:-100]
        data = whole + xxhash.xxh3_128_digest(whole)
    file.write_bytes(data)
    other = open_tier(tmp_path / "other")
    with pytest.raises(ArchiveBroken, match=file.name):
        other.import_(file)
    assert len(other) == 0
    other.close()


def test_an_export_that_fails_leaves_no_file(tier: SsdTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tier)
    target = tmp_path / "folder"
    target.mkdir()

    def failing(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="No space"):
        tier.export(sorted(tier.entries), target / "file")
    assert list(target.iterdir()) == []


def test_an_import_keeps_to_the_limit(tier: SsdTier, tmp_path: Path) -> None:
    spill_in_groups(tier, chain_of("a", [1 * MIB] * 20))
    file = tmp_path / "file"
    tier.export(tier.chain(key_of("a", 19)), file)
    small = open_tier(tmp_path / "small", limit=8 * MIB)
    small.import_(file)
    assert disk_usage(small.path) <= 8 * MIB
    assert len(small) >= 5
    assert restore(small, key_of("a", 0)) == payload_of(key_of("a", 0), 1 * MIB), "the head is worth most"
    small.close()
