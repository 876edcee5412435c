"""Sharing by content: which block holds which part of which prompt, in memory and in the cold tier behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, cast

from omlxd.storage.chain import ExtraKey, Tokens
from omlxd.storage.paged_blocks import CacheBlock
from omlxd.storage.paged_hash import BlockHash, Ranges, compute_block_hash, prompt_hashes
from omlxd.storage.paged_pool import GROWTH_FOR_ONE, BlockPool, logger


class ColdTier(Protocol):
    """Where blocks are that are not in memory.

    One that also has `has_blocks(hashes) -> list[bool]` is asked once for a whole prompt, by that.
    """

    def has_block(self, block_hash: bytes) -> bool:
        """Whether the block could be restored."""


class PrefixIndex(BlockPool):
    """Finds blocks by chain hash, and registers what becomes full."""

    def __init__(
        self, block_size: int, max_blocks: int, initial_blocks: int, *, enable_caching: bool, model_name: str
    ) -> None:
        super().__init__(block_size, max_blocks, initial_blocks)
        self.enable_caching = enable_caching
        self.model_name = model_name
        self._paged_ssd_cache_manager: ColdTier | None = None
        if not model_name:
            logger.warning("PagedCacheManager without model_name: blocks of different models would share their hashes")

    def set_paged_ssd_cache_manager(self, manager: ColdTier | None) -> None:
        """Look there for what is not in memory; None to look nowhere."""
        with self._lock:
            self._paged_ssd_cache_manager = manager

    # Looking up

    def get_cached_block(self, block_hash: bytes) -> CacheBlock | None:
        """A block in memory of that hash, or None; counted. The caller has no reference:
        `acquire_cached_block` takes one.
        """
        with self._lock:
            return self._count(self.cached_block_hash_to_block.get_block(block_hash))

    def find_cached_block(
        self, tokens: Tokens, parent_hash: bytes | None = None, extra_keys: ExtraKey = None
    ) -> CacheBlock | None:
        """`get_cached_block` for the block of these tokens behind `parent_hash`; always None without caching."""
        if not self.enable_caching:
            return None
        return self.get_cached_block(compute_block_hash(parent_hash, tokens, extra_keys, self.model_name))

    def get_computed_blocks(
        self,
        token_ids: Tokens,
        extra_keys: ExtraKey = None,
        extra_key_token_start: int | None = None,
        extra_key_ranges: Ranges | None = None,
    ) -> tuple[list[CacheBlock], int]:
        """The longest run of full blocks from the start that are known, and how many tokens they hold.

        A block that only the cold tier has is registered as a free one, without bytes. The caller has no
        reference to any of them; `claim_computed_blocks` is the same with one.
        """
        return self._lookup(token_ids, extra_keys, extra_key_token_start, extra_key_ranges, claim=False)

    def claim_computed_blocks(
        self,
        token_ids: Tokens,
        extra_keys: ExtraKey = None,
        extra_key_token_start: int | None = None,
        extra_key_ranges: Ranges | None = None,
    ) -> tuple[list[CacheBlock], int]:
        """`get_computed_blocks`, and a reference to each of them, taken in the same step: nobody can evict
        one in between.
        """
        return self._lookup(token_ids, extra_keys, extra_key_token_start, extra_key_ranges, claim=True)

    def find_shared_prefix(
        self,
        tokens: Sequence[int],
        extra_keys: ExtraKey = None,
        extra_key_token_start: int | None = None,
        extra_key_ranges: Ranges | None = None,
    ) -> tuple[list[int], Sequence[int]]:
        """`(block ids, remaining tokens)`: what `get_computed_blocks` finds, and what is left to compute."""
        blocks, found = self.get_computed_blocks(tokens, extra_keys, extra_key_token_start, extra_key_ranges)
        return [block.block_id for block in blocks], tokens[found:]

    def _lookup(
        self,
        token_ids: Tokens,
        extra_keys: ExtraKey,
        extra_key_token_start: int | None,
        extra_key_ranges: Ranges | None,
        *,
        claim: bool,
    ) -> tuple[list[CacheBlock], int]:
        if not self.enable_caching:
            return [], 0
        hashes: Iterable[BlockHash] = prompt_hashes(
            token_ids, self.block_size, self.model_name, extra_keys, extra_key_token_start, extra_key_ranges
        )
        cold: Mapping[bytes, bool] = {}
        if self._paged_ssd_cache_manager is not None:
            hashes = list(hashes)
            # Outside the lock: the answer may come from another process.
            cold = self._ask_cold_tier(self._paged_ssd_cache_manager, hashes)
        with self._lock:
            found: list[CacheBlock] = []
            # What is registered must not push out another block of this very prompt, found already or about
            # to be.
            own = {block_id for name in hashes if (block_id := self._id_of(name)) is not None} if cold else set()
            for block_hash in hashes:
                block = self.cached_block_hash_to_block.get_block(block_hash)
                if block is None and cold.get(block_hash):
                    block = self._register_cold(block_hash, own)
                if self._count(block) is None:
                    break
                found.append(cast(CacheBlock, block))
            if claim:
                self.touch(found)
            return found, len(found) * self.block_size

    def _count(self, block: CacheBlock | None) -> CacheBlock | None:
        if block is None:
            self.stats.misses += 1
        else:
            self.stats.hits += 1
        return block

    def _ask_cold_tier(self, manager: ColdTier, hashes: Sequence[BlockHash]) -> dict[bytes, bool]:
        """Which of the blocks that are not in memory the cold tier has, as far as the prefix goes; each is
        asked for once.
        """
        with self._lock:
            known = self.cached_block_hash_to_block
            missing = [block_hash for block_hash in hashes if block_hash not in known]
        if not missing:
            return {}
        # Looked up at the class, since a mock has every attribute that one asks it for.
        ask_all = getattr(type(manager), "has_blocks", None)
        if callable(ask_all):
            has_blocks = cast(Callable[[ColdTier, Sequence[bytes]], Sequence[bool]], ask_all)
            return dict(zip(missing, has_blocks(manager, missing), strict=True))
        answers: dict[bytes, bool] = {}
        for block_hash in missing:
            answers[block_hash] = manager.has_block(block_hash)
            if not answers[block_hash]:
                break
        return answers

    def _register_cold(self, block_hash: BlockHash, own: set[int]) -> CacheBlock | None:
        """A free block that stands for one in the cold tier; None when there is no room for it but in `own`,
        where its id is added.
        """
        block = next((block for block in self.free_block_queue if block.block_id not in own), None)
        if block is None:
            if not self._grow(GROWTH_FOR_ONE):
                return None
            block = self.blocks[-1]
        self.free_block_queue.remove(block)
        if block.block_hash is not None:
            self._evict(block)
        self._name(block, block_hash, self.block_size)
        self._cold[block.block_id] = block
        self.free_block_queue.append(block)
        own.add(block.block_id)
        return block

    def _id_of(self, block_hash: bytes) -> int | None:
        block = self.cached_block_hash_to_block.get_block(block_hash)
        return None if block is None else block.block_id

    # Registering

    def register_block_hash(
        self,
        block: CacheBlock,
        tokens: Tokens,
        parent_hash: bytes | None = None,
        extra_keys: ExtraKey = None,
    ) -> BlockHash | None:
        """Make a block in use findable by the hash of its `tokens` behind `parent_hash`; returns the hash.

        Without caching nothing happens, and None is returned. ValueError for a block that nobody uses and for
        the null block.
        """
        if not self.enable_caching:
            return None
        block_hash = compute_block_hash(parent_hash, tokens, extra_keys, self.model_name)
        with self._lock:
            self._check_in_use(block)
            self._name(block, block_hash, len(tokens))
        return block_hash

    def cache_full_blocks(
        self,
        blocks: Sequence[CacheBlock],
        token_ids: Tokens,
        num_cached_blocks: int,
        num_full_blocks: int,
        extra_keys: ExtraKey = None,
        extra_key_token_start: int | None = None,
        extra_key_ranges: Ranges | None = None,
    ) -> None:
        """Make `blocks[num_cached_blocks:num_full_blocks]` of one request findable.

        `token_ids` are the request's tokens from its start. The blocks are salted as `get_computed_blocks`
        does with the same extra keys. ValueError, with nothing registered, when blocks or tokens are too few,
        or a block is not in use.
        """
        if not self.enable_caching or num_full_blocks <= num_cached_blocks:
            return
        if num_full_blocks > min(len(blocks), len(token_ids) // self.block_size):
            raise ValueError(
                f"{num_full_blocks} full blocks of {self.block_size} tokens were announced; "
                f"there are {len(blocks)} blocks and {len(token_ids)} tokens"
            )
        hashes = prompt_hashes(
            token_ids, self.block_size, self.model_name, extra_keys, extra_key_token_start, extra_key_ranges
        )
        named = list(zip(blocks[:num_full_blocks], hashes, strict=False))[num_cached_blocks:]
        with self._lock:
            for block, _ in named:
                self._check_in_use(block)
            for block, block_hash in named:
                self._name(block, block_hash, self.block_size)

    def _check_in_use(self, block: CacheBlock) -> None:
        if block.is_null or self.allocated_blocks.get(block.block_id) is not block:
            raise ValueError(f"{block!r} is not in use: only a block that somebody holds can be registered")

    def _name(self, block: CacheBlock, block_hash: bytes, token_count: int) -> None:
        if block.block_hash is not None and block.block_hash != block_hash:
            self.cached_block_hash_to_block.pop(block.block_hash, block.block_id)
        block.block_hash = block_hash
        block.token_count = token_count
        self.cached_block_hash_to_block.insert(block_hash, block)
