"""The blocking client: ``omlxd.connect()``.

Thread-safe: any number of threads may use one :class:`Cache`. It connects again by itself when the daemon has been
restarted; while there is none, every call raises :class:`~omlxd.errors.Unavailable` at once and a new attempt is made
only after a back-off, so an engine without a daemon loses no time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from omlxd import operations, storing
from omlxd.backoff import Backoff
from omlxd.errors import Refused, Unavailable
from omlxd.leases import LeaseCore, LoadedBlock
from omlxd.link import CALL_SECONDS, Call, Link, NotYet, forgotten_in_children
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

GLANCE_SECONDS = 0.02
"""How long a daemon that did not answer before is given to answer a greeting that was sent long ago."""


def connect(socket: str | os.PathLike[str] | None = None, *, name: str = "", timeout: float = CALL_SECONDS) -> Cache:
    """Connect to the daemon at ``socket`` (default: ``$OMLXD_SOCKET``, else the user's default path).

    ``name`` is what ``omlxd status`` calls this client; ``timeout`` (seconds) is how long an answer that needs no disk
    may take before the daemon counts as gone.

    Raises:
        Unavailable: at once, when no daemon is there.
        Refused: the daemon speaks no version that this client speaks.
    """
    return Cache(os.fspath(socket) if socket is not None else str(socket_path()), name=name, timeout=timeout)


class Cache:
    """A daemon, as a client has it."""

    def __init__(self, path: str, *, name: str = "", timeout: float = CALL_SECONDS) -> None:
        self.path = path
        self._name = name or f"pid {os.getpid()}"
        self._timeout = timeout
        self._lock = threading.Lock()
        self._backoff = Backoff()
        self._closed = False
        self._hung = False
        """Did the daemon not answer when it was asked last?"""
        self._greeting: Link | None = None
        """A link whose greeting is not answered yet."""
        self._link: Link | None = None
        forgotten_in_children().add(self)
        try:
            self._link = self._open()
        except Unavailable:
            self.close()
            raise

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        link = self._link
        state = "not connected" if link is None or link.dead else f"daemon pid {link.limits.pid}"
        return f"<omlxd.Cache {self.path}: {state}>"

    @property
    def boot(self) -> str:
        """The id of the daemon's run that this client is connected to; another one after each restart."""
        return self._current().limits.boot

    def close(self) -> None:
        """Disconnect. Leases end; arrays that still read the daemon's memory in place keep it leased until they are collected."""
        with self._lock:
            self._closed = True
            for link in (self._link, self._greeting):
                if link is not None:
                    link.close("the client was closed")
            self._link = self._greeting = None

    def namespace(
        self,
        *,
        model: str,
        fingerprint: str,
        block_tokens: int = 64,
        layout: Layout | None = None,
        salt: str | bytes | None = None,
        model_path: str | os.PathLike[str] | None = None,
    ) -> Space:
        """The namespace of one model in one configuration; made when it does not exist yet.

        ``fingerprint`` stands for the weights, ``layout`` for a block's tensors (None: payloads are raw bytes),
        ``block_tokens`` for the block size in tokens, ``salt`` keeps users or tenants apart. The daemon watches
        ``model_path``, the folder of the weights, where it is given, and lets blocks go that were made of older ones.
        """
        space = Space(
            self,
            Namespace(
                model=model,
                fingerprint=fingerprint,
                block_tokens=block_tokens,
                layout=layout.to_bytes() if layout is not None else b"",
                salt=salt,
            ),
            layout,
            None if model_path is None else os.path.abspath(model_path),
        )
        self._handle(self._current(), space)
        return space

    def call(self, verb: str, *, timeout: float | None = None, **fields: object) -> Message:
        """Ask any verb (the command line's way); the answer's body.

        ``timeout``: seconds to wait; default: this client's.
        """
        return self._current().ask(verb, dict(fields), self._timeout if timeout is None else timeout)

    def stream(self, verb: str, *, timeout: float | None = None, **fields: object) -> Iterator[Message]:
        """Ask a verb that answers in parts (``subscribe``, ``flush``, ``shutdown``, ``verify``); yields each part.

        ``timeout``: seconds to wait for each part.
        """
        link = self._current()
        patience = self._timeout if timeout is None else timeout
        call = link.begin(verb, dict(fields), patience)
        while True:
            answer = link.next(call, patience)
            yield answer.body
            if answer.kind == "ok":
                return

    def stats(self) -> Message:
        """What ``omlxd status --json`` shows."""
        return self.call("stats")

    # -- connection

    def forget(self) -> None:
        """In a forked child: connect anew when asked."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._link = self._greeting = None

    def _open(self) -> Link:
        """A new link. Raises Unavailable, Refused.

        A daemon that takes connections and does not answer is waited for once; after that its answer to the greeting is
        looked for now and then, which costs no time.
        """
        why = self._backoff.refusal(time.monotonic())
        if why is not None:
            raise Unavailable(why)
        try:
            link = self._greeted(self._greeting) or self._greeted(
                Link(self.path, name=self._name, timeout=GLANCE_SECONDS if self._hung else self._timeout)
            )
            assert link is not None, "a new link is greeted, or raises"
        except Unavailable as error:
            self._hung = self._hung or isinstance(error, NotYet)
            self._backoff.failed(time.monotonic(), str(error))
            raise
        self._backoff.succeeded()
        self._hung = False
        return link

    def _greeted(self, link: Link | None) -> Link | None:
        """``link``, once its greeting is answered; None for one that has died since it was made. Raises NotYet, Refused."""
        if link is None:
            return None
        old, self._greeting = self._greeting, None
        try:
            link.greet(GLANCE_SECONDS if self._hung else self._timeout)
        except NotYet:
            self._greeting = link
            self._hung = True
            raise
        except Unavailable:
            link.retire()
            if link is old:
                return None
            raise
        return link

    def _current(self) -> Link:
        """A link that is alive as far as can be told without asking.

        Raises:
            Unavailable: there is none, and either a new attempt failed or its time has not come yet.
        """
        link = self._link
        if link is not None and link.check_alive():
            return link
        with self._lock:
            if self._closed:
                raise Unavailable("this client was closed; connect again")
            link = self._link
            if link is None or link.dead:
                if link is not None:
                    self._hung = self._hung or link.hung
                    self._link = None
                    link.retire()
                if self._greeting is not None and self._greeting.dead:
                    self._greeting.retire()
                    self._greeting = None
                self._link = link = self._open()
            return link

    def _handle(self, link: Link, space: SpaceCore) -> int:
        handle = link.handles.get(space.id)
        if handle is None:
            answer = link.ask("namespace", space.registration(), self._timeout)
            handle = link.handles[space.id] = answer["ns"]
            link.holding.warmer.ahead(link.holding.segments)
        return handle

    def _ask(self, space: SpaceCore, question: Question[T]) -> T:
        """One request, and what its answer says."""
        link = self._current()
        question.fields["ns"] = self._handle(link, space)
        patience = question.timeout + GRACE_SECONDS if question.timeout else self._timeout
        return question.read(link.ask(question.verb, question.fields, patience))

    def _run(self, make: Callable[[Link], Operation[T]]) -> T:
        """Run an operation's steps on the current link."""
        link = self._current()
        operation: Operation[T] = make(link)
        answer: Message = {}
        error: BaseException | None = None
        try:
            step = next(operation)
            while True:
                try:
                    answer, error = self._step(link, step), None
                except BaseException as caught:  # the operation cleans up, and raises it again
                    error = caught
                step = operation.send(answer) if error is None else operation.throw(error)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    def _step(self, link: Link, step: Ask | Work) -> Message:
        if isinstance(step, Work):
            for work in step.steps:
                work()
            return {}
        fields = step.fields
        if step.space is not None:
            fields = {"ns": self._handle(link, step.space), **fields}
        return link.ask(step.verb, fields, step.timeout + GRACE_SECONDS if step.timeout else self._timeout)


class Space(SpaceCore):
    """A namespace of a daemon. Token ids are hashed here and never leave this process."""

    def __init__(
        self, cache: Cache, namespace: Namespace, layout: Layout | None, model_path: str | None = None
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


class Lease(LeaseCore):
    """Blocks that the daemon holds for this client: a context manager, iterated head to tail."""

    def __init__(self, link: Link, space: Space, hashes: Sequence[bytes], timeout: float) -> None:
        super().__init__(hashes, space.block_tokens, space.layout, link.holding)
        self._link = link
        self._deadline = time.monotonic() + timeout + GRACE_SECONDS
        self._call: Call | None = None

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

    def release(self) -> None:
        """End the lease. A second release does nothing."""
        self.end("it was released")

    def end(self, reason: str) -> None:
        """End it, for ``reason``; what is still on its way is given back."""
        call, self._call = self._call, None
        if call is not None:
            self.finished = True
            if self.lease_id is None:
                self._link.abandon(call)
        super().end(reason)

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
            answer = self._link.next(call, self._deadline - time.monotonic())
        except Refused:
            self._call = None
            self.finished = True
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
