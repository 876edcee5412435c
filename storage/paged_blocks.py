"""The parts of the paged block manager: a block, the queue of free ones, the index by hash, a request's
table.

None of them locks; the manager does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False, repr=False, slots=True)
class CacheBlock:
    """Metadata of one physical KV block; the tensors are the engine's, by `block_id`."""

    block_id: int
    ref_count: int = 0
    """Requests that use it."""
    block_hash: bytes | None = None
    """Its chain hash, while it is full and can be found by it."""
    prev_free_block: CacheBlock | None = None
    next_free_block: CacheBlock | None = None
    is_null: bool = False
    token_count: int = 0
    last_access: float = field(default_factory=time.time)
    """Seconds since the epoch; for people. The free queue has the order of eviction."""

    def is_full(self, block_size: int) -> bool:
        """Whether it holds `block_size` tokens."""
        return self.token_count >= block_size

    def is_shared(self) -> bool:
        """Whether more than one request uses it."""
        return self.ref_count > 1

    def reset_hash(self) -> None:
        """Forget the hash."""
        self.block_hash = None

    def touch(self) -> None:
        """Set `last_access` to now."""
        self.last_access = time.time()

    def __repr__(self) -> str:
        name = "None" if self.block_hash is None else self.block_hash.hex()[:8]
        return f"CacheBlock(id={self.block_id}, ref_count={self.ref_count}, tokens={self.token_count}, hash={name})"


class FreeKVCacheBlockQueue:
    """Free blocks in the order in which they will be taken: the front is the next victim.

    A doubly linked list through the blocks between two sentinels, so that a block in the middle leaves in
    constant time when it is hit.
    """

    def __init__(self, blocks: Sequence[CacheBlock]) -> None:
        self.num_free_blocks = 0
        self._head = CacheBlock(block_id=-1)
        self._tail = CacheBlock(block_id=-1)
        self._head.next_free_block = self._tail
        self._tail.prev_free_block = self._head
        self.append_n(blocks)

    def popleft(self) -> CacheBlock:
        """Take the block at the front; ValueError when there is none."""
        block = self._head.next_free_block
        if block is None or block is self._tail:
            raise ValueError("no free block is left in the queue")
        self.remove(block)
        return block

    def popleft_n(self, n: int) -> list[CacheBlock]:
        """Take the `n` blocks at the front; AssertionError, with nothing taken, when there are fewer."""
        if n > self.num_free_blocks:
            raise AssertionError(f"{n} blocks wanted, {self.num_free_blocks} are in the queue")
        return [self.popleft() for _ in range(n)]

    def remove(self, block: CacheBlock) -> None:
        """Take `block`, wherever it stands; RuntimeError when it is not queued."""
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise RuntimeError(f"{block!r} is not in the free queue")
        before.next_free_block, after.prev_free_block = after, before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: CacheBlock) -> None:
        """Put `block` at the end: it will be taken last. RuntimeError when it is queued already."""
        if block.next_free_block is not None:
            raise RuntimeError(f"{block!r} is in the free queue already")
        last = self._tail.prev_free_block
        assert last is not None, "the sentinels are always linked"
        last.next_free_block, block.prev_free_block = block, last
        block.next_free_block, self._tail.prev_free_block = self._tail, block
        self.num_free_blocks += 1

    def append_n(self, blocks: Sequence[CacheBlock]) -> None:
        """Put all of `blocks` at the end, in their order."""
        for block in blocks:
            self.append(block)

    def __iter__(self) -> Iterator[CacheBlock]:
        block = self._head.next_free_block
        while block is not None and block is not self._tail:
            after = block.next_free_block
            yield block
            block = after

    def get_all_free_blocks(self) -> list[CacheBlock]:
        """All queued blocks, the next victim first."""
        return list(self)


class BlockHashToBlockMap:
    """Finds blocks by hash. Several can have the same one: one for each KV group, or two requests that
    computed the same tokens.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, CacheBlock | dict[int, CacheBlock]] = {}

    def get_block(self, block_hash: bytes) -> CacheBlock | None:
        """Any block of that hash, or None."""
        found = self._blocks.get(block_hash)
        return next(iter(found.values())) if isinstance(found, dict) else found

    def insert(self, block_hash: bytes, block: CacheBlock) -> None:
        """Make `block` findable by `block_hash`, beside those that are already."""
        found = self._blocks.get(block_hash)
        if found is None or found is block:
            self._blocks[block_hash] = block
        elif isinstance(found, dict):
            found[block.block_id] = block
        else:
            self._blocks[block_hash] = {found.block_id: found, block.block_id: block}

    def pop(self, block_hash: bytes, block_id: int) -> CacheBlock | None:
        """Take out the block of that hash *and* id and return it; None, with nothing changed, when there is
        no such one.
        """
        found = self._blocks.get(block_hash)
        if isinstance(found, dict):
            block = found.pop(block_id, None)
            if not found:
                del self._blocks[block_hash]
            return block
        if found is None or found.block_id != block_id:
            return None
        del self._blocks[block_hash]
        return found

    def __len__(self) -> int:
        """How many different hashes can be found."""
        return len(self._blocks)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._blocks

    def clear(self) -> None:
        """Forget all."""
        self._blocks.clear()


@dataclass(slots=True)
class BlockTable:
    """Which blocks hold a request's tokens, in order."""

    request_id: str
    block_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0

    def add_block(self, block_id: int, num_tokens: int) -> None:
        """Append a block that holds the next `num_tokens` tokens."""
        self.block_ids.append(block_id)
        self.num_tokens += num_tokens

    def __len__(self) -> int:
        return len(self.block_ids)

    def copy(self, new_request_id: str) -> BlockTable:
        """The same blocks for another request; the list is its own."""
        return BlockTable(new_request_id, list(self.block_ids), self.num_tokens)
