"""How a store is to be kept, and its opening with that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omlxd.policy.base import CachePolicy
from omlxd.policy.registry import get_policy
from omlxd.storage.environment import DURABILITIES, Durability
from omlxd.storage.sizes import MIN_SSD_BYTES
from omlxd.storage.ssd_load import Opened, open_store

MIN_LIMIT = MIN_SSD_BYTES
"""The smallest limit in bytes that makes a store; to have none, give no tier at all."""
MEAN_BLOCK_BYTES = 1 << 20
"""What a block is taken to have until there are some: policies want a capacity in blocks."""


@dataclass(frozen=True, slots=True)
class SsdSettings:
    """What ``SsdTier.open`` is told; sizes in bytes. ``ValueError`` for what can't be."""

    limit: int
    policy: str
    min_free: int
    durability: Durability
    codec: str
    boot: str
    """Names this run of the machine."""

    def __post_init__(self) -> None:
        if self.limit < MIN_LIMIT:
            raise ValueError(
                f"an SSD limit of {self.limit} bytes is too small: give {MIN_LIMIT} or more, or switch it off (0)"
            )
        if self.durability not in DURABILITIES:
            raise ValueError(f"unknown durability {self.durability!r}; choose one of {', '.join(DURABILITIES)}")

    def open(self, path: Path, check: bool = False) -> Opened:
        """Open or create the store at ``path``; ``check`` its structure first. Raises as ``open_store`` does, ``ValueError``."""
        policy = get_policy(self.policy)

        def make_policy() -> CachePolicy:
            return policy(max(64, self.limit // MEAN_BLOCK_BYTES))

        return open_store(
            path,
            limit=self.limit,
            durability=self.durability,
            make_policy=make_policy,
            boot=self.boot,
            check=check,
        )
