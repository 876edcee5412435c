"""What happens to files: bits that flip, files that are cut, swapped, zeroed, deleted."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from omlxd.storage import ssd_reader
from omlxd.storage.ssd import Damaged, DiskTrouble, Missing, SsdError, SsdTier
from omlxd.storage.ssd_data_file import DATA_NAME
from omlxd.storage.ssd_payload import locate
from omlxd.storage.ssd_transaction import WriteTransaction
from tests.storage.damage_ssd import LIMIT
from tests.storage.ssd_store import (
    assert_exact,
    chain_of,
    disk_usage,
    do_chores,
    key_of,
    open_tier,
    payload_of,
    read_all,
    restore,
    spill,
)

MIB = 1 << 20
LONG = os.environ.get("OMLXD_LONG") == "1"


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SsdTier]:
    opened = open_tier(tmp_path / "store", limit=32 * MIB)
    yield opened
    opened.close(clean=False)


def harm_payload(tier: SsdTier, key: bytes, at: int) -> None:
    """Flip one bit of a stored payload, on the disk."""
    located = locate(tier._environment, key)
    assert located is not None
    for place in located.places:
        # The end of a payload may be kept within a tree's page.
        data = (tier.path / DATA_NAME).read_bytes() if isinstance(place, bytes) else b""
        offset, length = (data.rindex(place), len(place)) if isinstance(place, bytes) else place
        if at < length:
            with open(tier.path / DATA_NAME, "r+b") as file:
                file.seek(offset + at)
                byte = file.read(1)[0]
                file.seek(offset + at)
                file.write(bytes([byte ^ 0x10]))
            return
        at -= length


@pytest.mark.parametrize("codec", ["raw", "zstd", "zstd-planes"])
@pytest.mark.parametrize("at", [0, 70_000, 299_999])
def test_a_flipped_bit_is_never_served_and_the_record_never_again(tmp_path: Path, codec: str, at: int) -> None:
    tier = open_tier(tmp_path, codec=codec)
    metas = chain_of("a", [300_000] * 3)
    spill(tier, metas)
    harm_payload(tier, metas[1].key, at)
    with pytest.raises(Damaged, match="checksum") as caught:
        restore(tier, metas[1].key)
    tier.damaged(metas[1].key, caught.value.reason)
    assert metas[1].key not in tier
    do_chores(tier)
    assert_exact(tier)
    assert (tier.counts["damaged"], tier.counts["damaged_bytes"]) == (1, 300_000)
    (entry,) = tier.quarantined()
    assert (entry.key, entry.stored_bytes) == (metas[1].key, 300_000)
    assert "checksum" in entry.reason
    tier.close()
    tier = open_tier(tmp_path)
    assert metas[1].key not in tier
    assert len(tier.quarantined()) == 1
    spill(tier, [metas[1]])
    assert restore(tier, metas[1].key) == payload_of(metas[1].key, 300_000), "fresh bytes are welcome"
    tier.close()


def test_the_quarantine_is_bounded(tier: SsdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omlxd.storage.ssd_commit.MAX_QUARANTINE", 5)
    metas = chain_of("a", [1000] * 12)
    spill(tier, metas)
    for meta in metas:
        tier.damaged(meta.key, "a test says so")
        do_chores(tier)
    assert [entry.key for entry in tier.quarantined()] == [meta.key for meta in metas[-5:]]
    assert tier.counts["damaged"] == 12


def test_two_swapped_records_are_both_noticed(tier: SsdTier) -> None:
    one, two = chain_of("a", [5000, 5000])
    spill(tier, [one, two])
    environment = tier._environment
    with WriteTransaction(environment) as txn:
        packed = [txn.get(environment.blocks, meta.key) for meta in (one, two)]
        assert packed[0] is not None
        assert packed[1] is not None
        txn.put(environment.blocks, one.key, packed[1])
        txn.put(environment.blocks, two.key, packed[0])
    for meta in (one, two):
        with pytest.raises(Damaged, match="another key"):
            restore(tier, meta.key)


def test_two_swapped_payloads_are_both_noticed(tier: SsdTier) -> None:
    one, two = chain_of("a", [5000, 5000])
    spill(tier, [one, two])
    environment = tier._environment
    with WriteTransaction(environment) as txn:
        pieces = [txn.get(environment.pieces, meta.key + bytes(4)) for meta in (one, two)]
        assert pieces[0] is not None
        assert pieces[1] is not None
        txn.put(environment.pieces, one.key + bytes(4), pieces[1])
        txn.put(environment.pieces, two.key + bytes(4), pieces[0])
    for meta in (one, two):
        with pytest.raises(Damaged, match="checksum"):
            restore(tier, meta.key)


def test_a_record_that_vanished_from_the_disk_is_damage_one_that_was_evicted_is_a_miss(tier: SsdTier) -> None:
    one, two = chain_of("a", [5000, 5000])
    spill(tier, [one, two])
    with WriteTransaction(tier._environment) as txn:
        txn.delete_block(one.key)
    with pytest.raises(Damaged, match="gone from the disk"):
        restore(tier, one.key)
    tier.discard([two.key], "removed")
    do_chores(tier)
    with pytest.raises(Missing):
        tier.read_into(two.key, memoryview(bytearray(5000)))


def test_a_record_that_cannot_be_read_at_the_start_is_quarantined_and_the_rest_stays(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    metas = chain_of("a", [5000] * 4)
    spill(tier, metas)
    environment = tier._environment
    with WriteTransaction(environment) as txn:
        packed = txn.get(environment.blocks, metas[3].key)
        assert packed is not None
        txn.put(environment.blocks, metas[3].key, packed[:-1] + b"?")
    tier.close(clean=False)
    tier = open_tier(tmp_path)
    assert [meta.position for meta in metas if meta.key in tier] == [0, 1, 2]
    do_chores(tier)
    assert_exact(tier)
    assert tier.counts["damaged"] == 1
    assert [entry.key for entry in tier.quarantined()] == [metas[3].key]
    tier.close()


def test_a_read_that_races_with_an_eviction_is_a_miss_and_no_damage(
    tier: SsdTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place was looked up, then the record left and its pages were used again, then the bytes are read."""
    (meta,) = chain_of("a", [2 * MIB])
    spill(tier, [meta])
    located = locate(tier._environment, meta.key)

    def locate_and_lose(environment: object, key: bytes) -> object:
        tier.discard([key], "removed")
        do_chores(tier)
        for number in range(12):
            spill(tier, chain_of(number, [2 * MIB]))
        return located

    monkeypatch.setattr(ssd_reader, "locate", locate_and_lose)
    with pytest.raises(Missing, match="left the SSD while it was read"):
        tier.read_into(meta.key, memoryview(bytearray(2 * MIB)))


# -- files, while the store is open -----------------------------------------------------------------


@pytest.mark.parametrize("harm", ["delete", "replace_by_zeros", "zeros", "cut", "empty", "garbage"])
def test_a_data_file_that_is_harmed_under_a_running_tier_costs_its_records_and_nothing_else(
    tmp_path: Path, harm: str
) -> None:
    tier = open_tier(tmp_path)
    spill(tier, chain_of("a", [300_000] * 5))
    data = tmp_path / DATA_NAME
    size = data.stat().st_size
    if harm == "delete":
        data.unlink()
    elif harm == "replace_by_zeros":
        data.unlink()
        data.write_bytes(bytes(size))
    elif harm in ("cut", "empty"):
        os.truncate(data, size // 2 if harm == "cut" else 0)
    else:
        with open(data, "r+b") as file:
            file.write(bytes(size) if harm == "zeros" else random.Random(1).randbytes(size))
    if harm in ("delete", "replace_by_zeros"):  # what is open is still the file
        assert restore(tier, key_of("a", 4)) == payload_of(key_of("a", 4), 300_000)
    else:
        with pytest.raises((Missing, Damaged)):
            restore(tier, key_of("a", 4))
    outcome = spill(tier, chain_of("b", [300_000]))
    assert outcome is not None
    assert not outcome.stored
    assert tier.state == "gone"
    assert not tier.writable
    assert key_of("a", 4) not in tier, "a lookup does not promise what cannot be had"
    assert tier.plan([]) is None
    tier.observe(tier.probe())
    assert tier.state == "ok", tier.reason
    assert len(tier) == 0
    spill(tier, chain_of("b", [300_000]))
    assert read_all(tier) == 1
    assert abs(disk_usage(tmp_path) - tier.used_bytes) <= 4096
    tier.close()


def test_a_failing_read_is_a_miss_that_leaves_the_record_alone(tier: SsdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    (meta,) = chain_of("a", [300_000])
    spill(tier, [meta])

    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(DiskTrouble, match="Input/output error"):
            tier.read_into(meta.key, memoryview(bytearray(300_000)))
    assert restore(tier, meta.key) == payload_of(meta.key, 300_000)


# -- files, while nobody has the store open -----------------------------------------------------------


def make_store(path: Path) -> None:
    tier = open_tier(path, limit=LIMIT)
    for chain in range(15):
        rng = random.Random(chain)
        spill(tier, chain_of(chain, [rng.randrange(1, 200_000) for _ in range(5)]))
    for chain in range(15, 60):
        spill(tier, chain_of(chain, [500] * 5))
    tier.close()


@pytest.mark.parametrize("harm", ["garbage", "zeros", "cut", "empty_head", "version", "directory"])
def test_a_broken_store_is_moved_aside_within_the_limit_and_the_start_is_cold(tmp_path: Path, harm: str) -> None:
    make_store(tmp_path)
    data = tmp_path / DATA_NAME
    size = data.stat().st_size
    if harm == "garbage":
        data.write_bytes(random.Random(2).randbytes(size))
    elif harm == "zeros":
        data.write_bytes(bytes(size))
    elif harm == "cut":
        os.truncate(data, size // 3)
    elif harm == "empty_head":
        with open(data, "r+b") as file:
            file.write(bytes(8192))
    elif harm == "version":
        import lmdb

        with lmdb.open(str(tmp_path), max_dbs=8, map_size=LIMIT) as env, env.begin(write=True) as txn:
            txn.put(b"format", b"from the future", db=env.open_db(b"meta", txn=txn))
    else:
        data.unlink()
        data.mkdir()
    tier = open_tier(tmp_path, limit=LIMIT)
    assert str(tmp_path) in tier.aside
    assert len(tier) == 0
    assert (tmp_path / "set-aside").exists()
    assert disk_usage(tmp_path) == tier.used_bytes <= LIMIT
    for number in range(25):
        spill(tier, chain_of(("new", number), [1 * MIB]))
        assert disk_usage(tmp_path) <= LIMIT
    assert_exact(tier)
    tier.close()
    tier = open_tier(tmp_path, limit=LIMIT)
    assert tier.aside == ""
    assert len(tier) > 10
    tier.close()


def test_a_tree_that_another_program_damaged_is_found_when_nothing_is_written(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    spill(tier, chain_of("a", [5000] * 20))
    root = tier._environment.read(lambda reading: reading.tree(tier._environment.blocks))
    assert root is not None
    with open(tmp_path / DATA_NAME, "r+b") as file:
        file.seek(root.root * tier._environment.header.page_bytes + 12)
        file.write(b"\xff\xff")
    tier.observe(tier.probe())
    assert tier.state == "gone"
    assert "structure is damaged" in tier.reason
    tier.observe(tier.probe())
    assert (tier.state, len(tier)) == ("ok", 0)
    assert "structure is damaged" in tier.aside
    spill(tier, chain_of("b", [5000]))
    assert read_all(tier) == 1
    tier.close()


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "owner", "ballast", "CACHEDIR.TAG", "set-aside", "copy"])
def test_a_link_in_a_files_place_is_refused_and_nothing_is_made_where_it_leads(tmp_path: Path, name: str) -> None:
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    store.mkdir()
    (store / name).symlink_to(elsewhere)
    with pytest.raises(SsdError, match=rf"{name} is a symbolic link.*remove it"):
        open_tier(store)
    assert not elsewhere.exists()
    (store / name).unlink()
    open_tier(store).close()


@pytest.mark.parametrize("name", ["lock.mdb", "owner", "ballast", "CACHEDIR.TAG"])
def test_a_folder_in_a_files_place_is_refused_with_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(SsdError, match=f"{name} is not a file.*move it away"):
        open_tier(tmp_path)
    assert (tmp_path / name).is_dir()


def test_a_data_file_that_is_replaced_by_a_link_under_a_running_tier_is_not_followed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "store")
    spill(tier, chain_of("a", [5000]))
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "store" / "data.mdb").rename(elsewhere)
    (tmp_path / "store" / "data.mdb").symlink_to(elsewhere)
    tier.observe(tier.probe())
    assert tier.state == "gone"
    assert "symbolic link" in tier.reason
    (tmp_path / "store" / "data.mdb").unlink()
    elsewhere.rename(tmp_path / "store" / "data.mdb")
    tier.observe(tier.probe())
    assert (tier.state, len(tier)) == ("ok", 1)
    tier.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("when", ["live", "still"])
def test_flipped_bits_in_what_lmdb_trusts_end_no_process_and_give_no_wrong_byte(tmp_path: Path, when: str) -> None:
    make_store(tmp_path / "whole")
    runs = 1000 if LONG else 20
    command = [sys.executable, "-m", "tests.storage.damage_ssd", str(tmp_path / "whole"), "0", str(runs), when]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    aside = int(done.stdout.split()[2])
    assert runs / 20 <= aside <= runs, done.stdout
