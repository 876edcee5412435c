"""The rows of LMDB's databases, read as a whole when a store is opened: entries, namespaces, counters, the log of uses.

Hundreds of thousands of records stand between a start and the first answer, so they are read in batches, each step of a
batch one call. A batch with a record that cannot be read is gone through again one by one.
"""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import msgpack
import xxhash

from omlxd.storage.environment import Environment
from omlxd.storage.ssd_commit import COUNTERS, unpack_counters, unpack_row
from omlxd.storage.ssd_errors import Damaged
from omlxd.storage.ssd_index import Entry, Index, SpaceTotals
from omlxd.storage.ssd_reading import Reading
from omlxd.storage.ssd_records import FIELDS, HASH_BYTES, RecordFields, unpack_fields

log = logging.getLogger(__name__)

STATE = b"state"
"""Key of the policy's state in ``recency``; a 4-byte chunk number follows."""
_unpack: Callable[[bytes], RecordFields] = partial(msgpack.unpackb, use_list=False)


def load_entries(
    environment: Environment, numbers: dict[int, SpaceTotals], unreadable: list[tuple[bytes, str]]
) -> list[Entry]:
    """All records as entries, in the order of their keys; ``numbers``: namespaces by short number.

    Those that cannot be read go into ``unreadable``, with the reason. Raises ``DiskTrouble``, ``Damaged`` (a tree).
    """
    entries: list[Entry] = []
    sizes: dict[int, tuple[int, int]] = {}  # stored bytes: one object for one size, and its pages
    layouts: dict[bytes, bytes] = {}
    with environment.reading() as reading:
        for batch in reading.batches(environment.blocks):
            for key, number, short, nbytes, stored, _, _, _, parent, position, _, layout in _unpacked(
                batch, unreadable
            ):
                space = numbers.get(short)
                if space is None:
                    unreadable.append((key, f"unknown namespace {short}"))
                    continue
                size = sizes.get(stored)
                if size is None:
                    size = sizes[stored] = stored, environment.pages_of(stored)
                if layout is not None:
                    layout = layouts.setdefault(layout, layout)
                payload = sizes[nbytes][0] if nbytes in sizes else nbytes
                entries.append(Entry(key, number, space, payload, size[0], size[1], parent, position, layout))
    return entries


def _unpacked(batch: Sequence[tuple[bytes, bytes]], unreadable: list[tuple[bytes, str]]) -> Iterable[RecordFields]:
    keys = [key for key, _ in batch]
    try:
        rows: list[RecordFields] = list(map(_unpack, _bodies(batch)))
        if [row[0] for row in rows] == keys and set(map(len, rows)) == {FIELDS}:
            return rows
    except (ValueError, TypeError, IndexError, msgpack.UnpackException, Damaged):
        pass  # one of them is to blame: it is found below
    return _one_by_one(batch, unreadable)


def _bodies(batch: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    """The records without the hashes in front. Raises ``Damaged`` when a hash does not match."""
    bodies = [packed[HASH_BYTES:] for _, packed in batch]
    hashes = array("Q", map(xxhash.xxh3_64_intdigest, bodies))
    if sys.byteorder == "big":
        hashes.byteswap()
    if hashes.tobytes() != b"".join([packed[:HASH_BYTES] for _, packed in batch]):
        raise Damaged("a record's own hash does not match")
    return bodies


def _one_by_one(batch: Sequence[tuple[bytes, bytes]], unreadable: list[tuple[bytes, str]]) -> Iterator[RecordFields]:
    for key, packed in batch:
        try:
            yield unpack_fields(key, packed)
        except Damaged as error:
            unreadable.append((key, str(error)))


def load_spaces(reading: Reading, environment: Environment, index: Index) -> dict[int, SpaceTotals]:
    """Put the namespaces into ``index``; returns them by their short numbers."""
    for id_, packed in reading.items(environment.namespaces):
        try:
            row = unpack_row(packed)
        except Damaged as error:  # its records are found to be of an unknown namespace
            log.warning("the row of namespace %s cannot be read: %s", id_.hex()[:16], error)
            continue
        index.spaces[id_] = SpaceTotals(id_, row.number, dict(row.descriptor))
    return {space.number: space for space in index.spaces.values()}


def load_counters(reading: Reading, environment: Environment) -> dict[str, int]:
    """What the store has counted over all its owners."""
    try:
        return unpack_counters(reading.get(environment.meta, COUNTERS))
    except Damaged as error:
        log.warning("the store's counters cannot be read, they begin anew: %s", error)
        return {}


def count_rows(environment: Environment) -> dict[bytes, tuple[int, int, int]]:
    """The namespaces' totals as they are written down: blocks, payload bytes, stored bytes."""
    with environment.reading() as reading:
        rows = {id_: unpack_row(packed) for id_, packed in reading.items(environment.namespaces)}
    return {id_: (row.blocks, row.nbytes, row.stored_bytes) for id_, row in rows.items()}


def load_recency(reading: Reading, environment: Environment) -> tuple[bytes, array[int]]:
    """The policy's state of the last clean stop (packed), and the numbers of the records used since, in their order."""
    state: list[bytes] = []
    used = array("Q")
    for key, value in reading.items(environment.recency):
        if key[: len(STATE)] == STATE:
            state.append(value)
        else:
            used.frombytes(value[: len(value) - len(value) % used.itemsize])
    return b"".join(state), used
