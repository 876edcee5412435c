from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlxd.storage.environment import SMALL_STORE, Environment
from omlxd.storage.ssd_data_file import DATA_NAME
from omlxd.storage.ssd_errors import Damaged, DiskTrouble, StoreBroken
from omlxd.storage.ssd_pages import read_header, runs_of
from omlxd.storage.ssd_payload import Located, get_record, locate, read_stored
from omlxd.storage.ssd_records import Record, checksum
from omlxd.storage.ssd_space import count_pages, punch_free_pages
from omlxd.storage.ssd_transaction import WriteTransaction
from omlxd.storage.ssd_tree import free_pages
from tests.storage.ssd_store import key_of, payload_of

MIB = 1 << 20


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    opened = Environment(tmp_path, map_bytes=SMALL_STORE)
    yield opened
    opened.close()


def record_of(key: bytes, nbytes: int, number: int = 0) -> Record:
    return Record(
        key, number, 1, nbytes, nbytes, "raw", b"", checksum([payload_of(key, nbytes)]), None, 0, 1.5, None
    )  # fmt: skip


def put(environment: Environment, *blocks: tuple[bytes, int]) -> None:
    with WriteTransaction(environment) as txn:
        for key, nbytes in blocks:
            txn.put_block(record_of(key, nbytes), [payload_of(key, nbytes)])


def read(environment: Environment, located: Located | None) -> bytes:
    assert located is not None
    out = bytearray(located.record.stored_bytes)
    read_stored(environment, located, memoryview(out))
    return bytes(out)


@pytest.mark.parametrize("pieces", [1, 2, 5])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_stored_bytes_come_back_at_every_edge_of_a_piece(environment: Environment, pieces: int, extra: int) -> None:
    for unit in environment.piece_sizes:
        key = key_of(unit, pieces)
        put(environment, (key, pieces * unit + extra))
        assert read(environment, locate(environment, key)) == payload_of(key, pieces * unit + extra)


@settings(deadline=None, max_examples=25)
@given(sizes=st.lists(st.integers(0, 1_200_000), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_records_of_any_size_come_back_also_between_others_that_left(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int
) -> None:
    environment = Environment(tmp_path_factory.mktemp("store"), map_bytes=64 * MIB)
    try:
        put(environment, *((key_of("old", at), size) for at, size in enumerate(sizes)))
        gone = random.Random(seed).sample(range(len(sizes)), len(sizes) // 2)
        with WriteTransaction(environment) as txn:
            for at in gone:
                assert txn.delete_block(key_of("old", at))
        for at in reversed(range(len(sizes))):
            put(environment, (key_of("new", at), sizes[at]))
        for at, size in enumerate(sizes):
            for name in ("new",) if at in gone else ("new", "old"):
                assert read(environment, locate(environment, key_of(name, at))) == payload_of(key_of(name, at), size)
        assert all(locate(environment, key_of("old", at)) is None for at in gone)
    finally:
        environment.close()


def test_pieces_fill_their_pages_and_the_forecast_of_pages_is_one_too_many_at_most(environment: Environment) -> None:
    def overflow_pages() -> int:
        with environment.reading() as reading:
            tree = reading.tree(environment.pieces)
            assert tree is not None
            return tree.overflow_pages

    page_bytes = environment.header.page_bytes
    for nbytes in (environment.piece_bytes, 3 * environment.piece_bytes + 70_000, 100_000, 5_000_000):
        before = overflow_pages()
        put(environment, (key_of("p", nbytes), nbytes))
        assert environment.pages_of(nbytes) - 1 <= overflow_pages() - before <= environment.pages_of(nbytes)
        assert (environment.pages_of(nbytes) * page_bytes - nbytes) / nbytes < 0.05
    assert environment.pages_of(environment.piece_bytes) * page_bytes == 256 * 1024


def test_the_parts_of_an_encoded_block_are_stored_as_one_run_of_bytes(environment: Environment) -> None:
    rng = random.Random(1)
    parts = [rng.randbytes(size) for size in (10, 0, 300_000, 1, 262_127, 70_000)]
    whole = b"".join(parts)
    key = key_of("parts", 0)
    record = Record(key, 0, 1, 7, len(whole), "zstd", b"", checksum(parts), None, 0, 0.0, b"layout")
    with WriteTransaction(environment) as txn:
        txn.put_block(record, parts)
    located = locate(environment, key)
    assert read(environment, located) == whole
    assert located is not None
    assert located.record == record


def test_neighbouring_pieces_are_read_with_one_call(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    put(environment, (key_of("a", 0), 8 * MIB))
    calls = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: calls.append(len(buffers)) or preadv(fd, buffers, at))
    read(environment, locate(environment, key_of("a", 0)))
    assert len(calls) == 1


def test_an_aborted_transaction_leaves_nothing(environment: Environment) -> None:
    def fail_halfway() -> None:
        with WriteTransaction(environment) as txn:
            txn.put_block(record_of(key_of("a", 0), 1000), [payload_of(key_of("a", 0), 1000)])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert locate(environment, key_of("a", 0)) is None


def test_a_record_survives_reopening(tmp_path: Path) -> None:
    environment = Environment(tmp_path, map_bytes=16 * MIB)
    put(environment, (key_of("a", 0), MIB))
    environment.close()
    environment = Environment(tmp_path, map_bytes=16 * MIB, readonly=True)
    assert read(environment, locate(environment, key_of("a", 0))) == payload_of(key_of("a", 0), MIB)
    environment.close()


def test_the_files_belong_to_their_owner_alone(environment: Environment) -> None:
    for name in (DATA_NAME, "lock.mdb"):
        assert (environment.path / name).stat().st_mode & 0o777 == 0o600


def test_a_record_under_another_key_is_damage(environment: Environment) -> None:
    one, two = key_of("a", 1), key_of("a", 2)
    put(environment, (one, 5000), (two, 5000))
    with WriteTransaction(environment) as txn:
        txn.put(environment.blocks, two, record_of(one, 5000).pack())
    with pytest.raises(Damaged, match="another key"):
        locate(environment, two)


def test_every_flipped_bit_of_a_record_is_noticed(environment: Environment) -> None:
    key = key_of("a", 1)
    packed = record_of(key, 5000).pack()
    put(environment, (key, 5000))
    for at in range(len(packed)):
        with WriteTransaction(environment) as txn:
            txn.put(environment.blocks, key, packed[:at] + bytes([packed[at] ^ (1 << at % 8)]) + packed[at + 1 :])
        with pytest.raises(Damaged):
            get_record(environment, key)


def test_missing_and_surplus_pieces_are_damage(environment: Environment) -> None:
    key = key_of("a", 1)
    put(environment, (key, 300_000))
    with WriteTransaction(environment) as txn:
        txn.delete(environment.pieces, key + struct.pack(">I", 1))
    with pytest.raises(Damaged, match="pieces"):
        locate(environment, key)
    with WriteTransaction(environment) as txn:
        for number in (1, 2):
            txn.put(environment.pieces, key + struct.pack(">I", number), bytes(300_000))
    with pytest.raises(Damaged, match="pieces"):
        locate(environment, key)


# -- pages ----------------------------------------------------------------------------------------


def allocated(environment: Environment) -> int:
    return os.stat(environment.path / DATA_NAME).st_blocks * 512


def churn(environment: Environment, rounds: int = 30) -> list[tuple[bytes, int]]:
    rng = random.Random(5)
    live: list[tuple[bytes, int]] = []
    for number in range(rounds):
        block = (key_of("churn", number), rng.randrange(1, 900_000))
        with WriteTransaction(environment) as txn:
            if len(live) > 8:
                txn.delete_block(live.pop(rng.randrange(len(live)))[0])
            txn.put_block(record_of(*block), [payload_of(*block)])
        live.append(block)
    return live


def test_used_and_free_pages_add_up_to_the_file(environment: Environment) -> None:
    churn(environment)
    pages = count_pages(environment)
    descriptor = os.open(environment.path / DATA_NAME, os.O_RDONLY)
    try:
        free = free_pages(descriptor, read_header(descriptor))
    finally:
        os.close(descriptor)
    assert (pages.total, pages.live) == (environment.header.pages, environment.header.pages - free.size)
    assert free.size > 100


def test_free_pages_are_given_back_and_nothing_else(environment: Environment) -> None:
    live = churn(environment)
    before = allocated(environment)
    returned = punch_free_pages(environment)
    if returned is None:
        pytest.skip("this file system cannot make holes in files")
    assert returned == before - allocated(environment)
    assert allocated(environment) <= count_pages(environment).live * environment.header.page_bytes + 600 * 1024
    for key, nbytes in live:
        assert read(environment, locate(environment, key)) == payload_of(key, nbytes)
    live = churn(environment)  # the holes are used again
    for key, nbytes in live:
        assert read(environment, locate(environment, key)) == payload_of(key, nbytes)


def test_the_whole_tree_passes_lmdbs_own_verification_after_holes_were_made(tmp_path: Path) -> None:
    verify = pytest.importorskip("lmdb.verify", reason="this py-lmdb has no verifier")
    environment = Environment(tmp_path, map_bytes=64 * MIB)
    churn(environment)
    punch_free_pages(environment)
    churn(environment, 5)
    environment.close()
    assert verify.verify(str(tmp_path)) == []


def test_runs_of_pages() -> None:
    import numpy as np

    assert list(runs_of(np.array([3, 4, 5, 9, 11, 12], np.uint64))) == [(3, 3), (9, 1), (11, 2)]
    assert list(runs_of(np.empty(0, np.uint64))) == []


def test_starting_over_gives_all_space_back(environment: Environment) -> None:
    put(environment, (key_of("a", 0), 8 * MIB))
    environment.start_over(32 * MIB)
    assert allocated(environment) < 100_000
    assert locate(environment, key_of("a", 0)) is None
    put(environment, (key_of("b", 0), MIB))
    assert read(environment, locate(environment, key_of("b", 0))) == payload_of(key_of("b", 0), MIB)


def test_the_map_bounds_the_file_and_can_be_changed(environment: Environment) -> None:
    environment.resize(2 * MIB)
    with pytest.raises(lmdb.MapFullError):
        put(environment, (key_of("a", 0), 3 * MIB))
    assert os.stat(environment.path / DATA_NAME).st_size <= 2 * MIB
    environment.resize(8 * MIB)
    put(environment, (key_of("a", 0), 3 * MIB))
    environment.resize(MIB)  # never below what is used
    assert read(environment, locate(environment, key_of("a", 0))) == payload_of(key_of("a", 0), 3 * MIB)


# -- what is not a store --------------------------------------------------------------------------


def make_store(path: Path) -> Path:
    environment = Environment(path, map_bytes=16 * MIB)
    put(environment, (key_of("a", 0), MIB))
    environment.close()
    return path / DATA_NAME


@pytest.mark.parametrize("harm", ["garbage", "zeros", "cut", "cut_to_a_page", "foreign", "version"])
def test_a_file_that_is_no_store_is_refused_with_the_reason(tmp_path: Path, harm: str) -> None:
    data = make_store(tmp_path)
    size = data.stat().st_size
    if harm == "garbage":
        data.write_bytes(random.Random(2).randbytes(size))
    elif harm == "zeros":
        data.write_bytes(bytes(size))
    elif harm == "cut":
        os.truncate(data, size // 2)
    elif harm == "cut_to_a_page":
        os.truncate(data, 4096)
    elif harm == "foreign":
        data.unlink()
        with lmdb.open(str(tmp_path), max_dbs=2) as foreign:
            foreign.open_db(b"something")
    else:
        with lmdb.open(str(tmp_path), max_dbs=8, map_size=16 * MIB) as env, env.begin(write=True) as txn:
            txn.put(b"format", b"from the future", db=env.open_db(b"meta", txn=txn))
    with pytest.raises(StoreBroken, match=str(tmp_path)):
        Environment(tmp_path, map_bytes=16 * MIB)


def test_an_empty_file_is_a_new_store(tmp_path: Path) -> None:
    (tmp_path / DATA_NAME).touch()
    Environment(tmp_path, map_bytes=16 * MIB).close()


@pytest.mark.parametrize("harm", ["cut", "emptied", "zeros", "deleted"])
def test_a_file_that_is_harmed_while_it_is_open_is_trouble_and_not_a_signal(
    environment: Environment, harm: str
) -> None:
    put(environment, *((key_of("a", at), 400_000) for at in range(20)))
    located = locate(environment, key_of("a", 19))
    data = environment.path / DATA_NAME
    if harm == "cut":
        os.truncate(data, data.stat().st_size // 2)
    elif harm == "emptied":
        os.truncate(data, 0)
    elif harm == "zeros":
        size = data.stat().st_size
        with open(data, "r+b") as file:
            file.write(bytes(size))
    else:
        data.unlink()
    if harm == "deleted":
        assert read(environment, locate(environment, key_of("a", 3))) == payload_of(key_of("a", 3), 400_000)
    else:
        with pytest.raises(DiskTrouble):
            read(environment, locate(environment, key_of("a", 19)))
    with pytest.raises(DiskTrouble):
        put(environment, (key_of("b", 0), 1000))
    if harm in ("cut", "emptied"):
        with pytest.raises(DiskTrouble):
            read(environment, located)


def test_a_closed_environment_answers_readers_with_trouble(environment: Environment) -> None:
    put(environment, (key_of("a", 0), 400_000))
    located = locate(environment, key_of("a", 0))
    environment.close()
    environment.close()
    with pytest.raises(DiskTrouble):
        locate(environment, key_of("a", 0))
    with pytest.raises(DiskTrouble):
        read(environment, located)


@pytest.mark.parametrize("size", [5000, 100_000])
def test_removing_everything_at_once_does_not_make_the_file_look_cut(tmp_path: Path, size: int) -> None:
    """The pages that the transaction took at the file's end and gave back were never written."""
    environment = Environment(tmp_path, map_bytes=SMALL_STORE)
    keys = [key_of(number, number) for number in range(8)]
    put(environment, *((key, size) for key in keys))
    with WriteTransaction(environment) as txn:
        for key in keys:
            txn.delete_block(key)
    environment.check()
    put(environment, (keys[0], size))
    environment.close()
    again = Environment(tmp_path, map_bytes=SMALL_STORE)
    assert read(again, locate(again, keys[0])) == payload_of(keys[0], size)
    again.close()


def test_a_kill_before_the_file_was_made_as_long_as_it_says_costs_nothing(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from tests.storage.test_environment import *\n"
        "environment = Environment(Path(sys.argv[1]), map_bytes=SMALL_STORE)\n"
        "keys = [key_of(number, number) for number in range(8)]\n"
        "put(environment, *((key, 5000) for key in keys))\n"
        "os.ftruncate = lambda descriptor, size: os.kill(os.getpid(), signal.SIGKILL)\n"
        "with WriteTransaction(environment) as txn:\n"
        "    assert all([txn.delete_block(key) for key in keys])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, "the file was not too short: " + done.stderr
    data = tmp_path / DATA_NAME
    descriptor = os.open(data, os.O_RDONLY)
    needed = read_header(descriptor).needed_bytes
    os.close(descriptor)
    assert data.stat().st_size < needed
    environment = Environment(tmp_path, map_bytes=SMALL_STORE)
    assert data.stat().st_size == needed
    assert locate(environment, key_of(0, 0)) is None, "it was committed"
    put(environment, (key_of(0, 0), 400_000))
    assert read(environment, locate(environment, key_of(0, 0))) == payload_of(key_of(0, 0), 400_000)
    environment.close()
