"""Finding a record's bytes in the data file and reading them. Any worker thread.

Payloads are read by ``preadv``, not through LMDB's map: see ``environment``'s text.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from omlxd.storage.codec import Buffer
from omlxd.storage.environment import Environment, trouble
from omlxd.storage.ssd_data_file import DATA_NAME
from omlxd.storage.ssd_errors import Damaged, DiskTrouble
from omlxd.storage.ssd_reading import Reading
from omlxd.storage.ssd_records import Record, unpack_record
from omlxd.storage.ssd_tree import Extent

_VALUES_IN_ONE_READ = 256  # well below every system's IOV_MAX (1024), two entries a value


@dataclass(frozen=True, slots=True)
class Located:
    """A record and where its stored bytes are: file extents, or bytes where LMDB keeps them in a tree's page."""

    record: Record
    places: tuple[Extent | bytes, ...]
    generation: int = 0
    """Of the file; in another one the places are others."""


def get_record(environment: Environment, key: bytes) -> Record | None:
    """The record of ``key``. Raises ``Damaged``, ``DiskTrouble``."""
    packed = environment.read(lambda reading: reading.get(environment.blocks, key))
    return None if packed is None else unpack_record(key, packed)


def locate(environment: Environment, key: bytes) -> Located | None:
    """The record of ``key`` and where its bytes are. Raises ``Damaged``, ``DiskTrouble``."""
    return environment.read(lambda reading: _located(environment, reading, key))


def _located(environment: Environment, reading: Reading, key: bytes) -> Located | None:
    packed = reading.get(environment.blocks, key)
    if packed is None:
        return None
    record = unpack_record(key, packed)
    places: list[Extent | bytes] = []
    found = 0
    for place in reading.places(environment.pieces, key):
        found += place[1] if isinstance(place, tuple) else len(place)
        if found > record.stored_bytes:
            break
        places.append(place)
    if found != record.stored_bytes:
        raise Damaged(f"its pieces hold {found} bytes or more, not {record.stored_bytes}")
    return Located(record, tuple(places), environment.generation)


def read_ahead(environment: Environment, located: Located, *, fewest_runs: int = 1) -> None:
    """Have the kernel fetch a record's pages while something else is being done, if they lie in so many places or more."""
    if not hasattr(os, "posix_fadvise"):
        return
    runs = list(_runs(located, environment.header.header_bytes))
    if len(runs) < fewest_runs:
        return
    with environment.file_gate.shared(), suppress(OSError):  # who reads will be told
        for offset, length in runs:
            os.posix_fadvise(environment.descriptor, offset, length, os.POSIX_FADV_WILLNEED)


def read_stored(environment: Environment, located: Located, out: memoryview) -> None:
    """Copy a record's stored bytes into ``out`` (as long as they are). Raises ``DiskTrouble``.

    The bytes are whatever is in those places now: the checksum tells whether they are still the record's.
    """
    batch: list[Buffer] = []
    start = end = at = 0
    page_bytes, header_bytes = environment.header.page_bytes, environment.header.header_bytes
    gap = bytearray(header_bytes)
    for place in located.places:
        if isinstance(place, bytes):
            out[at : at + len(place)] = place
            at += len(place)
            continue
        offset, length = place
        adjoining = bool(batch) and offset - header_bytes == end and len(batch) < 2 * _VALUES_IN_ONE_READ
        if not adjoining:
            _read(environment, batch, start)
            batch, start = [], offset
        elif header_bytes:
            batch.append(gap)
        batch.append(out[at : at + length])
        at += length
        # The next value can only adjoin where this one fills its pages.
        end = offset + length if (offset + length) % page_bytes == 0 else -1
    _read(environment, batch, start)


def _read(environment: Environment, buffers: Sequence[Buffer], offset: int) -> None:
    if not buffers:
        return
    wanted = sum(len(buffer) for buffer in buffers)
    try:
        with environment.file_gate.shared():
            _read_all(environment, buffers, offset, wanted)
    except OSError as error:
        raise trouble(error) from error


def _read_all(environment: Environment, buffers: Sequence[Buffer], offset: int, wanted: int) -> None:
    done = os.preadv(environment.descriptor, buffers, offset)
    while done < wanted:  # a signal, or the end of the file
        more = os.preadv(environment.descriptor, _after(buffers, done), offset + done)
        if not more:
            raise DiskTrouble("gone", f"{environment.path / DATA_NAME} ends at byte {offset + done}")
        done += more


def _runs(located: Located, header_bytes: int) -> Iterator[Extent]:
    """The places in the file, neighbours as one."""
    start = end = -1
    for place in located.places:
        if isinstance(place, bytes):
            continue
        offset, length = place
        if offset - header_bytes != end:
            if start >= 0:
                yield start, end - start
            start = offset
        end = offset + length
    if start >= 0:
        yield start, end - start


def _after(buffers: Sequence[Buffer], done: int) -> list[memoryview]:
    """What remains of ``buffers`` behind their first ``done`` bytes."""
    rest: list[memoryview] = []
    for buffer in buffers:
        view = memoryview(buffer)
        rest.append(view[min(done, view.nbytes) :])
        done -= min(done, view.nbytes)
    return [view for view in rest if view.nbytes]
