"""What LRU would have kept, and whether the predictions earn their place.

An LRU of the same capacity is followed over groups alone: of each group it would keep the first so many
blocks, and the group that was used longest ago loses its deepest block first. That costs O(1) per block and
answers exactly how many blocks of a request LRU would have had.
"""

from __future__ import annotations

from collections import OrderedDict

from omlxd.policy.prefix_groups import Group

_SLACK_PART = 0.002  # how far behind LRU the policy may fall, as a part of all blocks asked for,
_SLACK_BLOCKS = 0.1  # and of the capacity
_CREDIT_PART = 0.02  # how much of a lead it may spend later


class Guard:
    """Counts hits of the policy and of LRU; `lru_leads` while the policy should do as LRU does.

    A policy that has fallen behind by the slack follows LRU until the slack has grown to twice the arrears,
    that is until twice as many blocks have been asked for; then it tries again. So predictions that never hold
    cost a bounded part of all hits, whatever the workload.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._asked = 0
        self._lead = 0.0
        self._groups: OrderedDict[Group, None] = OrderedDict()  # those of which LRU has something, oldest first
        self._kept = 0
        self.lru_leads = False

    def settle(self, asked: int, hits: int, shadow_hits: int) -> None:
        """A request asked for so many blocks; so many leading ones were there, and would have been under LRU."""
        self._asked += asked
        self._lead = min(self._lead + hits - shadow_hits, self._slack(_CREDIT_PART))
        if self.lru_leads:
            self.lru_leads = -2.0 * self._lead > self._slack(_SLACK_PART)
        else:
            self.lru_leads = -self._lead > self._slack(_SLACK_PART)

    def _slack(self, part: float) -> float:
        return part * self._asked + _SLACK_BLOCKS * self._capacity

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

    def state(self) -> tuple[float, float, float]:
        """What must survive a restart; the blocks of LRU do not."""
        return float(self._asked), self._lead, float(self.lru_leads)

    def restore(self, asked: float, lead: float, lru_leads: float) -> None:
        """Go on from `state`."""
        self._asked, self._lead, self.lru_leads = int(asked), lead, bool(lru_leads)
