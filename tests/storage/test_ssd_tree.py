"""LMDB's trees as they are read past LMDB, and their check: against LMDB itself, and with every kind of damage."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlxd.storage.environment import SMALL_STORE, Environment
from omlxd.storage.ssd_data_file import DATA_NAME
from omlxd.storage.ssd_errors import Damaged, DiskTrouble
from omlxd.storage.ssd_pages import BadFile, read_header
from omlxd.storage.ssd_payload import locate
from omlxd.storage.ssd_reading import Reading
from omlxd.storage.ssd_structure import check_structure
from omlxd.storage.ssd_transaction import WriteTransaction
from tests.storage.ssd_store import key_of
from tests.storage.test_environment import put

PAGE = 4096


@settings(deadline=None, max_examples=20)
@given(
    steps=st.lists(
        st.lists(
            st.tuples(st.integers(0, 400), st.sampled_from([0, 1, 50, 700, 2100, 5000])), min_size=1, max_size=120
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 99),
)
def test_what_is_read_past_lmdb_is_what_lmdb_has(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[tuple[int, int]]], seed: int
) -> None:
    rng = random.Random(seed)
    environment = Environment(tmp_path_factory.mktemp("store"), map_bytes=SMALL_STORE)
    wanted: dict[bytes, bytes] = {}
    try:
        for step in steps:
            with WriteTransaction(environment) as txn:
                for number, size in step:
                    key = key_of("tree", number)[: 9 + number % 24]
                    if size == 50 and key in wanted:
                        txn.delete(environment.recency, key)
                        del wanted[key]
                    else:
                        wanted[key] = rng.randbytes(size)
                        txn.put(environment.recency, key, wanted[key])
            check_structure(environment.descriptor, environment.header, thorough=True)
            with environment.reading() as reading:
                assert list(reading.items(environment.recency)) == sorted(wanted.items())
                assert list(chain.from_iterable(reading.batches(environment.recency))) == sorted(wanted.items())
                start = key_of("start", seed)
                rest = [(key, value) for key, value in sorted(wanted.items()) if key >= start]
                assert list(reading.items(environment.recency, start)) == rest
            for key in [*wanted, b"nothing of that name", b"\xff" * 40]:
                assert environment.read(lambda reading, key=key: reading.get(environment.recency, key)) == wanted.get(
                    key
                )  # type: ignore[misc]
    finally:
        environment.close()


def filled(path: Path) -> list[bytes]:
    """A store with all kinds of pages; returns them."""
    environment = Environment(path, map_bytes=SMALL_STORE)
    for number in range(60):
        put(environment, (key_of("few", number), 300), (key_of("many", number), 20_000))
    with WriteTransaction(environment) as txn:
        for number in range(0, 60, 3):
            txn.delete_block(key_of("many", number))
    environment.close()
    data = (path / DATA_NAME).read_bytes()
    return [data[at : at + PAGE] for at in range(0, len(data), PAGE)]


def check(path: Path, pages: list[bytes]) -> None:
    (path / DATA_NAME).write_bytes(b"".join(pages))
    descriptor = os.open(path / DATA_NAME, os.O_RDONLY)
    try:
        check_structure(descriptor, read_header(descriptor))
    finally:
        os.close(descriptor)


def changed(page: bytes, at: int, value: bytes) -> bytes:
    return page[:at] + value + page[at + len(value) :]


@pytest.mark.parametrize(
    ("kind", "at", "value", "what"),
    [
        (1, 0, b"\x05\x00", "own number"),
        (2, 10, b"\x01", "another kind"),
        (1, 10, b"\x03", "another kind"),
        (2, 12, b"\x00\x00", "bounds"),
        (2, 12, b"\xf0\xff", "bounds"),
        (2, 14, b"\xff\x7f", "bounds"),
        (2, 16, b"\xfe\xff", "outside of it"),
        (2, 16, b"\x11\x00", "outside of it"),
    ],
)
def test_pages_that_lmdb_would_follow_astray_are_named(
    tmp_path: Path, kind: int, at: int, value: bytes, what: str
) -> None:
    pages = filled(tmp_path)
    check(tmp_path, pages)
    header_number = next(
        number
        for number, page in enumerate(pages)
        if number > 1 and page[10] == kind and int.from_bytes(page[:8], "little") == number and live(tmp_path, number)
    )
    pages[header_number] = changed(pages[header_number], at, value)
    with pytest.raises(BadFile, match=rf"page {header_number} of the tree .*{what}"):
        check(tmp_path, pages)


def live(path: Path, number: int) -> bool:
    """Is the page in use?"""
    from omlxd.storage.ssd_tree import free_pages

    descriptor = os.open(path / DATA_NAME, os.O_RDONLY)
    try:
        return number not in free_pages(descriptor, read_header(descriptor))
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("at", [0, 10, 12, 16, 18, -2000, -30])
def test_whatever_a_leaf_says_is_right_or_damage(tmp_path: Path, at: int) -> None:
    environment = Environment(tmp_path, map_bytes=SMALL_STORE)
    with WriteTransaction(environment) as txn:
        for number in range(10):
            txn.put(environment.recency, bytes([number]) * 9, bytes([number]) * 200)
    tree = environment.read(lambda reading: reading.tree(environment.recency))
    assert tree is not None
    start = tree.root * environment.header.page_bytes + at % environment.header.page_bytes
    whole = os.pread(environment.descriptor, 2, start)
    works: list[Callable[[Reading], object]] = [
        lambda reading: [reading.get(environment.recency, bytes([number]) * 9) for number in range(10)],
        lambda reading: list(reading.items(environment.recency)),
        lambda reading: list(reading.places(environment.recency, b"")),
        lambda reading: list(reading.batches(environment.recency)),
    ]
    outcomes = set()
    for value in range(0, 1 << 16, 149):
        os.pwrite(environment.descriptor, value.to_bytes(2, "little"), start)
        for work in works:
            try:
                environment.read(work)
                outcomes.add("read")
            except (Damaged, DiskTrouble):
                outcomes.add("damage")
    assert "damage" in outcomes or at < -10
    os.pwrite(environment.descriptor, whole, start)
    environment.close()


def test_a_change_by_another_program_is_noticed_before_lmdb_goes_on(tmp_path: Path) -> None:
    environment = Environment(tmp_path, map_bytes=SMALL_STORE)
    put(environment, *((key_of("a", number), 20_000) for number in range(40)))
    header = environment.header
    root = environment.read(lambda reading: reading.tree(environment.pieces))
    assert root is not None
    with open(tmp_path / DATA_NAME, "r+b") as file:
        file.seek(root.root * header.page_bytes + 12)
        file.write(b"\xff\xff")
    with pytest.raises(Damaged, match=r"structure is damaged: page \d+ of the tree 'pieces'"):
        put(environment, (key_of("b", 0), 1000))
    with pytest.raises(Damaged, match="not a page"):
        locate(environment, key_of("a", 39))
    environment.close()


def test_a_change_during_a_transaction_is_not_committed(tmp_path: Path) -> None:
    environment = Environment(tmp_path, map_bytes=SMALL_STORE)
    put(environment, (key_of("a", 0), 20_000))
    before = environment.header.transaction

    def commit_while_another_writes() -> None:
        with WriteTransaction(environment) as txn:
            txn.put(environment.meta, b"tick", b"x")
            with open(tmp_path / DATA_NAME, "r+b") as file:
                file.seek(environment.header.needed_bytes - 1)
                file.write(b"\0")

    with pytest.raises(DiskTrouble, match="changed by another program"):
        commit_while_another_writes()
    assert read_header(environment.descriptor).transaction == before
    put(environment, (key_of("a", 1), 20_000))  # what was changed was not part of the structure
    assert locate(environment, key_of("a", 1)) is not None
    environment.close()
