"""The SSD tier: what is on the disk, what may go there, what leaves for it.

**Threads.** Index, policy and accounting belong to the event loop's thread; bytes are moved on
worker threads. Each method of ``SsdTier`` says which:

- *loop*: only on the loop's thread, never touches the disk, takes microseconds.
- *writer*: on the one writer thread (an executor with one worker), never two at once: ``commit``,
  ``probe``, ``sync``, ``compact``, ``close``.
- *worker*: on any thread but the loop's, many at once: ``encode``, ``read_into``, ``read_ahead``, ``verify_record``.

A spill is ``encode`` (worker), ``plan`` (loop), ``commit`` (writer), ``applied`` (loop); one plan at a
time. Records that were discarded, damaged or cleared leave the index at once, and the disk with the
next plan; ``plan([])`` carries them when nothing is to be spilled (ask ``has_chores``). A timer should
run ``probe`` (writer) and ``observe`` (loop): limits are kept and a sick disk is found when idle too.

**Room.** The limit bounds everything in the store's directory, always: LMDB's map never reaches
beyond what the limit leaves for the data file. Victims are chosen in the policy's order, tails of chains
before their heads, unreachable blocks first of all, until a plan's pages fit; all or nothing.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import lmdb

from omlxd.policy.base import RequestContext
from omlxd.policy.switching import switched
from omlxd.storage.blocks import BlockMeta
from omlxd.storage.codec import encode
from omlxd.storage.codec_choice import AUTO, CodecChoice
from omlxd.storage.environment import Durability, Environment
from omlxd.storage.ssd_archive import ArchiveBroken
from omlxd.storage.ssd_commit import carry_out
from omlxd.storage.ssd_errors import Damaged, Departed, DiskTrouble, Missing, SsdError, SsdLocked
from omlxd.storage.ssd_health import look
from omlxd.storage.ssd_heap import keep_freed_memory
from omlxd.storage.ssd_index import Entry
from omlxd.storage.ssd_ledger import Ledger
from omlxd.storage.ssd_load import Opened, boot_id, other_bytes
from omlxd.storage.ssd_operations import SsdOperations
from omlxd.storage.ssd_payload import locate, read_ahead
from omlxd.storage.ssd_plan import CommitOutcome, CommitPlan, Health, State
from omlxd.storage.ssd_reader import Reader, stored_before
from omlxd.storage.ssd_records import EncodedBlock, checksum
from omlxd.storage.ssd_room import LARGEST_GROUP, Room
from omlxd.storage.ssd_settings import MIN_LIMIT, SsdSettings
from omlxd.storage.ssd_snapshot import save_state
from omlxd.storage.ssd_warmup import WarmingPolicy

__all__ = [
    "MIN_LIMIT",
    "ArchiveBroken",
    "CommitOutcome",
    "CommitPlan",
    "Damaged",
    "DiskTrouble",
    "EncodedBlock",
    "Health",
    "Missing",
    "SsdError",
    "SsdLocked",
    "SsdTier",
]

log = logging.getLogger(__name__)


class SsdTier(SsdOperations):
    """One store on one disk. See the module's text for which thread may call what."""

    def __init__(
        self,
        path: Path,
        settings: SsdSettings,
        opened: Opened,
        *,
        clock: Callable[[], float],
        free_space: Callable[[Path], int],
        elsewhere: Callable[[bytes], bool],
    ) -> None:
        self.path = path
        self.counts: Counter[str] = Counter()
        """Since the start, by what happened: ``evicted``, ``damaged``, ``declined_<reason>``, ``written_bytes``, ..."""
        self.elsewhere = elsewhere
        """Whether a key is in RAM; the Store sets it. A record whose parent is in neither tier cannot be reached."""
        self._settings = settings
        self._clock = clock
        self._free_space = free_space
        self._reader = Reader()
        self._codecs = CodecChoice(
            settings.codec,
            fetch_rate=lambda: self._reader.fetch_rate,
            decode_rate=self._reader.decode_rate,
            timer=time.perf_counter,
        )
        self._shares: dict[bytes, int] = {}
        self._adopt(opened)

    # -- life -------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        limit: int,
        policy: str = "lru",
        min_free: int = 1 << 30,
        durability: Durability = "commit",
        codec: str = AUTO,
        clock: Callable[[], float],
        free_space: Callable[[Path], int],
        elsewhere: Callable[[bytes], bool] = lambda key: False,
        boot: str | None = None,
    ) -> SsdTier:
        """Open or create the store at ``path``. Blocking: before the loop starts, or on the writer's thread.

        ``limit`` and ``min_free`` in bytes; ``clock``: seconds since the epoch; ``free_space``: bytes free on
        the volume of a path; ``boot`` names this run of the machine (None: ask the system). A store that is broken is
        moved aside and a new one begun: ``aside`` then says why.
        Raises ``SsdLocked`` (another owner), ``SsdError`` (a link or a folder in a file's place), ``OSError`` (the disk)
        and ``ValueError`` (a limit below ``MIN_LIMIT``, an unknown policy, codec or durability).
        """
        settings = SsdSettings(limit, policy, min_free, durability, codec, boot if boot is not None else boot_id())
        keep_freed_memory(2 * LARGEST_GROUP)
        opened = settings.open(path)
        return cls(path, settings, opened, clock=clock, free_space=free_space, elsewhere=elsewhere)

    def _adopt(self, opened: Opened) -> None:
        environment = opened.environment
        self._environment: Environment = environment
        self._lock = opened.lock
        self.lifetime: Counter[str] = Counter(opened.counters)
        """As ``counts``, of all owners of this store until this one."""
        self.aside = opened.aside
        """Why a former store was moved aside; empty when none was."""
        self.clean_start = opened.clean
        """Whether the last owner closed the store in order."""
        self.state: State = "read-only" if opened.readonly else "ok"
        self.reason = "the disk is mounted read-only" if opened.readonly else ""
        if opened.trouble is not None:
            self.state, self.reason = opened.trouble.state, opened.trouble.reason
        room = Room(
            limit=self._settings.limit,
            min_free=self._settings.min_free,
            page_bytes=environment.header.page_bytes,
            pages=opened.pages,
            allocated_bytes=environment.allocated_bytes(),
            other_bytes=other_bytes(self.path),
            free_bytes=self._free_space(self.path),
        )
        self._ledger = Ledger(
            opened.index,
            opened.policy,
            room,
            opened.next_number,
            pages_of=environment.pages_of,
            clock=self._clock,
            elsewhere=lambda key: self.elsewhere(key),
            counts=self.counts,
        )
        for key, reason in opened.unreadable:
            log.warning("the record of block %s cannot be read: %s", key.hex()[:16], reason)
            self._ledger.quarantine(key, reason, 0)
        for namespace, share in self._shares.items():
            self._ledger.index.space(namespace).share = share

    def close(self, clean: bool = True) -> None:
        """Writer; the last call, while nobody makes another. Does the chores, saves the policy's state, unlocks.

        With ``clean`` False the store stays as a crash would leave it: what was committed is there.
        """
        closed = False
        if clean and self.writable:
            try:
                self._ledger.warm()
                self._finish_chores()
                ledger = self._ledger
                save_state(self._environment, ledger.policy, ledger.index.entries, ledger.room)
                closed = True
            except (SsdError, OSError, lmdb.Error) as error:
                log.warning("the store %s could not be closed in order: %s", self.path, error)
        self._environment.close()
        if self._lock is not None:
            self._lock.release(closed=closed)

    def _finish_chores(self) -> None:
        self._ledger.persist()
        while (plan := self.plan()) is not None:
            outcome = self.commit(plan)
            self.applied(plan, outcome)
            if outcome.reason:
                return

    # -- loop: what is used (what is there: ``SsdContents``) ----------------------------------------

    def touch(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> None:
        """Loop. ``keys``, heads first, were used, in whichever tier; written down with the next commit."""
        self._ledger.touch(keys, ctx)

    def worth_writing(self, key: bytes) -> bool:
        """Loop. Whether the policy expects enough of the block for a write, and the room."""
        return self._ledger.policy.worth_writing(key)

    def pin(self, key: bytes) -> bool:
        """Loop. A restore of ``key`` begins: the record stays on the disk until ``unpin``. False: it is not here."""
        return key in self and self._ledger.pin(key)

    def unpin(self, entry: Entry) -> None:
        """Loop. A restore of ``entry`` (what ``meta`` gave when it was pinned) has ended."""
        self._ledger.unpin(entry)

    # -- loop: planning ---------------------------------------------------------------------------

    def plan(self, encoded: Sequence[EncodedBlock] = ()) -> CommitPlan | None:
        """Loop. Choose victims and make a plan; None when there is nothing to commit.

        ``plan.declined`` has the blocks that are left out, with the reason; where all are and nothing else
        is to do, the answer is None and ``counts`` tell why. Victims are out of the index from now on.
        Raises ``SsdError`` while another plan is not ``applied``.
        """
        if not self.writable:
            self.counts[f"declined_{self.state}"] += len(encoded)
            return None
        return self._ledger.plan(encoded)

    def applied(self, plan: CommitPlan, outcome: CommitOutcome) -> None:
        """Loop. Book a commit: its blocks can be restored now; after a failure its victims can again."""
        self._ledger.applied(plan, outcome)
        if outcome.state != "ok":
            self._turn(outcome.state, outcome.reason)

    def discard(self, keys: Sequence[bytes], cause: str) -> int:
        """Loop. Drop records (also those being committed); returns how many. ``cause`` names the counter."""
        return self._ledger.discard(keys, cause)

    def damaged(self, key: bytes, reason: str) -> None:
        """Loop. ``read_into`` raised ``Damaged``: the record is never served again, and noted as quarantined."""
        self._ledger.damaged(key, reason)

    def clear(self, namespace: bytes | None = None) -> int:
        """Loop. Drop all records, or a namespace's; returns how many. The next plans give the space back."""
        return self._ledger.clear(namespace)

    def collect(self) -> None:
        """Loop. Have the next plan give all free pages back to the file system (``gc``, ``compact``): no copy, safe at any time."""
        self._ledger.give_back = True

    def persist(self) -> None:
        """Loop. Have recency written by the next plan even if nothing is stored (it goes with each store anyway)."""
        self._ledger.persist()

    # -- loop: namespaces, limits -------------------------------------------------------------------

    def register_namespace(self, id: bytes, descriptor: Mapping[str, object]) -> None:
        """Loop. Keep a namespace's descriptor with its blocks (msgpack-able); written with the next plan."""
        self._ledger.register(id, descriptor)

    def set_share(self, namespace: bytes, stored_bytes: int | None) -> None:
        """Loop. At most so many stored bytes for one namespace, from the next plan on; None: no bound of its own."""
        if stored_bytes is None:
            self._shares.pop(namespace, None)
        else:
            self._shares[namespace] = stored_bytes
        self._ledger.index.space(namespace).share = stored_bytes

    def retire(self, namespace: bytes, retired: bool) -> None:
        """Loop. Have the blocks of a namespace leave before all others, tails first; or no longer."""
        space = self._ledger.index.space(namespace)
        mine = [entry for entry in self.entries.values() if entry.space is space] if retired else []
        space.retired = retired
        space.leaving = sorted(mine, key=lambda entry: entry.position)

    def set_codec(self, namespace: bytes, codec: str | None) -> None:
        """Loop. Another codec for one namespace's new blocks; None: the tier's. ``ValueError`` for an unknown one."""
        self._codecs.set(namespace, codec)

    def codec_of(self, namespace: bytes) -> str:
        """Any thread. The codec of a namespace's next block, as configured or as ``auto`` found last; "auto" before it has."""
        return self._codecs.codec_of(namespace)

    @property
    def limit(self) -> int:
        """Loop. Bytes that the store's directory may take."""
        return self._ledger.room.limit

    @limit.setter
    def limit(self, limit: int) -> None:
        """Loop. Change it live; ``plan([])`` reaches a lower one step by step. ``ValueError`` below ``MIN_LIMIT``."""
        self._settings = replace(self._settings, limit=limit)
        self._ledger.room.limit = limit

    @property
    def min_free(self) -> int:
        """Loop. Bytes that stay free on the volume; may be set."""
        return self._ledger.room.min_free

    @min_free.setter
    def min_free(self, nbytes: int) -> None:
        self._settings = replace(self._settings, min_free=nbytes)
        self._ledger.room.min_free = nbytes

    @property
    def policy_name(self) -> str:
        """Loop. Name of the policy in use."""
        return self._settings.policy

    def switch_policy(self, name: str) -> None:
        """Loop. Go on with another policy and the same contents. ``ValueError`` when it can't be; the old one goes on."""
        self._ledger.warm()
        self._ledger.policy = switched(self._ledger.policy, name)
        self._settings = replace(self._settings, policy=name)

    # -- loop and writer: the disk's health ---------------------------------------------------------

    def probe(self) -> Health:
        """Writer. Look at the disk; opens a store again that had vanished or was read-only, where that is possible.

        With durability ``interval`` this is what makes commits durable: call it as often as that is to happen.
        """
        if self._lock is not None:
            self._lock.is_well()
        policy = self._ledger.policy
        built = policy.build() if isinstance(policy, WarmingPolicy) else None
        return replace(
            look(self._environment, self.state, self._settings.limit, self._free_space, self._reopen), policy=built
        )

    def observe(self, health: Health) -> None:
        """Loop. Take in what ``probe`` found."""
        if isinstance(health.loaded, Opened):
            self._adopt(health.loaded)
            log.info("the store %s is back, with %d blocks", self.path, len(self))
            return
        if health.policy is not None:
            self._ledger.warm(health.policy)
        self.counts["synced"] += health.synced
        room = self._ledger.room
        if health.free_bytes is not None:
            room.free_bytes = health.free_bytes
        if health.allocated_bytes is not None:
            room.allocated_bytes = health.allocated_bytes
        if health.other_bytes is not None:
            room.other_bytes = health.other_bytes
        self._turn(health.state, health.reason)

    def _turn(self, state: State, reason: str) -> None:
        if state != self.state:
            log.log(logging.INFO if state == "ok" else logging.ERROR, "SSD tier %s is %s: %s", self.path, state, reason)
            self.counts[f"state_{state}"] += 1
        if state == "full":
            self._ledger.room.disk_was_full()
        elif state == "ok":
            self._ledger.room.disk_is_well()
        self.state, self.reason = state, reason

    def _reopen(self, check: bool) -> Opened:
        self._environment.close()
        if self._lock is not None:
            self._lock.release()
        return self._settings.open(self.path, check)

    # -- writer -----------------------------------------------------------------------------------

    def commit(self, plan: CommitPlan) -> CommitOutcome:
        """Writer. One transaction: victims out, blocks in, accounting with them. Raises nothing for a sick disk."""
        return carry_out(self._environment, plan, self._free_space)

    # -- worker -----------------------------------------------------------------------------------

    def encode(self, meta: BlockMeta, payload: memoryview) -> EncodedBlock:
        """Worker. Encode and checksum a payload of ``meta.nbytes``; the result may point into it until it is committed."""
        if payload.nbytes != meta.nbytes:
            raise ValueError(f"block {meta.key.hex()[:16]}: {payload.nbytes} bytes given, {meta.nbytes} announced")
        encoded = encode(self._codecs.codec_for(meta.namespace, payload), payload)
        return EncodedBlock(
            meta, encoded.codec, encoded.frames, encoded.parts, encoded.stored_bytes, checksum(encoded.parts)
        )

    def read_into(self, key: bytes, out: memoryview) -> int:
        """Worker. Restore ``key`` into ``out``; returns the payload's bytes, verified.

        Raises ``Missing`` (``DiskTrouble`` when the disk is to blame: call ``probe``) or ``Damaged``, and
        then ``out`` holds anything; ``ValueError`` when ``out`` is too small.
        """
        try:
            return self._reader.read_into(self._environment, key, out)
        except (DiskTrouble, Departed):
            raise
        except Missing as error:
            if key in self._ledger.index.entries:  # a worker may look; what it may not do is change anything
                raise Damaged("its record is gone from the disk") from error
            raise

    def stored_before(self, keys: Sequence[bytes], when: float) -> Sequence[bytes]:
        """Worker. Those of ``keys`` (in the order of their record numbers) stored before ``when`` (seconds since the epoch)."""
        return stored_before(self._environment, keys, when)

    def read_ahead(self, keys: Sequence[bytes]) -> None:
        """Worker. Have the kernel fetch these records while others are being restored; a hint, raises nothing."""
        for key in keys:
            try:
                located = locate(self._environment, key)
            except (DiskTrouble, Damaged):
                return  # who restores it will be told
            if located is not None:
                read_ahead(self._environment, located)
