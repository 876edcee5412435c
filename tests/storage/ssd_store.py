"""A store on a real disk, driven from one thread: what the daemon's loop and its workers do, one after the other."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from omlxd.storage.blocks import BlockMeta, block_key
from omlxd.storage.ssd import CommitOutcome, Damaged, SsdTier

NAMESPACE = b"n" * 32
OTHER = b"o" * 32
PLENTY = 1 << 50


def key_of(chain: object, position: int) -> bytes:
    """The key of a block of a test's chain."""
    return block_key(hashlib.sha256(f"{chain}/{position}".encode()).digest())


def payload_of(key: bytes, nbytes: int) -> bytes:
    """Bytes that only this key has, and that do not compress."""
    return random.Random(key).randbytes(nbytes)


def chain_of(name: object, sizes: Iterable[int], namespace: bytes = NAMESPACE, start: int = 0) -> list[BlockMeta]:
    """The blocks of one chain, head first."""
    return [
        BlockMeta(key_of(name, at), namespace, nbytes, key_of(name, at - 1) if at else None, at)
        for at, nbytes in enumerate(sizes, start)
    ]


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def open_tier(
    path: Path,
    *,
    limit: int = 64 << 20,
    policy: str = "lru",
    min_free: int = 0,
    codec: str = "raw",
    durability: str = "commit",
    free_space: Callable[[Path], int] = lambda path: PLENTY,
    boot: str = "first",
) -> SsdTier:
    return SsdTier.open(
        path,
        limit=limit,
        policy=policy,
        min_free=min_free,
        codec=codec,
        durability=durability,  # type: ignore[arg-type]
        clock=Clock(),
        free_space=free_space,
        boot=boot,
    )


def spill(tier: SsdTier, metas: Sequence[BlockMeta]) -> CommitOutcome | None:
    """Store the blocks in one plan; None when there was none."""
    plan = tier.plan([tier.encode(meta, memoryview(payload_of(meta.key, meta.nbytes))) for meta in metas])
    if plan is None:
        return None
    outcome = tier.commit(plan)
    tier.applied(plan, outcome)
    return outcome


def spill_in_groups(tier: SsdTier, metas: Iterable[BlockMeta]) -> None:
    """Store many blocks, as many at once as the tier wants."""
    group: list[BlockMeta] = []
    for meta in metas:
        if group and sum(one.nbytes for one in group) + meta.nbytes > tier.group_bytes:
            spill(tier, group)
            group = []
        group.append(meta)
    if group:
        spill(tier, group)


def do_chores(tier: SsdTier, at_most: int = 1000) -> int:
    """Everything that waits for a plan; returns how many it took."""
    for done in range(at_most):
        if not tier.has_chores or (plan := tier.plan()) is None:
            return done
        tier.applied(plan, tier.commit(plan))
    raise AssertionError(f"{at_most} plans, and still something to do")


def restore(tier: SsdTier, key: bytes) -> bytes:
    """The payload, read back."""
    entry = tier.meta(key)
    buffer = bytearray(entry.nbytes if entry is not None else 64 << 20)
    return bytes(buffer[: tier.read_into(key, memoryview(buffer))])


def disk_usage(path: Path) -> int:
    """What ``du`` says of a directory, by its own means."""
    return sum(found.lstat().st_blocks * 512 for found in (path, *path.rglob("*")))


def assert_exact(tier: SsdTier) -> None:
    """The accounting, in memory and on the disk, against a recount; every visible record reads back."""
    entries = list(tier.entries.values())
    stats = tier.stats()
    assert stats["blocks"] == len(entries)
    assert stats["stored_bytes"] == sum(entry.stored_bytes for entry in entries)
    assert stats["payload_bytes"] == sum(entry.nbytes for entry in entries)
    for space in tier.namespaces():
        own = [entry for entry in entries if entry.namespace == space.id]
        assert (space.blocks, space.nbytes, space.stored_bytes) == (
            len(own),
            sum(entry.nbytes for entry in own),
            sum(entry.stored_bytes for entry in own),
        )
    assert tier.recount() == {space.id: (space.blocks, space.nbytes, space.stored_bytes) for space in tier.namespaces()}
    for entry in entries:
        assert restore(tier, entry.key) == payload_of(entry.key, entry.nbytes)


def read_all(tier: SsdTier) -> int:
    """Restore everything; what is damaged is told to the tier, what is served must be right. Returns how many were."""
    served = 0
    for key, entry in list(tier.entries.items()):
        try:
            assert restore(tier, key) == payload_of(key, entry.nbytes)
            served += 1
        except Damaged as error:
            tier.damaged(key, error.reason)
            assert key not in tier
    return served
