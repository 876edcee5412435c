"""Which keys are worth a slot: those that were offered often enough."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable


class AdmissionFilter:
    """Counts offers per key, for the `max_tracker_size` keys offered last; a key is admitted from its
    `threshold`-th offer on.
    """

    def __init__(self, threshold: int, max_tracker_size: int) -> None:
        self.threshold = threshold
        self.max_tracker_size = max_tracker_size
        self._offers: OrderedDict[bytes, int] = OrderedDict()

    def count(self, keys: Collection[bytes]) -> None:
        """Count one offer of distinct `keys`. It pushes out older keys, never its own, also where it is
        larger than the tracker.
        """
        offers = self._offers
        for key in keys:
            offers[key] = offers.get(key, 0) + 1
            offers.move_to_end(key)
        for _ in range(len(offers) - max(self.max_tracker_size, len(keys))):
            offers.popitem(last=False)

    def admitted(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of `keys` that were offered often enough."""
        offers, threshold = self._offers, self.threshold
        return [key for key in keys if offers.get(key, 0) >= threshold]

    def __len__(self) -> int:
        return len(self._offers)

    def clear(self) -> None:
        """Forget all counts."""
        self._offers.clear()
