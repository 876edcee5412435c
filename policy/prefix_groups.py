"""Groups: what one request used last.

A request uses a path, from the head of a chain to some block. The blocks that it used last, as long as no
later request has taken them over, are its groups: one for each stretch of the path that was used about
equally often before. A later request takes blocks from the top of a group, eviction from its bottom, so what
a group has left is one stretch of the path.
"""

from __future__ import annotations

from collections.abc import Iterator

from omlxd.policy.base import ChunkStatus, RequestContext
from omlxd.policy.prefix_model import AGAIN, FRESH, GAP, MOST_GAP, Features, GroupClass

_LONGEST = 9  # octaves of lengths
_MOST_LEFTOVER_USES = 3
_MANY_TURNS = 5  # of a chain, before a use


class Node:
    """A block that the policy knows: resident, or a ghost without a chunk."""

    __slots__ = ("chunk", "group", "key", "kids", "parent", "place")

    key: bytes
    chunk: ChunkStatus | None
    group: Group | Path
    place: int
    """Index in the group's nodes."""
    parent: Node | None
    """The block before it, in the last request that used it."""
    kids: int
    """Resident blocks whose parent it is."""

    def __init__(self, key: bytes, group: Group | Path, place: int) -> None:
        self.key = key
        self.chunk = None
        self.group = group
        self.place = place
        self.parent = None
        self.kids = 0


class Group:
    """Blocks of one age and class, head to tail; None where one was taken over."""

    __slots__ = (
        "bin",
        "cell",
        "count",
        "edge",
        "features",
        "group_class",
        "nodes",
        "rank",
        "shadow",
        "since",
        "size",
        "top",
        "turns",
        "uses",
        "worth_writing",
    )

    def __init__(
        self, nodes: list[Node | None], group_class: GroupClass, uses: int, since: int, rank: int, turns: int
    ) -> None:
        self.nodes = nodes
        self.group_class = group_class
        self.uses = uses
        self.turns = turns
        """How often its chain has been used, counted along its deepest blocks: the turns of a conversation."""
        self.since = since
        """The time of the request that used it."""
        self.rank = rank
        """Its place in the order of use: unique, higher is later; deeper groups of a request have lower ones."""
        self.bin = 0
        self.count = self.size = len(nodes)
        """Blocks that it has, and had when its class was given."""
        self.top = 0
        """No node lies before this place."""
        self.edge = -1
        """Place of the deepest resident block, or -1."""
        self.cell: object = None
        """Where it waits for eviction; None while it must not be evicted."""
        self.shadow = 0
        """Nodes before this place would be resident if the policy were LRU."""
        self.worth_writing: bool | None = None
        """What was found when a block of it left RAM; None while none has."""

    def find_edge(self, start: int) -> None:
        """The deepest resident block at or before place `start` becomes the edge."""
        nodes = self.nodes
        for place in range(start, self.top - 1, -1):
            node = nodes[place]
            if node is not None and node.chunk is not None:
                self.edge = place
                return
        self.edge = -1

    @property
    def is_evictable(self) -> bool:
        """Whether its deepest resident block may leave: nobody reads it, and it has no resident child."""
        edge = self.edge
        if edge < 0:
            return False
        node = self.nodes[edge]
        assert node is not None
        assert node.chunk is not None
        return not node.kids and not node.chunk.ref_cnt

    def residents(self) -> Iterator[Node]:
        """Its resident blocks, the deepest first."""
        for place in range(self.edge, self.top - 1, -1):
            node = self.nodes[place]
            if node is not None and node.chunk is not None:
                yield node


class Path:
    """What a running request has used so far, in its order."""

    __slots__ = (
        "asked",
        "closed",
        "context",
        "expected",
        "gap",
        "goes_on",
        "groups",
        "hits",
        "known",
        "leading",
        "nodes",
        "runs",
        "settled",
        "shadow_hits",
        "shadow_leading",
        "taken",
        "turns",
    )

    def __init__(self) -> None:
        self.nodes: list[Node | None] = []
        """None where another request has taken the block over since."""
        self.runs: list[tuple[int, int]] = []
        """(place, uses): from that place on the blocks have been used so often, this time included."""
        self.taken: dict[Group, int] = {}
        """How many blocks it has taken over from which group."""
        self.closed = False
        self.context: RequestContext | None = None
        self.asked = 0
        self.expected = 0
        """How many blocks the request will use, as far as is known."""
        self.known = 0
        """How many leading blocks had been used before."""
        self.gap = 0
        """Octave of the pace at which the deepest of those is used; 0 where there is none."""
        self.turns = 1
        """How often that one has been used, and those that it continued."""
        self.hits = 0
        """How many leading blocks were resident,"""
        self.leading = True
        """if all are so far;"""
        self.shadow_hits = 0
        """how many would have been under LRU."""
        self.shadow_leading = True
        self.goes_on = False
        """Whether its request had ended once before."""
        self.groups: list[Group] = []
        """What became of its blocks when it ended."""
        self.settled = (0, 0, 0)
        """What the guard knows already of asked, hits and shadow_hits."""

    def hand_over(self, later: Path) -> None:
        """`later` goes on where this path ended."""
        later.goes_on = True
        later.known, later.gap, later.turns = self.known, self.gap, self.turns
        later.leading, later.shadow_leading = self.leading, self.shadow_leading
        later.hits, later.shadow_hits, later.asked = self.hits, self.shadow_hits, self.asked
        later.expected, later.context = self.expected, self.context
        later.settled = self.settled

    def unsettled(self) -> tuple[int, int, int, bool]:
        """Asked, hits and shadow hits since the request ended last, and whether it is the first that used something again."""
        asked, hits, shadow_hits = self.settled
        self.settled = (self.asked, self.hits, self.shadow_hits)
        return self.asked - asked, self.hits - hits, self.shadow_hits - shadow_hits, self.known > 0 and not self.goes_on

    def uses_at(self, place: int) -> int:
        """How often the block at `place` has been used, this time included."""
        return next(uses for start, uses in reversed(self.runs) if start <= place)


def octave(number: int) -> int:
    """0 for 0, 1 for 1, 2 for 2-3, 3 for 4-7, ...; at most `_LONGEST`."""
    return min(_LONGEST, number.bit_length())


def uses_class(uses: int) -> int:
    """0 for the first use, 1 for the second, 2 for up to 4, 3 for up to 10, 4 beyond."""
    return 0 if uses <= 1 else 1 if uses == 2 else 2 if uses <= 4 else 3 if uses <= 10 else 4


STRETCH, TAIL, LEFTOVER = range(3)
"""Second feature of a class: part of a path; its last block, where engines often put what the next prompt has not;
what a later request left of a group when it took only a part."""


def path_features(path: Path, kind: int, uses: int) -> Features:
    """The class of a stretch of `path`: family, kind, uses, gap before, length of what was new, and of what was known."""
    new = octave(max(len(path.nodes), path.expected) - path.known)
    if not path.known:
        return (FRESH, kind, uses_class(uses), new)
    return (AGAIN, kind, uses_class(uses), path.gap, new, octave(path.known))


def leftover_features(group: Group) -> Features:
    """The class of what is left of `group`."""
    return (FRESH, LEFTOVER, min(group.group_class.features[2], _MOST_LEFTOVER_USES))


def rhythm(group: Group, gap: int) -> int:
    """Octave of the pace at which `group` is used, now that it was for the first time in `gap` octaves.

    It rises with one long gap and falls over several short ones: who paused once pauses again. In a chain that many turns
    have shown the pace of, one long gap says less.
    """
    gap = min(gap, MOST_GAP)
    features = group.group_class.features
    if features[0] == AGAIN and (features[GAP] > gap or group.turns >= _MANY_TURNS):
        return (gap + features[GAP] + 1) // 2
    return gap


def stretches(path: Path) -> Iterator[tuple[int, int, int, int]]:
    """(start, stop, kind, uses) of the parts of a path whose blocks were used about equally often, heads first."""
    end = len(path.nodes)
    tail = end - 1 if end > 1 else end
    start, uses = 0, 1
    for index, (_, uses) in enumerate(path.runs):
        following = path.runs[index + 1] if index + 1 < len(path.runs) else None
        if following is not None and uses_class(following[1]) == uses_class(uses):
            continue
        stop = tail if following is None else min(following[0], tail)
        if start < stop:
            yield start, stop, STRETCH, uses
        start = stop
    if tail < end:
        yield tail, end, TAIL, uses
