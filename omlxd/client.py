"""The blocking client: ``omlxd.connect()``.

Thread-safe: any number of threads may use one :class:`Cache`. It connects again by itself when the daemon has been
restarted; while there is none, every call raises :class:`~omlxd.errors.Unavailable` at once and a new attempt is made
only after a back-off, so an engine without a daemon loses no time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypeVar

from omlxd.backoff import Backoff
from omlxd.errors import Refused, Unavailable
from omlxd.link import CALL_SECONDS, Link, NotYet, forgotten_in_children
from omlxd.operations import GRACE_SECONDS, Ask, Operation, Question, SpaceCore, Work, namespace_of
from omlxd.paths import socket_path
from omlxd.protocol import Message
from omlxd.space import Lease, Space
from omlxd.storage.layout import Layout

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
        space = Space(self, namespace_of(model, fingerprint, block_tokens, layout, salt), layout, model_path)
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
