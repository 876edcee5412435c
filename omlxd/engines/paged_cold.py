"""The daemon as the cold tier behind a paged block manager.

A block that leaves the engine's memory is still in the daemon, if the engine stored it there, and also after
both have been restarted. The manager asks for a whole prompt in one round trip; the bytes come when a request
claims the blocks:

    cold = DaemonColdTier(space)
    manager.set_paged_ssd_cache_manager(cold)
    blocks, tokens = manager.claim_computed_blocks(prompt)
    usable = cold.restore(manager, blocks, put)     # put(block, loaded): copy into the engine's tensors at block.block_id
    ...
    cold.store(blocks_of_the_request, payloads)

`docs/paged.md` has the whole loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

from omlxd.errors import LeaseEnded, OmlxdError
from omlxd.results import StoreResult
from omlxd.storage.framing import bytes_header, frame

if TYPE_CHECKING:
    from omlxd.client import Space
    from omlxd.leases import LoadedBlock
    from omlxd.operations import Payload
    from omlxd.storage.paged import CacheBlock, PagedCacheManager

logger = logging.getLogger(__name__)

_DOMAIN = "omlxd paged key 1"
LOAD_SECONDS = 2.0


class DaemonColdTier:
    """Looks up, loads and stores the manager's blocks in one namespace of the daemon.

    The manager's hashes know the model's name only. What the daemon sees is derived from them and the
    namespace's id, so blocks of other weights, layouts or users never answer. Without a daemon every answer
    is "not there", logged once for each outage.
    """

    def __init__(self, space: Space, *, timeout: float = LOAD_SECONDS) -> None:
        """`timeout`: seconds that a restore from the SSD may take."""
        self.space = space
        self.timeout = timeout
        self.failures = 0
        """Questions, loads and stores that the daemon did not answer."""
        self._away = False
        self._before_hash = frame(_DOMAIN) + frame(space.id) + bytes_header(32)

    def keys(self, hashes: Sequence[bytes]) -> list[bytes]:
        """The daemon's names for the manager's hashes."""
        return [sha256(self._before_hash + block_hash).digest() for block_hash in hashes]

    def has_block(self, block_hash: bytes) -> bool:
        """Whether the daemon could load this block now."""
        return self.has_blocks([block_hash])[0]

    def has_blocks(self, hashes: Sequence[bytes]) -> list[bool]:
        """For each hash, whether the daemon could load its block now: one round trip for all."""
        try:
            answers = self.space.lookup_keys(self.keys(hashes))
        except OmlxdError as error:
            self._failed(error)
            return [False] * len(hashes)
        self._away = False
        return answers

    def restore(
        self, manager: PagedCacheManager, blocks: Sequence[CacheBlock], put: Callable[[CacheBlock, LoadedBlock], None]
    ) -> int:
        """Load the bytes of those of the claimed `blocks` that are cold, head to tail; how many `blocks`,
        from the start, can be used.

        `put(block, loaded)` copies `loaded.view` or `loaded.arrays()` to where the engine keeps the block,
        before it returns. From the first block on that cannot be had, the claims are given back: those blocks
        are not the caller's any more.
        """
        cold = {block.block_id for block in manager.get_cold_blocks()}
        missing = [block for block in blocks if block.block_id in cold]
        restored = self._load(manager, missing, put) if missing else 0
        if restored == len(missing):
            return len(blocks)
        usable = next(index for index, block in enumerate(blocks) if block is missing[restored])
        manager.release_for_eviction([block.block_id for block in reversed(blocks[usable:])])
        for block in missing[restored:]:
            # Nobody has its bytes, so nobody should find it. Another request that has claimed it too comes
            # here for itself.
            manager.evict_block_permanently(block.block_id)
        return usable

    def _load(
        self,
        manager: PagedCacheManager,
        blocks: Sequence[CacheBlock],
        put: Callable[[CacheBlock, LoadedBlock], None],
    ) -> int:
        done = 0
        try:
            with self.space.load_keys(self.keys(_hashes(blocks)), timeout=self.timeout) as lease:
                for block, loaded in zip(blocks, lease, strict=False):
                    put(block, loaded)
                    manager.restore_block(block.block_id, loaded)
                    done += 1
        except LeaseEnded as error:
            logger.warning("a restore ended after %d of %d blocks: %s", done, len(blocks), error)
        except OmlxdError as error:
            self._failed(error)
        else:
            self._away = False
        return done

    def store(self, blocks: Sequence[CacheBlock], payloads: Sequence[Payload], start: int = 0) -> StoreResult:
        """Give the daemon the payloads of `blocks[start:]`. `blocks` are one request's registered blocks from
        its first on.

        Raises ValueError for a block without a hash, and where `Space.store_keys` does.
        """
        try:
            result = self.space.store_keys(self.keys(_hashes(blocks)), payloads, start=start)
        except OmlxdError as error:
            self._failed(error)
            return StoreResult(0, 0, {"unavailable": len(payloads)})
        self._away = False
        return result

    def _failed(self, error: OmlxdError) -> None:
        self.failures += 1
        if not self._away:
            logger.warning("the daemon does not answer (%s); what is not in memory is computed again", error)
        self._away = True


def _hashes(blocks: Sequence[CacheBlock]) -> list[bytes]:
    hashes = [block.block_hash for block in blocks if block.block_hash is not None]
    if len(hashes) < len(blocks):
        raise ValueError(f"{len(blocks) - len(hashes)} of {len(blocks)} blocks have no hash; register them first")
    return hashes
