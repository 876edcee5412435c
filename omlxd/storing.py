"""Storing blocks: slots are reserved a window at a time, written here, in place, and completed.

Two round trips a window, however many blocks it has. Without any I/O, as `operations.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from omlxd.errors import Refused
from omlxd.operations import CHAINS, Ask, Operation, Owner, SpaceCore, Work, pack_keys
from omlxd.protocol import Code, Message
from omlxd.results import StoreResult
from omlxd.storage.layout import Layout

if TYPE_CHECKING:
    from omlxd.operations import Payload

WINDOW_BLOCKS = 2048
GO_ON_AFTER = frozenset({"pending", "too_large"})
"""Reasons to decline a block that say nothing about the blocks behind it."""


@dataclass(slots=True)
class _Offer:
    """One payload that is offered: its size, how to write it, its layout where it is an own one."""

    nbytes: int
    write: Callable[[memoryview], None]
    plain: bool
    """Is it bytes already? Then any thread may copy it; MLX arrays are the caller's thread's."""
    layout: bytes | None = None


def store(
    owner: Owner,
    space: SpaceCore,
    hashes: Sequence[bytes],
    payloads: Sequence[Payload],
    first: int,
    timeout: float,
    clock: Callable[[], float],
) -> Operation[StoreResult]:
    """Store ``payloads`` as the blocks ``first``, ``first + 1``, ... of the chain ``hashes``.

    ``timeout``: seconds for all waiting for room together.
    """
    deadline = clock() + timeout
    chain = _Chain(owner, space, hashes)
    payloads = payloads[: max(0, len(hashes) - first)]
    present = stored = nbytes = 0
    declined: Counter[str] = Counter()
    at = 0
    while at < len(payloads):
        offers = _window(payloads[at : at + WINDOW_BLOCKS], space.layout, owner.limits.max_reserve)
        left = max(0.0, deadline - clock())
        goes_on = at + len(offers) < len(payloads)
        answer = yield from chain.reserve(first + at, offers, left, goes_on=goes_on)
        present += answer["present"]
        declined.update(answer["declined"])
        if answer["slots"]:
            new = yield from _write(owner, space, offers, answer["slots"])
            stored += new
            if new < len(answer["slots"]):  # an operator has removed them while they were written
                declined["removed"] += len(answer["slots"]) - new
            if new == len(answer["slots"]):
                nbytes += sum(offers[index].nbytes for index, *_ in answer["slots"])
        at += len(offers)
        if not GO_ON_AFTER.issuperset(answer["declined"]):
            if at < len(payloads):
                declined["after_a_declined_block"] += len(payloads) - at
            break
    return StoreResult(stored, present, dict(declined), nbytes)


def _window(payloads: Sequence[Payload], layout: Layout | None, most: int) -> list[_Offer]:
    """As many of ``payloads`` as may be reserved at once: at least one, at most ``most`` bytes."""
    offers: list[_Offer] = []
    size = 0
    for payload in payloads:
        offer = _offer(payload, layout)
        size += offer.nbytes
        if offers and size > most:
            break
        offers.append(offer)
    return offers


class _Chain:
    """A chain that is offered window by window; a daemon that can remembers the keys which it was sent."""

    def __init__(self, owner: Owner, space: SpaceCore, hashes: Sequence[bytes]) -> None:
        self._space = space
        self._hashes = hashes
        self._number = next(owner.chains) if CHAINS in owner.limits.capabilities else None
        self._known = 0

    def reserve(self, begin: int, offers: Sequence[_Offer], timeout: float, *, goes_on: bool) -> Operation[Message]:
        """Ask for slots for ``offers``, the blocks from ``begin`` on; ``goes_on``: what comes behind them will be offered too."""
        sizes = [offer.nbytes for offer in offers]
        fields: Message = {
            "first": begin,
            "sizes": sizes[0] if len(set(sizes)) == 1 else sizes,
            "timeout": timeout,
        }
        layouts = {str(index): offer.layout for index, offer in enumerate(offers) if offer.layout is not None}
        if layouts:
            fields["layouts"] = layouts
        end = begin + len(offers)
        try:
            answer = yield self._ask(fields, end, timeout, goes_on)
        except Refused as error:
            if not self._known or error.code != Code.NOT_FOUND:
                raise
            self._known = 0  # it has forgotten the chain
            answer = yield self._ask(fields, end, timeout, goes_on)
        if self._number is not None:
            self._known = end
        return answer

    def _ask(self, fields: Message, end: int, timeout: float, goes_on: bool) -> Ask:
        keys: Message = {"keys": pack_keys(self._hashes[self._known : end])}
        if self._number is not None and (goes_on or self._known):
            keys |= {"chain": self._number, "known": self._known, "goes_on": goes_on}
        return Ask("prepare_store", {**keys, **fields}, self._space, timeout)


def _write(owner: Owner, space: SpaceCore, offers: Sequence[_Offer], slots: Sequence[Sequence[int]]) -> Operation[int]:
    """Write what was given a slot; how many blocks are readable now."""
    reservations = [reservation for _, reservation, _, _ in slots]
    holding = owner.holding
    done = False
    try:
        with holding.writing():
            holding.warmer.soon([(s, offset, offers[i].nbytes) for i, _, s, offset in slots], write=True)
            steps = [
                partial(offers[i].write, holding.segments.writable(segment, offset, offers[i].nbytes))
                for i, _, segment, offset in slots
            ]
            yield Work(steps, anywhere=all(offers[i].plain for i, *_ in slots))
        done = True
    finally:
        if not done:
            # What can't be written is taken back, all of it: a block is stored whole or not at all.
            yield Ask("complete_store", {"reservations": reservations, "ok": False}, space)
    answer = yield Ask("complete_store", {"reservations": reservations, "ok": True}, space)
    stored: int = answer["stored"]
    return stored


def _offer(payload: Payload, layout: Layout | None) -> _Offer:
    if isinstance(payload, bytes | bytearray | memoryview):
        source = np.frombuffer(payload, dtype=np.uint8)
        if layout is not None and source.nbytes != layout.nbytes:
            raise ValueError(
                f"payload has {source.nbytes} bytes, the namespace's layout {layout.nbytes}: give its tensors instead"
            )

        def copy(out: memoryview) -> None:
            np.copyto(np.frombuffer(out, dtype=np.uint8), source)  # releases the GIL, which a memoryview does not

        return _Offer(source.nbytes, copy, plain=True)
    arrays = list(payload)
    if layout is None:
        raise ValueError("this namespace was made without a layout: give bytes, or give a layout to Cache.namespace")
    own = layout
    raw: bytes | None = None
    if not layout.matches(arrays):
        own = Layout.of(arrays)
        raw = own.to_bytes()

    def pack(out: memoryview) -> None:
        own.pack_into(arrays, out)

    return _Offer(own.nbytes, pack, plain=False, layout=raw)
