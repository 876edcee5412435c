"""What an operator asks for: a smaller file, blocks from another store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb

from omlxd.storage.environment import Environment, trouble
from omlxd.storage.ssd_archive import ArchivedNamespace, check_archive, read_archive
from omlxd.storage.ssd_errors import SsdError
from omlxd.storage.ssd_records import EncodedBlock
from omlxd.storage.ssd_room import Room
from omlxd.storage.ssd_space import count_pages, punch_free_pages

if TYPE_CHECKING:
    from omlxd.storage.ssd import SsdTier


def rewrite(environment: Environment, room: Room, free_space: Callable[[Path], int]) -> int:
    """Copy the data file without its free pages; returns the bytes saved on the disk. Writer's thread.

    Raises ``SsdError`` where both files together would not fit the limit or leave the volume its floor, ``DiskTrouble``.
    """
    punch_free_pages(environment)
    before = environment.allocated_bytes()
    copy = count_pages(environment).live * environment.header.page_bytes
    if before + copy + room.other_bytes > room.limit:
        raise SsdError(
            f"a copy of {copy} bytes beside the {before} in use does not fit the limit of {room.limit} bytes"
        )
    if free_space(environment.path) - copy < room.min_free:
        raise SsdError(f"a copy of {copy} bytes would leave less than {room.min_free} bytes free on the volume")
    try:
        environment.rewrite()
    except (OSError, lmdb.Error) as error:
        raise trouble(error) from error
    return before - environment.allocated_bytes()


def import_blocks(tier: SsdTier, file: Path, progress: Callable[[int], None]) -> int:
    """Check the archive, then store its blocks in groups; returns how many were stored."""
    check_archive(file)
    before = tier.counts["written_blocks"]
    group: list[EncodedBlock] = []
    size = 0
    left_out: set[bytes] = set()
    for entry in read_archive(file):
        if isinstance(entry, ArchivedNamespace):
            tier.register_namespace(entry.id, entry.descriptor)
            continue
        if group and size + entry.stored_bytes > tier.group_bytes:
            _store(tier, group)
            left_out.update(block.key for block in group if block.key not in tier)
            group, size = [], 0
            progress(tier.counts["written_blocks"] - before)
        if (
            entry.meta.parent in left_out
        ):  # there was no room for what it continues: it would take others' room for nothing
            left_out.add(entry.key)
            continue
        group.append(entry)
        size += entry.stored_bytes
    _store(tier, group)
    progress(tier.counts["written_blocks"] - before)
    return tier.counts["written_blocks"] - before


def _store(tier: SsdTier, group: list[EncodedBlock]) -> None:
    plan = tier.plan(group)
    if plan is None:
        return
    outcome = tier.commit(plan)
    tier.applied(plan, outcome)
    if outcome.reason:
        raise SsdError(f"the store {tier.path} took no more blocks: {outcome.reason}")
