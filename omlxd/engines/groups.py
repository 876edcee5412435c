"""One model's blocks in the daemon: its KV groups as namespaces, searched, loaded and stored together.

Each group of :mod:`omlxd.engines.caches` has a layout and with it a namespace of its own: a layer
with a sliding window needs few blocks of a long prompt, and recurrent state one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from omlxd.client import Cache, Space
from omlxd.engines import cutting
from omlxd.engines.caches import Arrays, CacheObject, Group, UnsupportedCacheError
from omlxd.engines.cutting import Schema


@dataclass(frozen=True, slots=True)
class Identity:
    """What a namespace is made of besides the layout."""

    model: str
    fingerprint: str
    salt: str | bytes | None = None
    folder: Path | None = None
    """Where the weights are. No part of the namespace: the daemon watches it, and lets go of blocks of changed weights."""


@dataclass(slots=True)
class Saved:
    """What became of the blocks that were to be stored, over all groups of a model."""

    stored: int = 0
    present: int = 0
    """Were there already."""
    nbytes: int = 0
    declined: Counter[str] = field(default_factory=Counter)
    """By reason: the daemon's, or ``not held`` (the engine had overwritten them)."""
    failed: str | None = None
    """Why nothing could be tried: no daemon, or a cache that omlxd does not know."""

    def add(self, other: Saved) -> None:
        """Sum up."""
        self.stored += other.stored
        self.present += other.present
        self.nbytes += other.nbytes
        self.declined.update(other.declined)


class Chain:
    """The hashes of one prompt's full blocks, for every group."""

    def __init__(self, spaces: dict[Group, Space], tokens: Sequence[int]) -> None:
        self.hashes = {group: space.hashes(tokens) for group, space in spaces.items()}
        self.blocks = min(len(hashes) for hashes in self.hashes.values())


class KeptCaches:
    """Prompt caches of one schema, kept in a daemon.

    Every method may raise what the client raises; nothing is half done then: a cache that was to
    be filled is still empty, and blocks are stored whole or not at all.
    """

    def __init__(self, client: Cache, schema: Schema, identity: Identity, *, patience: float) -> None:
        """Register the namespaces. ``patience``: seconds that one load may take."""
        self.schema = schema
        self._patience = patience
        self.spaces = {
            group: client.namespace(
                model=identity.model,
                fingerprint=identity.fingerprint,
                block_tokens=schema.block_tokens,
                layout=layout,
                salt=identity.salt,
                model_path=identity.folder,
            )
            for group, layout in schema.layouts.items()
        }

    def chain(self, tokens: Sequence[int]) -> Chain:
        """Name the full blocks of a prompt."""
        return Chain(self.spaces, tokens)

    # -- restore

    def fill(self, cache: Sequence[CacheObject], chain: Chain, blocks: int, *, least: int = 1) -> int:
        """Fill an empty cache with the longest prefix of at most ``blocks`` blocks that all groups can restore.

        Returns the number of blocks; 0, and the cache stays empty, for fewer than ``least``. A block that turns
        out to be gone (evicted meanwhile, damaged) shortens the prefix.
        """
        bound = blocks
        while bound >= least:
            candidate = self.longest(cache, chain, bound)
            if candidate < least:
                break
            bound = self._load(cache, chain, candidate)
            if bound == candidate:
                return candidate
        return 0

    def longest(self, cache: Sequence[CacheObject], chain: Chain, bound: int) -> int:
        """The longest prefix, in blocks and at most ``bound``, that could be restored into ``cache`` as lookups tell."""
        limit = self.schema.limit(cache)
        if limit is not None:
            bound = min(bound, limit // self.schema.block_tokens)
        if Group.ATTENTION in self.spaces:
            hashes = chain.hashes[Group.ATTENTION][:bound]
            bound = self.spaces[Group.ATTENTION].match_keys(hashes).blocks
        state = self._present(Group.STATE, chain, bound)
        window = self._present(Group.WINDOW, chain, bound)
        for candidate in range(bound, 0, -1):
            if state is not None and not state[candidate - 1]:
                continue
            if window is None or all(window[index] for index in self.schema.window_blocks(cache, candidate)):
                return candidate
        return 0

    def _present(self, group: Group, chain: Chain, bound: int) -> list[bool] | None:
        if group not in self.spaces:
            return None
        return self.spaces[group].lookup_keys(chain.hashes[group][:bound])

    def _load(self, cache: Sequence[CacheObject], chain: Chain, blocks: int) -> int:
        """Load and fill; returns ``blocks``, or a smaller number to try next when a block could not be had."""
        wanted = {
            Group.ATTENTION: list(range(blocks)),
            Group.WINDOW: self.schema.window_blocks(cache, blocks),
            Group.STATE: [blocks - 1],
        }
        payloads: dict[Group, dict[int, Arrays]] = {group: {} for group in Group}
        with ExitStack() as leases:
            for group, space in self.spaces.items():
                keys = [chain.hashes[group][index] for index in wanted[group]]
                lease = leases.enter_context(space.load_keys(keys, timeout=self._patience))
                for index, block in zip(wanted[group], lease, strict=False):
                    payloads[group][index] = block.arrays()
                if len(payloads[group]) < len(keys):
                    return len(payloads[group]) if group is Group.ATTENTION else blocks - 1
            state = payloads[Group.STATE].get(blocks - 1, [])
            cutting.fill(
                cache, blocks * self.schema.block_tokens, self.schema.block_tokens, payloads.__getitem__, state
            )
        return blocks

    # -- store

    def store(
        self,
        cache: Sequence[CacheObject],
        chain: Chain,
        first: int,
        stop: int,
        *,
        snapshot: bool,
    ) -> Saved:
        """Store the blocks ``first`` to ``stop`` (excluded) of a prompt cache that holds at least ``stop`` blocks.

        ``snapshot``: the cache holds exactly ``stop`` blocks, so that its state may be kept as the state there.
        """
        saved = Saved()
        for group, space in self.spaces.items():
            if group is not Group.STATE:
                saved.add(self._store_blocks(space, group, cache, chain, first, stop))
            elif snapshot:
                hashes = chain.hashes[group][stop - 1 : stop]
                saved.add(self._store_some(space, hashes, [cutting.snapshot(cache)], 0))
        return saved

    def _store_blocks(
        self, space: Space, group: Group, cache: Sequence[CacheObject], chain: Chain, first: int, stop: int
    ) -> Saved:
        hashes = chain.hashes[group]
        # A saved conversation is mostly there already, and cutting is not free.
        present = space.lookup_keys(hashes[first:stop]) if stop - first > 1 else [False]
        cutter = cutting.Cutter(cache, group, self.schema.block_tokens)
        saved = Saved()
        run: list[Arrays] = []  # neighbours, which go in one call
        for index in range(first, stop):
            payload = None
            if present[index - first]:
                saved.present += 1
            else:
                payload = cutter.payload(index)
                if payload is None:
                    # A ring has overwritten it. What follows is of use all the same: a window needs its last blocks.
                    saved.declined["not held"] += 1
                else:
                    run.append(payload)
            if run and (payload is None or index == stop - 1):
                end = index if payload is None else stop
                saved.add(self._store_some(space, hashes[:end], run, end - len(run)))
                run = []
        return saved

    @staticmethod
    def _store_some(space: Space, hashes: Sequence[bytes], payloads: Sequence[Arrays], start: int) -> Saved:
        layout = space.layout
        if layout is None or not all(layout.matches(payload) for payload in payloads):
            raise UnsupportedCacheError(
                "the cache's tensors are not those of one sequence of this model; for a batch say row="
            )
        result = space.store_keys(hashes, payloads, start=start)
        return Saved(result.stored, result.present, result.nbytes, Counter(result.declined))
