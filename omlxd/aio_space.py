"""A namespace of a daemon and the leases on its blocks, as the asyncio client has them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from omlxd import operations, storing
from omlxd.aio_link import AsyncCall, AsyncLink
from omlxd.aio_opening import Opening
from omlxd.errors import Refused, Unavailable
from omlxd.leases import LinkedLease, LoadedBlock
from omlxd.operations import DEFAULT_LOAD_SECONDS, DEFAULT_STORE_SECONDS, GRACE_SECONDS, Ranges, SpaceCore
from omlxd.protocol import Message
from omlxd.results import Hit, StoreResult
from omlxd.storage.chain import ExtraKey, Namespace, Tokens
from omlxd.storage.layout import Layout

if TYPE_CHECKING:
    from omlxd.aio import Cache
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
        return f"<omlxd.aio.Space {self.namespace.model} {self.id[:4].hex()}>"

    async def match(
        self,
        tokens: Tokens,
        *,
        prefetch: bool = False,
        extra_keys: ExtraKey = None,
        extra_key_ranges: Ranges = None,
    ) -> Hit:
        """How much of ``tokens`` could be restored now. ``prefetch=True`` starts bringing it from the SSD."""
        return await self.match_keys(self.hashes(tokens, extra_keys, extra_key_ranges), prefetch=prefetch)

    def load(
        self,
        tokens: Tokens,
        *,
        timeout: float = DEFAULT_LOAD_SECONDS,
        mode: str = "wait",
        prefill_tokens_per_s: float | None = None,
        extra_keys: ExtraKey = None,
        extra_key_ranges: Ranges = None,
    ) -> Opening[Lease]:
        """Lease the longest prefix of ``tokens`` that can be had; as :meth:`omlxd.Space.load`. ``async with`` or ``await`` it."""
        hashes = self.hashes(tokens, extra_keys, extra_key_ranges)
        return self.load_keys(hashes, timeout=timeout, mode=mode, prefill_tokens_per_s=prefill_tokens_per_s)

    async def store(
        self,
        tokens: Tokens,
        payloads: Sequence[Payload],
        *,
        start: int = 0,
        timeout: float = DEFAULT_STORE_SECONDS,
        extra_keys: ExtraKey = None,
        extra_key_ranges: Ranges = None,
    ) -> StoreResult:
        """Store one payload for each full block of ``tokens`` from token ``start`` on; as :meth:`omlxd.Space.store`."""
        first = self.first_block(start)
        hashes = self.hashes(tokens, extra_keys, extra_key_ranges)
        return await self.store_keys(hashes, payloads, start=first, timeout=timeout)

    # -- with keys of your own: 32 bytes that name a block by its content and everything before it

    async def match_keys(self, hashes: Sequence[bytes], *, prefetch: bool = False) -> Hit:
        """As :meth:`match`, for chain hashes of your own."""
        return await self._cache._ask(self, operations.match(self, hashes, prefetch))

    async def lookup_keys(self, hashes: Sequence[bytes]) -> list[bool]:
        """For each hash: could its block be loaded now? One round trip."""
        return await self._cache._ask(self, operations.lookup(hashes))

    def load_keys(
        self,
        hashes: Sequence[bytes],
        *,
        timeout: float = DEFAULT_LOAD_SECONDS,
        mode: str = "wait",
        prefill_tokens_per_s: float | None = None,
    ) -> Opening[Lease]:
        """As :meth:`load`, for chain hashes of your own."""
        fields = operations.load_fields(hashes, mode, timeout, prefill_tokens_per_s)

        async def make() -> Lease:
            link = await self._cache._current()
            lease = Lease(link, self, hashes, timeout)
            if hashes:
                fields["ns"] = await self._cache._handle(link, self)
            await lease._begin(fields)
            return lease

        return Opening(make)

    async def store_keys(
        self,
        hashes: Sequence[bytes],
        payloads: Sequence[Payload],
        *,
        start: int = 0,
        timeout: float = DEFAULT_STORE_SECONDS,
    ) -> StoreResult:
        """As :meth:`store`, for chain hashes of your own; ``start`` counts blocks here."""
        operations.check_counts(hashes, payloads, start)
        return await self._cache._run(
            lambda owner: storing.store(owner, self, hashes, payloads, start, timeout, time.monotonic)
        )

    async def get(self, chain_hash: bytes, *, timeout: float = DEFAULT_LOAD_SECONDS) -> bytes | None:
        """One block's payload as bytes through the socket; None when it can't be had."""
        return await self._cache._ask(self, operations.get(chain_hash, timeout))

    async def put(self, chain_hash: bytes, payload: bytes, *, parent: bytes | None = None, position: int = 0) -> bool:
        """Store one block through the socket; is it in the cache now?"""
        return await self._cache._ask(self, operations.put(chain_hash, payload, parent, position))

    async def touch(self, tokens: Tokens) -> None:
        """Say that this engine used its own copy of the blocks of ``tokens``, so that the daemon keeps them young."""
        hashes = self.hashes(tokens)
        if hashes:
            link = await self._cache._current()
            handle = await self._cache._handle(link, self)
            link.tell("touch", {"ns": handle, "keys": operations.pack_keys(hashes)})


class Lease(LinkedLease[AsyncCall]):
    """Blocks that the daemon holds for this client, iterated head to tail with ``async for``."""

    def __init__(self, link: AsyncLink, space: Space, hashes: Sequence[bytes], timeout: float) -> None:
        super().__init__(link, hashes, space, timeout + GRACE_SECONDS)
        self._link = link

    async def __aiter__(self) -> AsyncIterator[LoadedBlock]:
        index = 0
        while True:
            while index >= len(self.slots):
                if not await self._advance():
                    return
            yield LoadedBlock(self, index)
            index += 1

    async def wait(self) -> Lease:
        """Wait until all that can be had has come, at most as long as the load was given."""
        while await self._advance():
            pass
        return self

    async def aclose(self) -> None:
        """As :meth:`release`."""
        self.release()

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    async def _begin(self, fields: Message) -> None:
        if not self.keys:
            self.finished = True
            return
        self._call = self._link.begin("load", fields)
        await self._advance()

    async def _advance(self) -> bool:
        """Take the next frame of the answer; False when there is none to come."""
        call = self._call
        if call is None:
            return False
        try:
            answer = await self._link.next(call, self._seconds_left())
        except asyncio.CancelledError:
            self.end("the task that waited for it was cancelled")
            raise
        except (Refused, Unavailable) as error:
            self._failed(call, error)
            return False
        self._answered(answer)
        return True
