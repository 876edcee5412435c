"""Who holds what: the leases and reservations of each connection, and what is kept from others when one has vanished.

Runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omlxd.policy.base import RequestContext

if TYPE_CHECKING:
    from omlxd.storage.loads import Load
    from omlxd.storage.ram import RamBlock


RECENT_REQUESTS = 8


class UnknownId(LookupError):
    """A lease or reservation that this owner does not have."""


@dataclass(slots=True)
class Reservation:
    """A slot that an owner is writing."""

    block: RamBlock
    since: float
    """On the store's clock."""
    withdrawn: bool = False
    """May others store the block, because it was not written in time?"""


@dataclass(slots=True)
class Owner:
    """What one connection holds."""

    leases: dict[int, Load] = field(default_factory=dict)
    reservations: dict[int, Reservation] = field(default_factory=dict)
    reserved_bytes: int = 0
    """Payload bytes of its reservations."""
    withdrawn_bytes: int = 0
    """Those of them that come too late to become blocks."""
    requests: deque[RequestContext] = field(default_factory=lambda: deque(maxlen=RECENT_REQUESTS))
    """Its latest requests: what it stores may belong to what it has loaded."""

    def lease(self, lease_id: int) -> Load:
        """A lease by its id, taken out. Raises UnknownId."""
        load = self.leases.pop(lease_id, None)
        if load is None:
            raise UnknownId(f"lease {lease_id} is not held by this connection: it was released before, or never given")
        return load

    def take_reservations(self, ids: Sequence[int]) -> list[RamBlock]:
        """The blocks of these reservations, taken out. Raises UnknownId; then none is changed."""
        unknown = [one for one in ids if one not in self.reservations]
        if unknown or len(set(ids)) != len(ids):
            raise UnknownId(
                f"reservation {unknown[0] if unknown else ids[0]} is not open on this connection: "
                "it was completed before, or never given; nothing was changed"
            )
        return [self.pop_reservation(one) for one in ids]

    def pop_reservation(self, reservation: int) -> RamBlock:
        """One reservation's block, taken out."""
        taken = self.reservations.pop(reservation)
        self.reserved_bytes -= taken.block.meta.nbytes
        self.withdrawn_bytes -= taken.block.meta.nbytes * taken.withdrawn
        return taken.block

    def withdraw_older(self, than: float) -> list[RamBlock]:
        """The blocks of reservations that were made before ``than``, and not withdrawn so far; they are from now on."""
        late = [one for one in self.reservations.values() if one.since < than and not one.withdrawn]
        for one in late:
            one.withdrawn = True
            self.withdrawn_bytes += one.block.meta.nbytes
        return [one.block for one in late if not one.block.detached]


class Owners:
    """All of them, by whatever names a connection."""

    def __init__(self) -> None:
        self._owners: dict[Hashable, Owner] = {}

    def __iter__(self) -> Iterator[Owner]:
        return iter(self._owners.values())

    def of(self, name: Hashable) -> Owner:
        """What ``name`` holds; it becomes known."""
        return self._owners.setdefault(name, Owner())

    def known(self, name: Hashable) -> Owner:
        """What ``name`` holds; nothing, when it is not known."""
        return self._owners.get(name) or Owner()

    def pop(self, name: Hashable) -> Owner | None:
        """Forget ``name``; what it held is the caller's to give back."""
        return self._owners.pop(name, None)

    def find_lease(self, lease_id: int) -> tuple[Hashable, Load] | None:
        """Who holds the lease ``lease_id``."""
        for name, owner in self._owners.items():
            if lease_id in owner.leases:
                return name, owner.leases[lease_id]
        return None

    def reserved_bytes(self) -> int:
        """Payload bytes of all reservations."""
        return sum(owner.reserved_bytes for owner in self)

    def coming_bytes(self) -> int:
        """Payload bytes of the reservations that may yet become blocks: those that were not withdrawn."""
        return sum(owner.reserved_bytes - owner.withdrawn_bytes for owner in self)

    def held(self) -> dict[str, int]:
        """Gauges: leases, leased blocks and bytes, reservations, reserved bytes."""
        leases = [load for owner in self for load in owner.leases.values()]
        return {
            "leases": len(leases),
            "leased_bytes": sum(load.nbytes for load in leases),
            "leased_blocks": sum(len(load.blocks) for load in leases),
            "reservations": sum(len(owner.reservations) for owner in self),
            "reserved_bytes": self.reserved_bytes(),
        }


class Seizure:
    """Memory of an owner that was lost sight of while its process may still use it.

    Nobody else gets it until :meth:`free` is called (the process has gone, or says that it is done), at the latest
    ``seconds`` later where there is such a limit.
    """

    def __init__(self, seconds: float | None, blocks: int, give_back: Callable[[], None]) -> None:
        self.blocks = blocks
        self._give_back: Callable[[], None] | None = give_back
        self._timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self.free)

    def free(self) -> None:
        """Give the memory back. A second call does nothing."""
        if self._timer is not None:
            self._timer.cancel()
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()
