"""Carrying out a plan: the writer's thread, one transaction, the accounting in it.

Nothing here touches the index. What fails is told in the outcome; the only exceptions that leave
are programming errors.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import lmdb
import msgpack

from omlxd.storage.environment import Environment, trouble
from omlxd.storage.ssd_ballast import drop_ballast
from omlxd.storage.ssd_errors import Damaged, DiskTrouble
from omlxd.storage.ssd_pages import BadFile
from omlxd.storage.ssd_plan import CommitOutcome, CommitPlan, Quarantined
from omlxd.storage.ssd_records import seal, unseal
from omlxd.storage.ssd_space import count_pages, longest_piece, punch_free_pages
from omlxd.storage.ssd_transaction import WriteTransaction

log = logging.getLogger(__name__)

MAX_QUARANTINE = 1000
"""Entries of the ``quarantine`` database; older ones leave."""

FreeSpace: TypeAlias = Callable[[Path], int]
"""Bytes free on the volume of a path."""

_NUMBER = struct.Struct(">Q")
COUNTERS = b"counters"
FULL_BYTES = 1 << 20
"""A disk with less free space than that, and what a write needs, counts as full."""
COMMITS_PER_ROOM = 1
"""Transactions after which freed pages can be used again: LMDB keeps those of the last commit for its readers."""


@dataclass(slots=True)
class Row:
    """One namespace's row as it changes within a transaction."""

    number: int
    descriptor: Mapping[str, object]
    blocks: int = 0
    nbytes: int = 0
    stored_bytes: int = 0

    def pack(self) -> bytes:
        """As it is stored."""
        packed: bytes = msgpack.packb(
            [self.number, dict(self.descriptor), self.blocks, self.nbytes, self.stored_bytes], use_bin_type=True
        )
        return seal(packed)


def unpack_row(packed: bytes) -> Row:
    """Read a row of the ``namespaces`` database. Raises ``Damaged``."""
    return Row(*msgpack.unpackb(unseal(packed), strict_map_key=False))


def pack_counters(counters: Mapping[str, int]) -> bytes:
    """As they are stored."""
    packed: bytes = msgpack.packb(dict(counters))
    return seal(packed)


def unpack_counters(packed: bytes | None) -> dict[str, int]:
    """The store's counters; none in a new one. Raises ``Damaged``."""
    return {} if packed is None else {str(name): int(n) for name, n in msgpack.unpackb(unseal(packed)).items()}


class Totals:
    """Namespace rows and counters, read when first needed and written at the end of a transaction."""

    def __init__(self, txn: WriteTransaction, environment: Environment, numbers: Mapping[bytes, int]) -> None:
        self._txn = txn
        self._environment = environment
        self._numbers = dict(numbers)
        self._ids = {number: id_ for id_, number in numbers.items()}
        self._rows: dict[bytes, Row] = {}

    def add(self, number: int, sign: int, nbytes: int, stored_bytes: int) -> None:
        """Count a record in (``sign`` 1) or out (-1) of the namespace with that short number."""
        row = self.row(self._ids.get(number, b""), number)
        row.blocks += sign
        row.nbytes += sign * nbytes
        row.stored_bytes += sign * stored_bytes

    def row(self, id_: bytes, number: int) -> Row:
        """A namespace's row, to be changed."""
        row = self._rows.get(id_)
        if row is None:
            packed = self._txn.get(self._environment.namespaces, id_) if id_ else None
            row = self._rows[id_] = unpack_row(packed) if packed is not None else Row(number, {})
        return row

    def write(self) -> None:
        """Put the changed rows into the transaction."""
        for id_, row in self._rows.items():
            if id_:
                self._txn.put(self._environment.namespaces, id_, row.pack())


def carry_out(environment: Environment, plan: CommitPlan, free_space: FreeSpace) -> CommitOutcome:
    """Commit ``plan``. Writer's thread."""
    begun = time.perf_counter()
    outcome = _Commit(environment, plan, free_space).attempt()
    if outcome.state != "gone":
        try:
            outcome = replace(
                outcome,
                pages=count_pages(environment),
                allocated_bytes=environment.allocated_bytes(),
                free_bytes=free_space(environment.path),
            )
        except _TROUBLE as error:
            outcome = _failed(outcome, error)
    return replace(outcome, seconds=time.perf_counter() - begun)


class _Commit:
    """The steps of one commit."""

    def __init__(self, environment: Environment, plan: CommitPlan, free_space: FreeSpace) -> None:
        self._environment = environment
        self._plan = plan
        self._free_space = free_space
        self._outcome = CommitOutcome(stored=False, removed=False)

    def attempt(self) -> CommitOutcome:
        """In one transaction where there is room, else after one that evicts. On a full disk with the ballast's space."""
        outcome = self._attempt()
        if (
            outcome.state == "full"
            and not outcome.removed
            and not self._plan.blocks
            and drop_ballast(self._environment.path)
        ):
            self._outcome = CommitOutcome(stored=False, removed=False)
            outcome = self._attempt()
        return outcome

    def _attempt(self) -> CommitOutcome:
        environment, plan = self._environment, self._plan
        try:
            if plan.start_over:
                environment.start_over(plan.map_bytes)
            else:
                environment.resize(plan.map_bytes)
            if not plan.evict_first and self._may_grow() and self._at_once():
                return self._finish()
            self._evict()
            largest = longest_piece(environment, plan.need_pages)
            if not self._may_grow():
                punch_free_pages(environment)
                if not self._may_grow():
                    return replace(self._outcome, reason="the limit leaves no room for these blocks")
            with WriteTransaction(environment) as txn:
                _store(environment, txn, plan, largest)
            self._outcome = replace(self._outcome, stored=True)
            return self._finish()
        except lmdb.MapFullError:
            what = "LMDB finds no run of free pages that is long enough"
            return replace(self._outcome, map_full=self._outcome.map_full + 1, reason=what)
        except _TROUBLE as error:
            return _failed(self._outcome, self._diagnosed(error))

    def _diagnosed(self, error: Exception) -> Exception:
        """LMDB takes a write that came out short for an I/O error; mostly it means that the disk is full."""
        if getattr(error, "errno", None) != errno.EIO and getattr(error, "code", None) != errno.EIO:
            return error
        try:
            status = os.statvfs(self._environment.path)
        except OSError:
            return error
        need = self._plan.need_pages * self._environment.header.page_bytes
        full = status.f_bavail * status.f_frsize < need + FULL_BYTES
        return DiskTrouble("full", f"no room for {need} bytes: {error}") if full else error

    def _may_grow(self) -> bool:
        """Would the file, and the volume, stay within their limits however LMDB chooses its pages?"""
        environment, plan = self._environment, self._plan
        need = plan.need_pages * environment.header.page_bytes
        if not plan.blocks:
            return True
        allocated = environment.allocated_bytes()
        # A map that ends within the limit is a limit by itself.
        if environment.map_bytes > plan.allowed_bytes and allocated + need > plan.allowed_bytes:
            return False
        growth = min(need, max(0, environment.map_bytes - allocated))
        return self._free_space(environment.path) - growth >= plan.min_free

    def _at_once(self) -> bool:
        environment = self._environment
        try:
            with WriteTransaction(environment) as txn:
                _remove(environment, txn, self._plan)
                _store(environment, txn, self._plan)
        except lmdb.MapFullError:
            log.info("no room in the map for %d pages; evicting first", self._plan.need_pages)
            self._outcome = replace(self._outcome, map_full=1)
            return False
        self._outcome = replace(self._outcome, stored=True, removed=True)
        return True

    def _evict(self) -> None:
        """Free the room in a transaction of its own, and let it ripen."""
        with WriteTransaction(self._environment) as txn:
            _remove(self._environment, txn, self._plan)
        self._outcome = replace(self._outcome, removed=True)
        for _ in range(COMMITS_PER_ROOM):
            _tick(self._environment)

    def _finish(self) -> CommitOutcome:
        returned = 0
        if self._plan.give_back:
            _tick(self._environment)  # what the last transaction freed is free for good after one more
            returned = punch_free_pages(self._environment) or 0
        written = sum(block.stored_bytes for block, _ in self._plan.blocks)
        return replace(self._outcome, written_bytes=written, returned_bytes=returned)


def _tick(environment: Environment) -> None:
    with WriteTransaction(environment) as txn:
        txn.put(environment.meta, b"tick", b"")


def _remove(environment: Environment, txn: WriteTransaction, plan: CommitPlan) -> None:
    entries = [*plan.doomed, *plan.victims]
    totals = Totals(txn, environment, plan.space_numbers)
    txn.prepare_removal([entry.key for entry in entries])
    for entry in entries:
        if txn.delete_block(entry.key):
            totals.add(entry.space.number, -1, entry.nbytes, entry.stored_bytes)
    totals.write()
    for damage in plan.quarantined:
        _quarantine(environment, txn, damage)


def _quarantine(environment: Environment, txn: WriteTransaction, damage: Quarantined) -> None:
    with txn.txn.cursor(db=environment.quarantine) as cursor:
        number = _NUMBER.unpack(cursor.key())[0] + 1 if cursor.last() else 0
        if number >= MAX_QUARANTINE and cursor.first():
            cursor.delete()
    row = [damage.key, damage.reason, damage.stored_bytes, damage.at]
    txn.put(environment.quarantine, _NUMBER.pack(number), msgpack.packb(row, use_bin_type=True))


def read_quarantine(environment: Environment) -> list[Quarantined]:
    """All entries, oldest first."""
    with environment.reading() as reading:
        return [Quarantined(*msgpack.unpackb(row)) for _, row in reading.items(environment.quarantine)]


def _store(environment: Environment, txn: WriteTransaction, plan: CommitPlan, largest: int | None = None) -> None:
    totals = Totals(txn, environment, plan.space_numbers)
    for id_, descriptor in plan.descriptors.items():
        totals.row(id_, plan.space_numbers[id_]).descriptor = descriptor
    for block, record in plan.blocks:
        txn.put_block(record, block.parts, largest)
        totals.add(record.namespace, 1, record.nbytes, record.stored_bytes)
    totals.write()
    if plan.recency:
        _append_recency(environment, txn, plan.recency)
    counters = unpack_counters(txn.get(environment.meta, COUNTERS))
    counters["next_number"] = plan.next_number
    counters["written_bytes"] = counters.get("written_bytes", 0) + sum(block.stored_bytes for block, _ in plan.blocks)
    counters["evicted_blocks"] = counters.get("evicted_blocks", 0) + len(plan.victims)
    txn.put(environment.meta, COUNTERS, pack_counters(counters))


def _append_recency(environment: Environment, txn: WriteTransaction, numbers: bytes) -> None:
    with txn.txn.cursor(db=environment.recency) as cursor:
        last = cursor.key() if cursor.last() else b""
        number = _NUMBER.unpack(last)[0] + 1 if len(last) == _NUMBER.size else 0
    txn.put(environment.recency, _NUMBER.pack(number), numbers)


_TROUBLE = (OSError, lmdb.Error, BadFile, DiskTrouble, Damaged)


def _failed(outcome: CommitOutcome, error: Exception) -> CommitOutcome:
    if isinstance(error, BadFile | Damaged):
        error = DiskTrouble("gone", f"the data file is not in order: {error}")
    what = error if isinstance(error, DiskTrouble) else trouble(error)
    return replace(outcome, state=what.state, reason=what.reason)
