"""What LRU would have kept, and whether the predictions earn their place.

An LRU of the same capacity is followed over groups alone: of each group it would keep the first so many
blocks, and the group that was used longest ago loses its deepest block first. That costs O(1) per block and
answers exactly how many blocks of a request LRU would have had.
"""

from __future__ import annotations

from collections import OrderedDict
from math import sqrt

from omlxd.policy.prefix_groups import Group

_SLACK_PART = 0.001  # how far behind LRU the policy may fall, as a part of all blocks asked for,
_SLACK_DEVIATIONS = 1.5  # and beyond that in standard deviations of the sum of the differences
_CREDIT_PART = 0.02  # how much of a lead it may lose again later, as a part of all blocks asked for
_HORIZON = 4_000_000  # blocks asked for after which all that was counts half


class Guard:
    """Counts hits of the policy and of LRU; `lru_leads` while the policy should do as LRU does.

    A policy that has fallen behind by the slack follows LRU until the slack has grown to twice the arrears,
    about until twice as many blocks have been asked for; then it tries again. So predictions that never hold
    cost a bounded part of all hits, whatever the workload. Without the deviations a few long requests, missed
    early by chance, would silence good predictions for long.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._asked = 0.0
        self._lead = 0.0
        self._variance = 0.0
        self._groups: OrderedDict[Group, None] = OrderedDict()  # those of which LRU has something, oldest first
        self._kept = 0
        self.lru_leads = False

    def settle(self, asked: int, hits: int, shadow_hits: int) -> None:
        """A request asked for so many blocks; so many leading ones were there, and would have been under LRU."""
        difference = hits - shadow_hits
        self._asked += asked
        if difference:
            self._variance += difference * difference
            self._lead = min(self._lead + difference, _CREDIT_PART * self._asked)
        if self._lead < 0.0 or self.lru_leads:
            slack = _SLACK_PART * self._asked + _SLACK_DEVIATIONS * sqrt(self._variance)
            self.lru_leads = -self._lead > (0.5 * slack if self.lru_leads else slack)
        if self._asked > _HORIZON:
            self._asked *= 0.5
            self._lead *= 0.5
            self._variance *= 0.25

    def used(self, group: Group) -> None:
        """`group` is the latest one: LRU has all of it."""
        group.shadow = len(group.nodes)
        self._kept += group.count
        self._groups[group] = None

    def lost(self, group: Group, place: int) -> bool:
        """A block of `group` was taken over or forgotten; whether LRU had it."""
        if place < group.shadow:
            self._kept -= 1
            return True
        return False

    def gone(self, group: Group) -> None:
        """`group` has no block any more."""
        self._groups.pop(group, None)

    def trim(self) -> None:
        """Evict as LRU does."""
        while self._kept > self._capacity:
            group = next(iter(self._groups))
            nodes, top, place = group.nodes, group.top, group.shadow
            while place > top and self._kept > self._capacity:
                place -= 1
                if nodes[place] is not None:
                    self._kept -= 1
            group.shadow = place
            if place <= top:
                group.shadow = 0
                del self._groups[group]

    def state(self) -> tuple[float, float, float, bool]:
        """What must survive a restart; the blocks of LRU do not."""
        return self._asked, self._lead, self._variance, self.lru_leads

    def restore(self, asked: float, lead: float, variance: float, lru_leads: bool) -> None:
        """Go on from `state`."""
        self._asked, self._lead, self._variance, self.lru_leads = asked, lead, variance, lru_leads
