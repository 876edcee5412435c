"""From a directory to an open store: lock, order on the file system, environment, index.

Runs on one worker thread (or before the loop starts): it reads from the disk and may take a while.
A store that cannot be used is moved aside, never deleted unseen: it stays in ``set-aside``, cut to
what the limit leaves for it, until the next one takes its place.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import lmdb
import msgpack
import psutil

from omlxd.policy.base import CachePolicy
from omlxd.storage.environment import DATA_NAME, Durability, Environment, Pages
from omlxd.storage.ssd_commit import COUNTERS, Row, unpack_row
from omlxd.storage.ssd_errors import Damaged, DiskTrouble, SsdError, StoreBroken
from omlxd.storage.ssd_index import Entry, Index, SpaceTotals
from omlxd.storage.ssd_lock import StoreLock
from omlxd.storage.ssd_records import unpack_record

log = logging.getLogger(__name__)

ASIDE_NAME = "set-aside"
CLEAN = b"clean"
STATE = b"state"
"""Key of the policy's state in ``recency``; a 4-byte chunk number follows."""

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
    """Records that could not be read: (key, reason); they are removed by the next commit."""


def open_store(
    path: Path,
    *,
    map_bytes: int,
    keep_aside_bytes: int,
    durability: Durability,
    make_policy: Callable[[], CachePolicy],
) -> Opened:
    """Open or create the store at ``path``. Raises ``SsdLocked``, ``OSError``."""
    readonly = False
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock: StoreLock | None = StoreLock.acquire(path)
        _tag(path)
    except OSError as error:
        if error.errno != errno.EROFS or not (path / DATA_NAME).exists():
            raise
        readonly, lock = True, None
    try:
        aside = ""
        try:
            opened = _open(path, map_bytes, durability, make_policy, readonly, lock)
        except (StoreBroken, Damaged) as error:
            if readonly:
                raise OSError(errno.EROFS, f"{error}; and it cannot be moved aside, the disk is read-only") from error
            aside = str(error)
            log.error("%s; it is moved aside, the cache starts cold", aside)
            set_aside(path, keep_aside_bytes)
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
) -> Opened:
    environment = Environment(path, map_bytes=map_bytes, durability=durability, readonly=readonly)
    try:
        opened = _load(environment, make_policy, readonly, lock)
        if not readonly:
            _mark_open(environment, opened)
        opened.pages = environment.count_pages()
    except (lmdb.Error, DiskTrouble) as error:
        environment.close()
        raise StoreBroken(path, str(error)) from error
    except BaseException:
        environment.close()
        raise
    return opened


def _tag(path: Path) -> None:
    """Tell backup programs to pass by (https://bford.info/cachedir/)."""
    tag = path / "CACHEDIR.TAG"
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
    if keep_bytes <= 0:
        data.unlink()
        return
    target.mkdir(mode=0o700)
    if data.stat().st_size > keep_bytes:
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
    policy = make_policy()
    with environment.reading() as txn:
        counters = {
            str(name): int(value)
            for name, value in msgpack.unpackb(txn.get(COUNTERS, b"\x80", db=environment.meta)).items()
        }
        clean = bytes(txn.get(CLEAN, b"", db=environment.meta)) == b"yes"
        numbers = _load_spaces(txn, environment, index)
        entries = _load_entries(txn, environment, numbers, unreadable)
        state, log_of_use = _load_recency(txn, environment)
    entries.sort(key=_by_number)
    for entry in entries:
        index.add(entry)
    _restore_policy(policy, index, state, log_of_use)
    next_number = max(counters.get("next_number", 0), entries[-1].chunk_id + 1 if entries else 0)
    return Opened(environment, lock, index, policy, next_number, counters, Pages(0, 0), readonly, clean, "", unreadable)


def _by_number(entry: Entry) -> int:
    return entry.chunk_id


def _load_spaces(txn: lmdb.Transaction[memoryview], environment: Environment, index: Index) -> dict[int, SpaceTotals]:
    for id_, packed in txn.cursor(db=environment.namespaces):
        row = unpack_row(bytes(packed))
        index.spaces[bytes(id_)] = SpaceTotals(bytes(id_), row.number, dict(row.descriptor))
    return {space.number: space for space in index.spaces.values()}


def count_rows(environment: Environment) -> dict[bytes, tuple[int, int, int]]:
    """The namespaces' totals as they are written down: blocks, payload bytes, stored bytes."""
    with environment.reading() as txn:
        rows = {bytes(id_): unpack_row(bytes(packed)) for id_, packed in txn.cursor(db=environment.namespaces)}
    return {id_: (row.blocks, row.nbytes, row.stored_bytes) for id_, row in rows.items()}


def _load_entries(
    txn: lmdb.Transaction[memoryview],
    environment: Environment,
    numbers: dict[int, SpaceTotals],
    unreadable: list[tuple[bytes, str]],
) -> list[Entry]:
    entries: list[Entry] = []
    keys: dict[bytes, bytes] = {}  # one object for one key, parents included
    sizes: dict[int, int] = {}  # and for one size
    layouts: dict[bytes | None, bytes | None] = {None: None}
    for raw_key, packed in txn.cursor(db=environment.blocks):
        key = bytes(raw_key)
        try:
            record = unpack_record(key, bytes(packed))
            space = numbers[record.namespace]
        except (Damaged, KeyError) as error:
            unreadable.append((key, str(error) if isinstance(error, Damaged) else f"unknown namespace {error}"))
            continue
        parent = record.parent
        entries.append(
            Entry(
                keys.setdefault(key, key),
                record.number,
                space,
                sizes.setdefault(record.nbytes, record.nbytes),
                sizes.setdefault(record.stored_bytes, record.stored_bytes),
                environment.pages_of(record.stored_bytes),
                None if parent is None else keys.setdefault(parent, parent),
                record.position,
                layouts.setdefault(record.layout, record.layout),
            )
        )
    return entries


def _load_recency(txn: lmdb.Transaction[memoryview], environment: Environment) -> tuple[bytes, list[int]]:
    state: list[bytes] = []
    used: list[int] = []
    for key, value in txn.cursor(db=environment.recency):
        if bytes(key[: len(STATE)]) == STATE:
            state.append(bytes(value))
        else:
            used.extend(word for (word,) in struct.iter_unpack("<Q", value[: len(value) - len(value) % 8]))
    return b"".join(state), used


def _restore_policy(policy: CachePolicy, index: Index, state: bytes, used: list[int]) -> None:
    """The state of the last clean stop, then what was stored since, then the uses since, in their order."""
    entries = index.entries
    try:
        found = _same_objects(msgpack.unpackb(state, strict_map_key=False), entries) if state else {}
        policy.restore_state(found, entries)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        log.warning("the state of the eviction policy is not used: %s", error)
        policy.restore_state({}, entries)
    if used:
        by_number = {entry.chunk_id: entry.key for entry in entries.values()}
        keys = [by_number[number] for number in used if number in by_number]
        keys.reverse()  # ``touch`` takes a prefix, and goes from its tail to its head
        policy.touch(keys)


def _same_objects(value: object, entries: dict[bytes, Entry]) -> dict[str, object]:
    """The state with the index's own key objects in it: a second copy of each key would cost 80 bytes a record."""
    if not isinstance(value, dict):
        raise TypeError("it is not a map")
    return {
        str(name): [entries[item].key if isinstance(item, bytes) and item in entries else item for item in part]
        if isinstance(part, list)
        else part
        for name, part in value.items()
    }


def _mark_open(environment: Environment, opened: Opened) -> None:
    """The first transaction: not clean any more, unreadable records out, totals as they were recounted."""
    with environment.writing() as txn:
        txn.put(environment.meta, CLEAN, b"no")
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


__all__ = ["ASIDE_NAME", "CLEAN", "STATE", "Opened", "SsdError", "boot_id", "open_store", "other_bytes", "set_aside"]
