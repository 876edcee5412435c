"""The asyncio client: ``await omlxd.aio.connect()``.

The same steps as the blocking client, on the event loop: any number of requests may be under way on one connection. All
methods belong to the loop's thread; views and arrays of leased blocks may be used, and dropped, in any.

    async with omlxd.aio.connect() as cache:
        space = await cache.namespace(model="org/name", fingerprint="...", layout=layout)
        async with space.load(tokens, timeout=2.0) as lease:
            async for block in lease:
                ...
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from omlxd import operations, storing
from omlxd.aio_link import AsyncCall, AsyncLink
from omlxd.backoff import Backoff
from omlxd.client import GLANCE_SECONDS
from omlxd.errors import Refused, Unavailable
from omlxd.leases import LeaseCore, LoadedBlock
from omlxd.link import CALL_SECONDS, NotYet
from omlxd.operations import (
    DEFAULT_LOAD_SECONDS,
    DEFAULT_STORE_SECONDS,
    GRACE_SECONDS,
    Ask,
    Operation,
    Question,
    Ranges,
    SpaceCore,
    Work,
)
from omlxd.paths import socket_path
from omlxd.protocol import Message
from omlxd.results import Hit, StoreResult
from omlxd.storage.chain import ExtraKey, Namespace, Tokens
from omlxd.storage.layout import Layout

if TYPE_CHECKING:
    from omlxd.operations import Payload

__all__ = ["Cache", "Lease", "Refused", "Space", "Unavailable", "connect"]

T = TypeVar("T")


class _Closing(Protocol):
    async def aclose(self) -> None: ...


C = TypeVar("C", bound=_Closing)


class Opening(Generic[C]):
    """Something that is being opened: ``await`` it, or use it in ``async with``, which also closes it."""

    def __init__(self, make: Callable[[], Coroutine[object, object, C]]) -> None:
        self._make = make
        self._made: C | None = None

    def __await__(self) -> Generator[object, None, C]:
        return self._make().__await__()

    async def __aenter__(self) -> C:
        self._made = await self._make()
        return self._made

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._made is not None:
            await self._made.aclose()


def connect(
    socket: str | os.PathLike[str] | None = None, *, name: str = "", timeout: float = CALL_SECONDS
) -> Opening[Cache]:
    """Connect to the daemon at ``socket``; arguments and errors as of :func:`omlxd.connect`."""
    path = os.fspath(socket) if socket is not None else str(socket_path())

    async def make() -> Cache:
        cache = Cache(path, name=name, timeout=timeout)
        try:
            await cache._current()
        except BaseException:
            cache.close()
            raise
        return cache

    return Opening(make)


class Cache:
    """A daemon, as an asyncio client has it; made by :func:`connect`. It connects again by itself."""

    def __init__(self, path: str, *, name: str = "", timeout: float = CALL_SECONDS) -> None:
        self.path = path
        self._name = name or f"pid {os.getpid()}"
        self._timeout = timeout
        self._opening = asyncio.Lock()
        self._backoff = Backoff()
        self._closed = False
        self._hung = False
        self._greeting: AsyncLink | None = None
        self._link: AsyncLink | None = None

    async def __aenter__(self) -> Cache:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        link = self._link
        state = "not connected" if link is None or link.dead else f"daemon pid {link.limits.pid}"
        return f"<omlxd.aio.Cache {self.path}: {state}>"

    def close(self) -> None:
        """Disconnect. Leases end; arrays that still read the daemon's memory in place keep it leased until they are collected."""
        self._closed = True
        for link in (self._link, self._greeting):
            if link is not None:
                link.close("the client was closed")
        self._link = self._greeting = None

    async def aclose(self) -> None:
        """As :meth:`close`."""
        self.close()

    async def boot(self) -> str:
        """The id of the daemon's run that this client is connected to; another one after each restart."""
        return (await self._current()).limits.boot

    async def namespace(
        self,
        *,
        model: str,
        fingerprint: str,
        block_tokens: int = 64,
        layout: Layout | None = None,
        salt: str | bytes | None = None,
        model_path: str | os.PathLike[str] | None = None,
    ) -> Space:
        """The namespace of one model in one configuration; arguments as of :meth:`omlxd.Cache.namespace`."""
        namespace = Namespace(
            model=model,
            fingerprint=fingerprint,
            block_tokens=block_tokens,
            layout=layout.to_bytes() if layout is not None else b"",
            salt=salt,
        )
        space = Space(self, namespace, layout, None if model_path is None else os.path.abspath(model_path))
        await self._handle(await self._current(), space)
        return space

    async def call(self, verb: str, *, timeout: float | None = None, **fields: object) -> Message:
        """Ask any verb; the answer's body."""
        return await (await self._current()).ask(verb, dict(fields), self._timeout if timeout is None else timeout)

    async def stats(self) -> Message:
        """What ``omlxd status --json`` shows."""
        return await self.call("stats")

    # -- connection

    async def _current(self) -> AsyncLink:
        link = self._link
        if link is not None and not link.dead:
            return link
        async with self._opening:
            if self._closed:
                raise Unavailable("this client was closed; connect again")
            link = self._link
            if link is None or link.dead:
                if link is not None:
                    self._hung = self._hung or link.hung
                    self._link = None
                    link.retire()
                self._link = link = await self._open()
            return link

    async def _open(self) -> AsyncLink:
        """A new link, as the blocking client gets one: a daemon that does not answer is waited for once."""
        why = self._backoff.refusal(time.monotonic())
        if why is not None:
            raise Unavailable(why)
        try:
            link = await self._greeted(self._greeting)
            if link is None:
                link = await self._greeted(await AsyncLink.connect(self.path, name=self._name, timeout=self._timeout))
            assert link is not None, "a new link is greeted, or raises"
        except Unavailable as error:
            self._backoff.failed(time.monotonic(), str(error))
            raise
        self._backoff.succeeded()
        self._hung = False
        return link

    async def _greeted(self, link: AsyncLink | None) -> AsyncLink | None:
        """``link``, once its greeting is answered; None for one that has died since it was made. Raises NotYet, Refused."""
        if link is None:
            return None
        old, self._greeting = self._greeting, None
        try:
            await link.greet(GLANCE_SECONDS if self._hung else self._timeout)
        except NotYet:
            self._greeting = link
            self._hung = True
            raise
        except asyncio.CancelledError:
            self._greeting = link
            raise
        except Unavailable:
            link.retire()
            if link is old:
                return None
            raise
        return link

    async def _handle(self, link: AsyncLink, space: SpaceCore) -> int:
        handle = link.handles.get(space.id)
        if handle is None:
            answer = await link.ask("namespace", space.registration(), self._timeout)
            handle = link.handles[space.id] = answer["ns"]
            link.holding.warmer.ahead(link.holding.segments)
        return handle

    async def _ask(self, space: SpaceCore, question: Question[T]) -> T:
        """One request, and what its answer says."""
        link = await self._current()
        question.fields["ns"] = await self._handle(link, space)
        patience = question.timeout + GRACE_SECONDS if question.timeout else self._timeout
        return question.read(await link.ask(question.verb, question.fields, patience))

    async def _run(self, make: Callable[[AsyncLink], Operation[T]]) -> T:
        """Run an operation's steps on the current link."""
        link = await self._current()
        operation: Operation[T] = make(link)
        answer: Message = {}
        error: BaseException | None = None
        try:
            step = next(operation)
            while True:
                try:
                    answer, error = await self._step(link, step), None
                except BaseException as caught:  # a cancellation too: the operation cleans up, and raises it again
                    error = caught
                step = operation.send(answer) if error is None else operation.throw(error)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    async def _step(self, link: AsyncLink, step: Ask | Work) -> Message:
        if isinstance(step, Work):
            await _move_bytes(step)
            return {}
        fields = step.fields
        if step.space is not None:
            fields = {"ns": await self._handle(link, step.space), **fields}
        return await link.ask(step.verb, fields, step.timeout + GRACE_SECONDS if step.timeout else self._timeout)


async def _move_bytes(work: Work) -> None:
    """Copies go to a thread; what MLX computes stays on this one, and lets others have a turn between two blocks."""
    if not work.anywhere:
        for step in work.steps:
            step()
            await asyncio.sleep(0)
        return

    def run() -> None:
        for step in work.steps:
            step()

    moving = asyncio.get_running_loop().run_in_executor(None, run)
    try:
        await asyncio.shield(moving)
    except asyncio.CancelledError:
        await asyncio.wait([moving])  # it writes into slots that are about to be given back
        raise


class Space(SpaceCore):
    """A namespace of a daemon. Token ids are hashed here and never leave this process."""

    def __init__(
        self, cache: Cache, namespace: Namespace, layout: Layout | None, model_path: str | None = None
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


class Lease(LeaseCore):
    """Blocks that the daemon holds for this client, iterated head to tail with ``async for``."""

    def __init__(self, link: AsyncLink, space: Space, hashes: Sequence[bytes], timeout: float) -> None:
        super().__init__(hashes, space.block_tokens, space.layout, link.holding)
        self._link = link
        self._deadline = time.monotonic() + timeout + GRACE_SECONDS
        self._call: AsyncCall | None = None

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

    def release(self) -> None:
        """End the lease. A second release does nothing."""
        self.end("it was released")

    async def aclose(self) -> None:
        """As :meth:`release`."""
        self.release()

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def end(self, reason: str) -> None:
        """End it, for ``reason``; what is still on its way is given back."""
        call, self._call = self._call, None
        if call is not None:
            self.finished = True
            if self.lease_id is None:
                self._link.abandon(call)
        super().end(reason)

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
            answer = await self._link.next(call, self._deadline - time.monotonic())
        except Refused:
            self._call = None
            self.finished = True
            raise
        except asyncio.CancelledError:
            self.end("the task that waited for it was cancelled")
            raise
        except Unavailable as error:
            # What has come is mapped here and stays as it is; only no more comes.
            self._link.abandon(call)
            self._call = None
            self.finished = True
            self.stopped = str(error)
            if not self.slots:
                raise
            return False
        self.take(answer.body)
        if answer.kind == "ok":
            self.finished = True
            self._call = None
        return True
