"""What the store asks of a tier below RAM: the SSD, another machine, or a class of somebody else's.

The store knows RAM and an ordered list of lower tiers (``lower.py``); a block that is not in RAM is restored from the first
tier that has it. A tier's index answers at once, on the event loop's thread. An *outer* tier has to ask somebody first (a
server across a network): it says which keys it knows nothing of (``unasked``) and is asked for them together (``ask``), with
a deadline; what it has learned it remembers for a while.

**Threads.** ``read_into`` and ``read_ahead`` run on worker threads, many at once; all else on the loop's thread, and never
waits there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from omlxd.policy.base import RequestContext
from omlxd.storage.blocks import BlockMeta, Described


class TierError(Exception):
    """A block cannot be had from a tier."""


class Missing(TierError):
    """No such record (any more)."""


class Damaged(TierError):
    """The bytes there are not those that were stored; ``reason`` says what did not match."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Trouble(Missing):
    """The tier does not answer, or refuses. For a reader a miss; the record itself is not to blame and stays.

    ``state`` is one word for what the tier is: ``gone``, ``slow``, ``read-only``, ``full``, ``refused``.
    """

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(reason)
        self.state = state
        self.reason = reason


class Held(Described, Protocol):
    """What a tier says of a block that it has; as ``BlockMeta``."""

    @property
    def layout(self) -> bytes | None: ...  # noqa: D102


E = TypeVar("E", bound=Held)


class LowerTier(Protocol[E]):
    """A tier that blocks are restored from; ``E`` is what it says of a block."""

    def __contains__(self, key: bytes, /) -> bool:
        """Whether a restore of ``key`` may be tried now."""

    def meta(self, key: bytes) -> E | None:
        """What is known of the block; None: it is not here, as far as is known."""

    def pin(self, key: bytes) -> bool:
        """A restore of ``key`` begins: what it needs stays until ``unpin``. False: it is not here."""

    def unpin(self, entry: E) -> None:
        """The restore has ended; ``entry`` is what ``meta`` gave when it was pinned."""

    def read_ahead(self, keys: Sequence[bytes]) -> None:
        """Worker. These will be read soon: a hint; raises nothing."""

    def read_into(self, key: bytes, out: memoryview) -> int:
        """Worker. Restore ``key`` into ``out``; returns the payload's bytes, verified.

        Raises ``Missing``, ``Trouble`` or ``Damaged``, and then ``out`` holds anything.
        """

    def damaged(self, key: bytes, reason: str) -> None:
        """``read_into`` raised ``Damaged``: the record is not to be served again."""

    def touch(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> None:
        """``keys``, heads first, were used, in whichever tier."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A block's bytes, kept in place for whoever copies them elsewhere.

    ``read`` runs on a worker thread and may raise ``Missing`` or ``Damaged``; ``release`` runs on the loop's thread, once.
    """

    meta: BlockMeta
    read: Callable[[], memoryview]
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class TierHost:
    """What a tier from outside may use of the store."""

    payload: Callable[[bytes], Payload | None]
    """A block's bytes, from whichever local tier has it; None: it has gone."""
    clock: Callable[[], float]
    """Seconds, monotonic."""


@runtime_checkable
class OuterTier(LowerTier[Held], Protocol):
    """A tier that is asked for what it has, and that fills itself: it is offered blocks and takes those it wants."""

    @property
    def name(self) -> str:
        """One word, for counters: ``remote``."""

    def unasked(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Those of ``keys`` about which somebody would have to be asked first; empty when that is no use now."""

    async def ask(self, keys: Sequence[bytes], timeout: float) -> None:
        """Find out about ``keys``, in at most ``timeout`` seconds; never raises for a tier in trouble.

        Afterwards ``unasked`` has none of them for a while, whatever the outcome was.
        """

    def start(self) -> None:
        """Begin, on the running loop."""

    async def stop(self) -> None:
        """End, within seconds."""

    def offer(self, meta: BlockMeta) -> None:
        """A new block is readable here. It may be gone when its bytes are asked of the host."""

    def offer_again(self, metas: Sequence[BlockMeta]) -> None:
        """These, a prefix, were asked for again. Called for every load: has to be fast."""

    def forget(self, keys: Sequence[bytes]) -> None:
        """An operator removes these blocks everywhere."""

    def register_namespace(self, namespace: bytes, descriptor: Mapping[str, object]) -> None:
        """Blocks of this namespace may come and go from now on."""

    def configure(self, options: Mapping[str, object]) -> None:
        """Other settings from now on. ``ValueError`` names one that needs a restart; then nothing is changed."""

    def set_ttl(self, namespace: bytes, seconds: float | None) -> None:
        """How long this namespace's blocks are kept after their last use; None: as all others."""

    def stats(self) -> dict[str, object]:
        """Numbers for ``status`` and metrics: at least ``state`` and ``reason``, text; sizes in bytes."""

    def troubles(self) -> list[str]:
        """What a user should know, in whole sentences; empty when all is well."""


def load_tier(name: str) -> Callable[[Mapping[str, object], TierHost], OuterTier]:
    """The class ``module:Class``; called with options and host it makes the tier. ``ValueError`` says what is wrong."""
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise ValueError(f"{name!r} names no class: write module:Class, as in omlxd.storage.remote:RemoteTier")
    try:
        found: object = getattr(importlib.import_module(module_name), class_name)
    except ImportError as error:
        raise ValueError(f"{name!r}: {error}") from error
    except AttributeError as error:
        raise ValueError(f"{name!r}: the module has no {class_name}") from error
    if not isinstance(found, type):
        raise ValueError(f"{name!r} is no class")
    missing = [what for what in OUTER_METHODS if not hasattr(found, what)]
    if missing:
        raise ValueError(f"{name!r} is no tier: it lacks {', '.join(missing)}")
    return found


OUTER_METHODS = (
    *("name", "__contains__", "meta", "pin", "unpin", "read_ahead", "read_into", "damaged", "touch", "unasked", "ask"),
    *(
        "start",
        "stop",
        "offer",
        "offer_again",
        "forget",
        "register_namespace",
        "configure",
        "set_ttl",
        "stats",
        "troubles",
    ),
)
"""What a class must have to be a tier."""
