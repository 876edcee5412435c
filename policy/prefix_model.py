"""When will a group be used again? Survival over ages, by class, learnt from hits and from what was evicted.

Age counts requests, in bins that grow with the logarithm. For each class of groups and each bin the model
counts how many groups entered the bin and how many were used in it (a used part of a group counts as that
part of it). A group counts when it *enters* a bin: counting it when it leaves would make the oldest ages that
anybody has reached yet look far too hopeful, since hits are seen at once and survivors late.

A class is a tuple of features. Its hazard in a bin is that of its parent class (one feature less; where there
are two such parents, the geometric mean of theirs) times a
factor: what happened there and in the neighbouring bins, over what the parent's hazard would have made
happen, with `_TRUST` imagined events for "as the parent". So a class that has seen little does as its parent
does, and a root as a prior does whose hazard in each bin falls slowly: least recently used first.

There are two families. Paths that were used before have a rhythm: the next use comes after about as long as
the last one did. The upper levels of that family therefore count ages as multiples of the gap before the last
use, so that what was seen of fast conversations is known of slow ones; from the level on that tells gaps
apart, ages are requests as everywhere else.

What a group is worth is an index in the sense of Gittins (1979): the best ratio, over all horizons, of the
chance that it is used within the horizon to the time for which it will then have held its room. LHD (Beckmann,
Chen, Cidon, NSDI 2018) takes that ratio for the one horizon of the whole life; most of a cache's room then
goes to groups that are likely to be used some day, in spite of better ones that are used soon or never.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from math import sqrt

Features = tuple[int, ...]

NUM_BINS = 22
"""Ages up to 2^20 requests, an octave each; what is older shares the last bin."""

_KERNEL = 0.36  # weight of a bin's neighbour in its factor; of the next one 0.36 squared, ...
_TRUST = 1.4  # imagined events that speak for the parent's hazard
_ROOT_TRUST = 5.0  # imagined groups that speak for the bin before
_PRIOR = 0.05  # hazard of a bin of which nothing is known
_FADE = 0.8  # hazard of a bin in terms of the bin before, where nothing else is known
_CERTAIN = 0.95  # no hazard is higher
_RENEW_GROWTH = 0.05  # a class is looked at again when its counts have grown by this part
_RENEW_MINIMUM = 2.0  # and by this much
_FORGET_AT = 50_000.0  # events at which all counts are halved, so that the past weighs less and less


BOUNDS = tuple(2**index for index in range(NUM_BINS - 1))
"""Ages in requests at which the bins end; the last one ends nowhere."""
WIDTHS = tuple(b - a for a, b in zip((0, *BOUNDS), (*BOUNDS, 2 * BOUNDS[-1]), strict=True))


def bin_of(age: int) -> int:
    """The bin of an age in requests."""
    return min(NUM_BINS - 1, age.bit_length())


FRESH, AGAIN = range(2)
"""First feature, the family: used for the first time, or used before, with a gap as the fourth feature."""
MOST_GAP = 6
"""Octaves of gaps that are told apart; of what is longer the exact length says nothing more."""
_MOST_FEATURES = 6
_RELATIVE_LEVELS = 3  # of the family AGAIN: itself, by the second feature, by the third
USES = 2
"""Where the class of uses stands among the features."""
GAP = 3
"""Where the gap stands among the features of the family AGAIN."""


ANY = -1
"""In place of the last feature but one: whatever it is."""


class GroupClass:
    """What is known of one class: events and entries by bin, the hazard and the worth that follow from them.

    A relative class has its bins shifted, so that the gap of each group falls into bin `MOST_GAP`.
    """

    __slots__ = (
        "entries",
        "events",
        "features",
        "hazards",
        "lineage",
        "number",
        "parents",
        "queued",
        "relative",
        "renew_at",
        "shift",
        "total",
        "worths",
    )

    def __init__(self, features: Features, parents: tuple[GroupClass, ...], number: int) -> None:
        self.number = number
        """Order of appearance."""
        self.features = features
        self.parents = parents
        self.relative = features[0] == AGAIN and len(features) <= _RELATIVE_LEVELS
        bins = NUM_BINS + MOST_GAP if self.relative else NUM_BINS
        self.events = array("d", bytes(8 * bins))
        self.entries = array("d", bytes(8 * bins))
        self.hazards: list[float] = []
        self.worths: list[float] = []
        self.total = 0.0  # events and entries,
        self.renew_at = _RENEW_MINIMUM  # and at how many of them to look again
        self.queued = False
        self.shift = MOST_GAP - features[GAP] if features[0] == AGAIN and len(features) > GAP else 0
        """Bin of the relative classes above it that stands for its own bin 0."""
        self.lineage = self._lineage()
        """Itself and all above it, each with the shift of its bins."""

    @property
    def has_been_used_again(self) -> bool:
        """Whether its blocks were known before their last use."""
        return self.features[0] == AGAIN and self.features[USES] > 0

    def _lineage(self) -> tuple[tuple[GroupClass, int], ...]:
        above: dict[GroupClass, None] = {self: None}
        for parent in self.parents:
            above.update((level, None) for level, _ in parent.lineage)
        return tuple((level, self.shift if level.relative and not self.relative else 0) for level in above)


def root_hazards(events: Sequence[float], entries: Sequence[float]) -> list[float]:
    """Hazards without any feature; a bin that nobody has entered continues the bins before it."""
    hazards = []
    hazard = _PRIOR
    for seen, entered in zip(events, entries, strict=True):
        hazard = min(_CERTAIN, (seen + _ROOT_TRUST * hazard) / (entered + _ROOT_TRUST))
        hazards.append(hazard)
        hazard *= _FADE
    return hazards


def class_hazards(events: Sequence[float], entries: Sequence[float], parent: Sequence[float]) -> list[float]:
    """The parent's hazards times what this class did in terms of them, in each bin and its neighbours.

    The neighbours weigh less with their distance, geometrically: one pass upwards, one downwards.
    """
    upwards = []
    seen = likely = 0.0
    for happened, entered, hazard in zip(events, entries, parent, strict=True):
        seen = seen * _KERNEL + happened
        likely = likely * _KERNEL + entered * hazard
        upwards.append((seen, likely))
    hazards = [0.0] * len(upwards)
    seen = likely = 0.0  # of the bins above
    for index in range(len(upwards) - 1, -1, -1):
        seen_below, likely_below = upwards[index]
        hazard = parent[index]
        hazards[index] = min(_CERTAIN, hazard * (seen_below + seen + _TRUST) / (likely_below + likely + _TRUST))
        seen = (seen + events[index]) * _KERNEL
        likely = (likely + entries[index] * hazard) * _KERNEL
    return hazards


def index_of(hazards: Sequence[float]) -> list[float]:
    """For each bin, the best ratio over horizons of the chance of a use to the time until use or horizon, 1/requests.

    From the last bin backwards: a bin joins the ones after it while that raises its ratio. Each joins at most once.
    """
    worths = [0.0] * len(hazards)
    stack: list[tuple[float, float]] = []
    for index in range(len(hazards) - 1, -1, -1):
        chance = hazards[index]
        survival = 1.0 - chance
        time = WIDTHS[index] * (1.0 - 0.5 * chance)
        while stack and stack[-1][0] * time > chance * stack[-1][1]:
            later_chance, later_time = stack.pop()
            time += survival * later_time
            chance += survival * later_chance
            survival = 1.0 - chance
        stack.append((chance, time))
        worths[index] = chance / time
    return worths


def gain_over_rent(hazards: Sequence[float], start: int, rent: float, counts: float) -> float:
    """What a group that has come to bin `start` brings until its next use, given up when that no longer pays.

    A use brings `counts`, each request before it costs `rent`; 0 where giving up at once is best.
    """
    gain = 0.0
    for index in range(NUM_BINS - 1, start - 1, -1):
        hazard = hazards[index]
        stay = hazard * counts + (1.0 - hazard) * gain - rent * WIDTHS[index] * (1.0 - 0.5 * hazard)
        gain = max(0.0, stay)
    return gain


class SurvivalModel:
    """All classes of groups, and when to look at which of them again."""

    def __init__(self) -> None:
        self._classes: dict[Features, GroupClass] = {}
        self._stale: deque[GroupClass] = deque()
        self._weight = 0.0

    def of(self, features: Features) -> GroupClass:
        """The class with these features, of which the first is the family."""
        known = self._classes.get(features)
        if known is None:
            parents = tuple(self.of(above) for above in parents_of(features))
            known = self._classes[features] = GroupClass(features, parents, len(self._classes))
            self._compute(known)
        return known

    def entered(self, group_class: GroupClass, index: int) -> None:
        """A group of that class has come to the age of bin `index`."""
        for level, shift in group_class.lineage:
            level.entries[index + shift] += 1.0
            level.total += 1.0
        self._maybe_stale(group_class)

    def forget_entries(self, group_class: GroupClass, first: int, last: int) -> None:
        """A group of that class that has come to the ages of these bins was none: its request goes on."""
        for level, shift in group_class.lineage:
            for index in range(first + shift, last + shift + 1):
                level.entries[index] = max(0.0, level.entries[index] - 1.0)
            level.total -= last + 1 - first

    def used(self, group_class: GroupClass, index: int, part: float) -> None:
        """`part` (0 to 1) of a group of that class was used at the age of bin `index`."""
        self._weight += part
        for level, shift in group_class.lineage:
            level.events[index + shift] += part
            level.total += part
        self._maybe_stale(group_class)

    def _maybe_stale(self, group_class: GroupClass) -> None:
        if group_class.total > group_class.renew_at and not group_class.queued:
            group_class.queued = True
            self._stale.append(group_class)

    def renew(self, most: int) -> Iterator[GroupClass]:
        """Compute the worth of up to `most` classes anew, those first that wait longest; yields them."""
        if self._weight > _FORGET_AT:
            self._forget()
        for _ in range(min(most, len(self._stale))):
            group_class = self._stale.popleft()
            group_class.queued = False
            self._compute(group_class)
            yield group_class

    def _compute(self, group_class: GroupClass) -> None:
        parents = group_class.parents
        if parents:
            above = self._hazards_for(group_class, parents[0])
            for other in parents[1:]:
                above = [sqrt(one * two) for one, two in zip(above, self._hazards_for(group_class, other), strict=True)]
            group_class.hazards = class_hazards(group_class.events, group_class.entries, above)
        else:
            group_class.hazards = root_hazards(group_class.events, group_class.entries)
        if not group_class.relative:
            group_class.worths = index_of(group_class.hazards)
        group_class.renew_at = (1.0 + _RENEW_GROWTH) * group_class.total + _RENEW_MINIMUM

    def _hazards_for(self, group_class: GroupClass, parent: GroupClass) -> list[float]:
        """The parent's hazards in the bins of `group_class`."""
        if parent.total > parent.renew_at:
            self._compute(parent)
        if parent.relative and not group_class.relative:
            return parent.hazards[group_class.shift : group_class.shift + NUM_BINS]
        return parent.hazards

    def _forget(self) -> None:
        self._weight *= 0.5
        for group_class in self._classes.values():
            for counts in (group_class.events, group_class.entries):
                for index, number in enumerate(counts):
                    counts[index] = 0.5 * number
            group_class.total *= 0.5
            group_class.renew_at *= 0.5

    def state(self) -> list[list[object]]:
        """All counts, as msgpack can pack them: [features, events, entries] for each class, parents first."""
        return [
            [list(features), known.events.tolist(), known.entries.tolist()]
            for features, known in sorted(self._classes.items(), key=_level)
        ]

    @classmethod
    def from_state(cls, state: object) -> SurvivalModel:
        """The model that `state` described; ValueError where it is not of that shape."""
        model = cls()
        if not isinstance(state, list | tuple):
            raise ValueError("policy state: 'model' must be a list of classes; discard the state to start without it")
        for item in state:
            features, events, entries = _class_state(item)
            known = model.of(features)
            if len(events) != len(known.events):
                raise ValueError(
                    f"policy state: class {features} has {len(events)} bins instead of {len(known.events)}; "
                    "discard the state to start without it"
                )
            known.events, known.entries = events, entries
            known.total = sum(events) + sum(entries)
        for _, known in sorted(model._classes.items(), key=_level):  # parents come first
            model._compute(known)
        model._weight = sum(sum(known.events) for features, known in model._classes.items() if len(features) == 1)
        return model


def _level(item: tuple[Features, GroupClass]) -> tuple[int, bool]:
    features = item[0]
    return len(features), ANY not in features


def parents_of(features: Features) -> tuple[Features, ...]:
    """The classes with a feature less: without the last; of a class with all features also without the last but one."""
    if len(features) == 1:
        return ()
    if len(features) == _MOST_FEATURES:
        without = (*features[:-2], ANY, features[-1])
        return (features[:-2],) if features[-2] == ANY else (features[:-1], without)
    return (features[:-1],)


def is_features(value: object) -> bool:
    """Whether `value`, from a saved state, names a class."""
    return (
        isinstance(value, list | tuple)
        and 0 < len(value) <= _MOST_FEATURES
        and all(isinstance(feature, int) and ANY <= feature < NUM_BINS for feature in value)
        and value[0] in (FRESH, AGAIN)
        and (value[0] == FRESH or len(value) <= GAP or 0 < value[GAP] <= MOST_GAP)
    )


def _class_state(item: object) -> tuple[Features, array[float], array[float]]:
    if isinstance(item, list | tuple) and len(item) == 3 and is_features(item[0]):
        features, events, entries = item
        if _are_counts(events) and _are_counts(entries) and len(events) == len(entries):
            return tuple(features), array("d", events), array("d", entries)
    raise ValueError(f"policy state: {item!r} is no class of groups; discard the state to start without it")


def _are_counts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(n, int | float) and 0.0 <= n < 1e15 for n in value)
