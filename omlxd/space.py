"""A namespace of a daemon and the leases on its blocks, as the blocking client has them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from omlxd import operations, storing
from omlxd.errors import Refused, Unavailable
from omlxd.leases import LinkedLease, LoadedBlock
from omlxd.link import Call, Link
from omlxd.operations import DEFAULT_LOAD_SECONDS, DEFAULT_STORE_SECONDS, GRACE_SECONDS, Ranges, SpaceCore
from omlxd.protocol import Message
from omlxd.results import Hit, StoreResult
from omlxd.storage.chain import ExtraKey, Namespace, Tokens
from omlxd.storage.layout import Layout

if TYPE_CHECKING:
    from omlxd.client import Cache
    from omlxd.operations import Payload


class Space(SpaceCore):
    """A namespace of a daemon. Token ids are hashed here and never leave this process."""

    def __init__(
        self,
        cache: Cache,
        namespace: Namespace,
        layout: Layout | None,
        model_path: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(namespace, layout, model_path)
        self._cache = cache

    def __repr__(self) -> str:
        return f"<omlxd.Space {self.namespace.model} {self.id[:4].hex()}>"

    def match(
        self,
        tokens: Tokens,
        *,
        prefetch: bool = False,
        extra_keys: ExtraKey = None,
        extra_key_ranges: Ranges = None,
    ) -> Hit:
        """How much of ``tokens`` could be restored now. ``prefetch=True`` starts bringing it from the SSD."""
        return self.match_keys(self.hashes(tokens, extra_keys, extra_key_ranges), prefetch=prefetch)

    def load(
        self,
        tokens: Tokens,
        *,
        timeout: float = DEFAULT_LOAD_SECONDS,
        mode: str = "wait",
        prefill_tokens_per_s: float | None = None,
        extra_keys: ExtraKey = None,
        extra_key_ranges: Ranges = None,
    ) -> Lease:
        """Lease the longest prefix of ``tokens`` that can be had.

        Blocks in RAM are there at once; the others come head to tail while you iterate, and iteration stops at the
        first that can't be had.

        ``mode``: ``"wait"`` brings blocks from the SSD for at most ``timeout`` seconds; ``"best_effort"`` takes what is in
        RAM. ``prefill_tokens_per_s``: what the engine computes by itself; a restore that would be slower is not made.
        """
        hashes = self.hashes(tokens, extra_keys, extra_key_ranges)
        return self.load_keys(hashes, timeout=timeout, mode=mode, prefill_tokens_per_s=prefill_tokens_per_s)

    def store(
        self,
        tokens: Tokens,
        payloads: Sequence[Payload],
        *,
        start: int = 0,
        timeout: float = DEFAULT_STORE_SECONDS,
        extra_keys: ExtraKey = None,
        extra_key_ranges: Ranges = None,
    ) -> StoreResult:
        """Store one payload for each full block of ``tokens`` from token ``start`` on.

        A payload is bytes-like, or a list of ``mx.array`` in the layout's order. ``tokens`` is the whole prompt: a block is
        named by everything before it too. ``start`` is a multiple of the block size. Waits at most ``timeout`` seconds for
        room; what finds none is declined, never half stored.

        Raises:
            ValueError: ``start`` is off, there are more payloads than full blocks, or a payload does not fit the layout.
        """
        first = self.first_block(start)
        hashes = self.hashes(tokens, extra_keys, extra_key_ranges)
        return self.store_keys(hashes, payloads, start=first, timeout=timeout)

    # -- with keys of your own: 32 bytes that name a block by its content and everything before it

    def match_keys(self, hashes: Sequence[bytes], *, prefetch: bool = False) -> Hit:
        """As :meth:`match`, for chain hashes of your own."""
        return self._cache._ask(self, operations.match(self, hashes, prefetch))

    def lookup_keys(self, hashes: Sequence[bytes]) -> list[bool]:
        """For each hash: could its block be loaded now? One round trip."""
        return self._cache._ask(self, operations.lookup(hashes))

    def load_keys(
        self,
        hashes: Sequence[bytes],
        *,
        timeout: float = DEFAULT_LOAD_SECONDS,
        mode: str = "wait",
        prefill_tokens_per_s: float | None = None,
    ) -> Lease:
        """As :meth:`load`, for chain hashes of your own."""
        fields = operations.load_fields(hashes, mode, timeout, prefill_tokens_per_s)
        link = self._cache._current()
        lease = Lease(link, self, hashes, timeout)
        if hashes:
            fields["ns"] = self._cache._handle(link, self)
        lease._begin(fields)
        return lease

    def store_keys(
        self,
        hashes: Sequence[bytes],
        payloads: Sequence[Payload],
        *,
        start: int = 0,
        timeout: float = DEFAULT_STORE_SECONDS,
    ) -> StoreResult:
        """As :meth:`store`, for chain hashes of your own; ``start`` counts blocks here."""
        operations.check_counts(hashes, payloads, start)
        return self._cache._run(
            lambda owner: storing.store(owner, self, hashes, payloads, start, timeout, time.monotonic)
        )

    def get(self, chain_hash: bytes, *, timeout: float = DEFAULT_LOAD_SECONDS) -> bytes | None:
        """One block's payload as bytes through the socket; None when it can't be had."""
        return self._cache._ask(self, operations.get(chain_hash, timeout))

    def put(self, chain_hash: bytes, payload: bytes, *, parent: bytes | None = None, position: int = 0) -> bool:
        """Store one block through the socket; is it in the cache now?"""
        return self._cache._ask(self, operations.put(chain_hash, payload, parent, position))

    def touch(self, tokens: Tokens) -> None:
        """Say that this engine used its own copy of the blocks of ``tokens``, so that the daemon keeps them young."""
        link = self._cache._current()
        hashes = self.hashes(tokens)
        if hashes:
            link.tell("touch", {"ns": self._cache._handle(link, self), "keys": operations.pack_keys(hashes)})


class Lease(LinkedLease[Call]):
    """Blocks that the daemon holds for this client: a context manager, iterated head to tail."""

    def __init__(self, link: Link, space: Space, hashes: Sequence[bytes], timeout: float) -> None:
        super().__init__(link, hashes, space, timeout + GRACE_SECONDS)
        self._link = link

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __iter__(self) -> Iterator[LoadedBlock]:
        index = 0
        while True:
            while index >= len(self.slots):
                if not self._advance():
                    return
            yield LoadedBlock(self, index)
            index += 1

    def wait(self) -> Lease:
        """Wait until all that can be had has come, at most as long as the load was given."""
        while self._advance():
            pass
        return self

    def _begin(self, fields: Message) -> None:
        if not self.keys:
            self.finished = True
            return
        self._call = self._link.begin("load", fields)
        self._advance()

    def _advance(self) -> bool:
        """Take the next frame of the answer; False when there is none to come."""
        call = self._call
        if call is None:
            return False
        try:
            answer = self._link.next(call, self._seconds_left())
        except (Refused, Unavailable) as error:
            self._failed(call, error)
            return False
        self._answered(answer)
        return True
