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
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from omlxd.aio_link import AsyncLink
from omlxd.aio_opening import Opening
from omlxd.aio_space import Lease, Space
from omlxd.backoff import Backoff
from omlxd.client import GLANCE_SECONDS
from omlxd.errors import Refused, Unavailable
from omlxd.link import CALL_SECONDS, NotYet
from omlxd.operations import GRACE_SECONDS, Ask, Operation, Question, SpaceCore, Work, namespace_of
from omlxd.paths import socket_path
from omlxd.protocol import Message
from omlxd.storage.layout import Layout

__all__ = ["Cache", "Lease", "Refused", "Space", "Unavailable", "connect"]

T = TypeVar("T")


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
        space = Space(self, namespace_of(model, fingerprint, block_tokens, layout, salt), layout, model_path)
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
