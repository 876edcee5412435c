"""The tiers below RAM as the store has them: an ordered list, each with its restorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from omlxd.storage.restore import Restorer
from omlxd.storage.tier import LowerTier
from omlxd.storage.where import Where

AnyTier: TypeAlias = LowerTier[Any]
"""What a tier says of its blocks is its own and of its restorer only."""


@dataclass(frozen=True, slots=True)
class Lower:
    """One tier below RAM."""

    name: str
    """One word, for counters: ``ssd``, ``remote``."""
    where: Where
    tier: AnyTier
    restorer: Restorer[Any]


class Lowers(list[Lower]):
    """The tiers in the order in which they are tried."""

    def having(self, key: bytes) -> Lower | None:
        """The first that restores ``key`` now, or has it; None when none is known to."""
        for lower in self:
            if key in lower.restorer:
                return lower
        for lower in self:
            if key in lower.tier:
                return lower
        return None

    @property
    def restoring(self) -> int:
        """Restores under way."""
        return sum(len(lower.restorer) for lower in self)
