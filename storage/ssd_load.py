"""From a directory to an open store: lock, order on the file system, environment, index.

Runs on one worker thread (or before the loop starts): it reads from the disk and may take a while.
A store that cannot be used is moved aside, never deleted unseen: it stays in ``set-aside``, cut to
what the limit leaves for it, until the next one takes its place.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import shutil
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

import lmdb
import msgpack
import psutil

from omlxd.policy.base import CachePolicy
from omlxd.storage.environment import COPY_NAME, Durability, Environment, trouble
from omlxd.storage.ssd_ballast import ballast_bytes, lay_ballast
from omlxd.storage.ssd_commit import COUNTERS, Row, pack_counters
from omlxd.storage.ssd_data_file import DATA_NAME
from omlxd.storage.ssd_errors import Damaged, DiskTrouble, StoreBroken
from omlxd.storage.ssd_files import ASIDE_NAME, TAG_NAME, refuse_strangers
from omlxd.storage.ssd_index import Entry, Index
from omlxd.storage.ssd_lock import StoreLock
from omlxd.storage.ssd_pages import BadFile
from omlxd.storage.ssd_records import seal, unseal
from omlxd.storage.ssd_rows import load_counters, load_entries, load_recency, load_spaces
from omlxd.storage.ssd_space import Pages, count_pages
from omlxd.storage.ssd_transaction import WriteTransaction
from omlxd.storage.ssd_warmup import WARM_AT_ONCE, WarmingPolicy

log = logging.getLogger(__name__)

FAILURES_TO_CHECK = 3
"""After so many owners in a row that did not close the store its structure is checked thoroughly."""
CLEAN = b"clean"
_NUMBERS = 1  # msgpack extension: record numbers, 64-bit words

_CACHEDIR = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This directory holds the KV cache of omlxd: it can be computed again, and need not be backed up.\n"
)


@dataclass(slots=True)
class Opened:
    """A store that was opened. ``aside`` says why a former one was moved away, empty where there was none."""

    environment: Environment
    lock: StoreLock | None
    index: Index
    policy: CachePolicy
    next_number: int
    counters: dict[str, int]
    pages: Pages
    readonly: bool
    clean: bool
    """The last owner closed it in good order."""
    aside: str = ""
    unreadable: list[tuple[bytes, str]] = field(default_factory=list)
    """Records that could not be read: (key, reason)."""
    trouble: DiskTrouble | None = None
    """The store can be read, but the disk took no write."""


def open_store(
    path: Path,
    *,
    limit: int,
    durability: Durability,
    make_policy: Callable[[], CachePolicy],
    boot: str,
    check: bool = False,
) -> Opened:
    """Open or create the store at ``path``. Raises ``SsdLocked``, ``SsdError`` (``refuse_strangers``), ``OSError``.

    ``boot`` names this run of the machine. ``check``: go through its structure thoroughly, whatever its past.
    """
    readonly = False
    map_bytes = limit - (limit >> 6)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_strangers(path)
        lock: StoreLock | None = StoreLock.acquire(path, boot, durability)
        with contextlib.suppress(OSError):  # neither is worth a refusal
            _tag(path)
            lay_ballast(path, ballast_bytes(limit))
        shutil.rmtree(path / COPY_NAME, ignore_errors=True)
    except OSError as error:
        if error.errno != errno.EROFS or not (path / DATA_NAME).exists():
            raise
        readonly, lock = True, None
    try:
        aside = ""
        try:
            thorough = check or (lock is not None and lock.failures >= FAILURES_TO_CHECK)
            opened = _open(path, map_bytes, durability, make_policy, readonly, lock, thorough)
        except (StoreBroken, Damaged) as error:
            if readonly:
                raise OSError(errno.EROFS, f"{error}; and it cannot be moved aside, the disk is read-only") from error
            aside = str(error)
            log.error("%s; it is moved aside, the cache starts cold", aside)
            set_aside(path, limit >> 4)
            opened = _open(path, map_bytes, durability, make_policy, readonly, lock)
        opened.aside = aside
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return opened


def _open(
    path: Path,
    map_bytes: int,
    durability: Durability,
    make_policy: Callable[[], CachePolicy],
    readonly: bool,
    lock: StoreLock | None,
    thorough: bool = False,
) -> Opened:
    environment = Environment(path, map_bytes=map_bytes, durability=durability, readonly=readonly, thorough=thorough)
    collecting = gc.isenabled()
    gc.disable()  # so many new objects, none of them garbage, would be gone through again and again
    try:
        opened = _load(environment, make_policy, readonly, lock)
        if not readonly:
            try:
                _mark_open(environment, opened)
            except (lmdb.DiskError, OSError) as error:
                opened.trouble = trouble(error)
            except lmdb.Error as error:
                if error.code <= 0 and not isinstance(
                    error, lmdb.MapFullError
                ):  # LMDB's own codes: the file is to blame
                    raise
                opened.trouble = trouble(error)
        opened.pages = count_pages(environment)
    except (lmdb.Error, BadFile, DiskTrouble) as error:
        environment.close()
        raise StoreBroken(path, str(error)) from error
    except BaseException:
        environment.close()
        raise
    finally:
        if collecting:
            gc.freeze()  # they live as long as the store: no collection is to look at them
            gc.enable()
    return opened


def _tag(path: Path) -> None:
    """Tell backup programs to pass by (https://bford.info/cachedir/)."""
    tag = path / TAG_NAME
    if not tag.exists():
        tag.write_text(_CACHEDIR, "ascii")


def set_aside(path: Path, keep_bytes: int) -> None:
    """Move the environment's files into ``set-aside``, in place of what was there, at most ``keep_bytes`` of them."""
    target = path / ASIDE_NAME
    shutil.rmtree(target, ignore_errors=True)
    data, lock = path / DATA_NAME, path / "lock.mdb"
    lock.unlink(missing_ok=True)
    if not data.exists():
        return
    target.mkdir(mode=0o700)
    if data.is_file() and data.stat().st_size > keep_bytes:
        os.truncate(data, keep_bytes)
    data.rename(target / DATA_NAME)


def other_bytes(path: Path) -> int:
    """What everything in the store's directory but the data file takes, as ``du`` counts it."""
    return sum(_allocated(found) for found in _walk(path) if found != path / DATA_NAME)


def _walk(path: Path) -> Iterator[Path]:
    yield path
    for directory, folders, files in os.walk(path):
        for name in (*folders, *files):
            yield Path(directory) / name


def _allocated(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0


# -- the index ------------------------------------------------------------------------------------


def _load(
    environment: Environment, make_policy: Callable[[], CachePolicy], readonly: bool, lock: StoreLock | None
) -> Opened:
    index = Index()
    unreadable: list[tuple[bytes, str]] = []
    with environment.reading() as reading:
        counters = load_counters(reading, environment)
        clean = reading.get(environment.meta, CLEAN) == b"yes"
        numbers = load_spaces(reading, environment, index)
        state, log_of_use = load_recency(reading, environment)
    entries = load_entries(environment, numbers, unreadable)
    index.fill(entries)
    residents = entries[:]  # the index changes while a large store's policy is arranged

    def build() -> CachePolicy:
        residents.sort(key=_by_number)  # the order of storing
        return _restore_policy(make_policy(), {entry.key: entry for entry in residents}, state, log_of_use)

    policy = build() if len(entries) <= WARM_AT_ONCE else WarmingPolicy(build)
    next_number = max([entry.chunk_id + 1 for entry in entries], default=0)
    next_number = max(next_number, counters.get("next_number", 0))
    return Opened(environment, lock, index, policy, next_number, counters, Pages(0, 0), readonly, clean, "", unreadable)


_by_number = attrgetter("chunk_id")


def _restore_policy(policy: CachePolicy, entries: Mapping[bytes, Entry], state: bytes, used: array[int]) -> CachePolicy:
    """The state of the last clean stop, then what was stored since, then the uses since, in their order."""
    by_number = {entry.chunk_id: key for key, entry in entries.items()} if state or used else {}
    try:
        policy.restore_state(unpack_state(state, by_number), entries)
    except (ValueError, TypeError, msgpack.UnpackException, Damaged) as error:
        log.warning("the state of the eviction policy is not used: %s", error)
        policy.restore_state({}, entries)
    keys = [by_number[number] for number in used if number in by_number]
    keys.reverse()  # ``touch`` takes a prefix, and goes from its tail to its head
    policy.touch(keys)
    return policy


def pack_state(state: Mapping[str, object], entries: Mapping[bytes, Entry]) -> bytes:
    """A policy's state, msgpacked; lists of resident keys, at any depth, as their record numbers: an eighth of the size."""
    packed: bytes = msgpack.packb({name: _numbered(part, entries) for name, part in state.items()}, use_bin_type=True)
    return seal(packed)


def _numbered(part: object, entries: Mapping[bytes, Entry]) -> object:
    if not isinstance(part, list) or not part:
        return part
    if all(isinstance(key, bytes) and key in entries for key in part):
        return msgpack.ExtType(_NUMBERS, array("Q", [entries[key].chunk_id for key in part]).tobytes())
    return [_numbered(item, entries) for item in part]


def unpack_state(packed: bytes, by_number: Mapping[int, bytes]) -> dict[str, object]:
    """The reverse, with the index's own key objects; numbers of records that have left are skipped."""

    def keys_of(kind: int, data: bytes) -> list[bytes]:
        if kind != _NUMBERS:
            raise ValueError(f"unknown extension {kind}")
        numbers = array("Q", data)
        return [by_number[number] for number in numbers if number in by_number]

    if not packed:
        return {}
    state = msgpack.unpackb(unseal(packed), strict_map_key=False, ext_hook=keys_of)
    if not isinstance(state, dict):
        raise TypeError("it is not a map")
    return state


def _mark_open(environment: Environment, opened: Opened) -> None:
    """The first transaction: not clean any more, unreadable records out, totals as they were recounted."""
    with WriteTransaction(environment) as txn:
        txn.put(environment.meta, CLEAN, b"no")
        txn.put(environment.meta, COUNTERS, pack_counters(opened.counters | {"next_number": opened.next_number}))
        for key, _ in opened.unreadable:
            txn.delete_block(key)
        for space in opened.index.spaces.values():
            row = Row(space.number, space.descriptor, space.blocks, space.nbytes, space.stored_bytes)
            packed = row.pack()
            if txn.get(environment.namespaces, space.id) != packed:
                txn.put(environment.namespaces, space.id, packed)


def boot_id() -> str:
    """Changes with each start of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return f"{psutil.boot_time():.0f}"
