"""Owners that go, and leases that are taken from them: when what they held becomes others'. Loop thread only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from omlxd.storage.owners import Owners, Seizure, UnknownId

if TYPE_CHECKING:
    from omlxd.storage.loads import Load
    from omlxd.storage.ram import RamBlock, RamTier


class Departures:
    """Gives back what owners held, at once or when it is certain that they do not use it any more."""

    def __init__(
        self,
        ram: RamTier,
        owners: Owners,
        *,
        give_up: Callable[[RamBlock], object],
        progress: Callable[[], None],
    ) -> None:
        """``give_up``: nobody will complete this reserved block; ``progress``: something gave room."""
        self._ram = ram
        self._owners = owners
        self._give_up = give_up
        self._progress = progress
        self._seizures: set[Seizure] = set()

    @property
    def seized_blocks(self) -> int:
        """Blocks that are kept from others for owners who have gone."""
        return sum(seizure.blocks for seizure in self._seizures)

    def owner_gone(
        self, owner: Hashable, *, may_still_write: bool, may_still_read: bool, seconds: float | None
    ) -> Callable[[], None] | None:
        """See ``Store.owner_gone``."""
        state = self._owners.pop(owner)
        if state is None:
            return None
        kept: list[RamBlock] = []
        leases: list[Load] = []
        for load in state.leases.values():
            load.end("its client has gone")
            if may_still_read:
                leases.append(load)
            else:
                load.release()
        for reservation in list(state.reservations):
            block = state.pop_reservation(reservation)
            if may_still_write:
                self._ram.detach(block)
                self._ram.hold(block)
                kept.append(block)
            self._give_up(block)
        self._progress()
        return self._seize(leases, kept, seconds) if leases or kept else None

    def revoke(self, lease_id: int, seconds: float) -> Hashable:
        """See ``Store.revoke``."""
        found = self._owners.find_lease(lease_id)
        if found is None:
            raise UnknownId(f"there is no lease {lease_id}: it has ended, or never was")
        owner, load = found
        if not load.revoked:
            load.revoked = True
            load.end("revoked")
            asyncio.get_running_loop().call_later(seconds, self._take_back, owner, load)
        return owner

    def _take_back(self, owner: Hashable, load: Load) -> None:
        if not load.released:
            self._owners.known(owner).leases.pop(load.id, None)
            load.release()
            self._progress()

    def _seize(self, leases: list[Load], written: list[RamBlock], seconds: float | None) -> Callable[[], None]:
        def give_back() -> None:
            self._seizures.discard(seizure)
            for load in leases:
                load.release()
            for block in written:
                self._ram.unhold(block)
            self._progress()

        blocks = len(written) + sum(len(load.blocks) for load in leases)
        seizure = Seizure(seconds, blocks, give_back)
        self._seizures.add(seizure)
        return seizure.free
