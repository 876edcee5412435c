"""What LRU would have kept, and whether the predictions earn their place.

An LRU of the same capacity is followed over groups alone: of each group it would keep the first so many
blocks, and the group that was used longest ago loses its deepest block first. That costs O(1) per block and
answers exactly how many blocks of a request LRU would have had.
"""

from __future__ import annotations

from collections import OrderedDict

from omlxd.policy.prefix_groups import Group

_SLACK_PART = 0.0002  # how far behind LRU a trial may fall, as a part of all blocks asked for, its worst request aside
_CREDIT_PART = 0.02  # how much of a lead it may lose again later, likewise
_DEBT_PART = 0.002  # how far behind LRU all may be when another trial begins, likewise, the worst request of all aside
_PAUSE = 0.25  # the first pause between two trials, as a part of all blocks asked for; each further one is twice that
_LEARN_FIRST = 40  # requests that used something again, before which nothing is predicted
_HORIZON = 4_000_000  # blocks asked for after which all that was counts half


class Guard:
    """Counts hits of the policy and of LRU; `lru_leads` while the policy should do as LRU does.

    It begins as LRU, until there is something to learn from. Then the predictions are on trial. A trial that falls
    behind by the slack ends; the policy then does as LRU for a while, longer after each trial that ends so, and
    tries again, unless all trials together have cost too much already. One request proves nothing, however long it
    is: the worst one is left out of both accounts. So predictions that never hold cost a bounded part of all hits
    and two requests, whatever the workload, and a good trial that a few long requests ended by chance costs one
    short pause.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._asked = 0.0
        self._lead = 0.0  # of all that was
        self._worst = 0.0  # difference of one request, at most 0,
        self._trial_lead = 0.0
        self._trial_worst = 0.0  # and of one of this trial
        self._retry_at = 0.0
        self._pause = _PAUSE
        self._groups: OrderedDict[Group, None] = OrderedDict()  # those of which LRU has something, oldest first
        self._kept = 0
        self._hits = 0
        self.lru_leads = True

    def settle(self, asked: int, hits: int, shadow_hits: int, reused: bool, *, compare: bool) -> None:
        """A request asked for so many blocks; so many leading ones were there, and would have been under LRU.

        `reused`: some had been used before, be they there or not. `compare`: its misses were going to be stored. Of
        uses that were merely reported, as to the SSD tier, LRU would not have stored them either.
        """
        self._asked += asked
        difference = hits - shadow_hits if compare else 0
        self._lead += difference
        self._worst = min(self._worst, difference)
        if not self.lru_leads:
            if compare:
                self._judge(difference)
        else:
            self._hits += reused
            in_debt = self._lead - self._worst < -_DEBT_PART * self._asked
            if self._asked >= self._retry_at and self._hits >= _LEARN_FIRST and not in_debt:
                self.lru_leads = False
                self._trial_lead = self._trial_worst = 0.0
        if self._asked > _HORIZON:
            self._asked *= 0.5
            self._lead *= 0.5
            self._worst *= 0.5
            self._trial_lead *= 0.5
            self._trial_worst *= 0.5
            self._retry_at *= 0.5

    def _judge(self, difference: int) -> None:
        self._trial_lead = min(self._trial_lead + difference, _CREDIT_PART * self._asked)
        self._trial_worst = min(self._trial_worst, difference)
        slack = _SLACK_PART * self._asked
        if self._trial_lead > slack:
            self._pause = _PAUSE
        elif self._trial_lead - self._trial_worst < -slack:
            self.lru_leads = True
            self._retry_at = (1.0 + self._pause) * self._asked
            self._pause *= 2.0

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
        while self._kept > self.capacity:
            group = next(iter(self._groups))
            nodes, top, place = group.nodes, group.top, group.shadow
            while place > top and self._kept > self.capacity:
                place -= 1
                if nodes[place] is not None:
                    self._kept -= 1
            group.shadow = place
            if place <= top:
                group.shadow = 0
                del self._groups[group]

    def state(self) -> tuple[float, ...]:
        """What must survive a restart, numbers; the blocks of LRU do not."""
        return tuple(float(getattr(self, name)) for name in _SAVED)

    def restore(self, *numbers: float) -> None:
        """Go on from `state`."""
        for name, number in zip(_SAVED, numbers, strict=True):
            setattr(self, name, type(getattr(self, name))(number))


_SAVED = ("_asked", "_lead", "_worst", "_trial_lead", "_trial_worst", "_retry_at", "_pause", "_hits", "lru_leads")
NUM_SAVED = len(_SAVED)
