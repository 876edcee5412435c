"""What the prefix policy remembers: blocks, groups, ghosts, running requests, and the time.

Time counts requests that have ended. Every block that is resident, and of those that were evicted or refused
as many as the bound allows, is a node in exactly one group, or in the path of a running request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from omlxd.policy.base import ChunkStatus
from omlxd.policy.prefix_groups import Group, Node, Path, leftover_features, path_features, rhythm, stretches
from omlxd.policy.prefix_guard import Guard
from omlxd.policy.prefix_model import BOUNDS, NUM_BINS, GroupClass, SurvivalModel, bin_of
from omlxd.policy.prefix_queue import WorthQueue

GHOSTS_PER_BLOCK = 16
MOST_GHOSTS = 200_000
_MOST_PATHS = 512  # running requests; of more the oldest counts as ended
_REMEMBERED_REQUESTS = 4_096  # for the rate at which new blocks come
_RENEWED_PER_REQUEST = 16  # classes looked at anew


class History:
    """All that is known of blocks and their groups, resident or not."""

    def __init__(self, capacity: int, model: SurvivalModel | None = None) -> None:
        self.nodes: dict[bytes, Node] = {}
        self.model = model if model is not None else SurvivalModel()
        self.queue = WorthQueue()
        self.guard = Guard(capacity)
        self.capacity = capacity
        self.paths: OrderedDict[Path, None] = OrderedDict()
        self.groups: OrderedDict[Group, None] = OrderedDict()
        """In the order of use, except that groups whose ghosts were dropped once have gone to the end."""
        self.num_residents = 0
        self.max_ghosts = min(GHOSTS_PER_BLOCK * capacity, MOST_GHOSTS)
        self.now = 0
        self._fresh = self._requests = 0
        self._rank = 0
        self._ages: list[OrderedDict[Group, None]] = [OrderedDict() for _ in range(NUM_BINS)]

    def set_capacity(self, capacity: int) -> None:
        """So many blocks fit from now on."""
        self.capacity = self.guard.capacity = capacity
        self.max_ghosts = min(GHOSTS_PER_BLOCK * capacity, MOST_GHOSTS)

    @property
    def turnover(self) -> float:
        """Which part of the capacity a mean request would fill with blocks that were not known."""
        return self._fresh / max(1, self._requests * self.capacity)

    # Requests

    def open_path(self) -> Path:
        """A request begins."""
        if len(self.paths) >= _MOST_PATHS:
            self.close(next(iter(self.paths)))
        path = Path()
        self.paths[path] = None
        return path

    def reopen(self, ended: Path) -> Path:
        """The request of `ended` goes on, as if it had not ended: what it used then is not used twice by it."""
        path = self.open_path()
        ended.hand_over(path)
        for group in ended.groups:
            mine = [node for node in group.nodes if node is not None]
            if not mine:
                continue
            self.model.forget_entries(group.group_class, bin_of(0), group.bin)
            path.runs.append((len(path.nodes), group.uses))
            for node in mine:
                self._detach(node, group)
                node.group = path
                node.place = len(path.nodes)
                path.nodes.append(node)
        ended.groups = []
        return path

    def use(self, path: Path, keys: Iterable[bytes], *, create: bool, chained: bool = True) -> None:
        """The request of `path` uses `keys`, heads first; `create`: also those that are not known yet.

        `chained`: each is the parent of the next.
        """
        nodes, mine = self.nodes, path.nodes
        previous = mine[-1] if mine else None
        uses = path.runs[-1][1] if path.runs else 0
        for key in keys:
            node = nodes.get(key)
            if node is None:
                if not create:
                    continue
                nodes[key] = node = Node(key, path, len(mine))
                self._fresh += 1
                count = 1
                path.leading = path.shadow_leading = False
            else:
                group = node.group
                if group is path:
                    continue
                count = self._take_over(node, group, path)
                node.group = path
                node.place = len(mine)
            mine.append(node)
            if count != uses:
                uses = count
                path.runs.append((node.place, count))
            if chained and previous is not None and node.parent is not previous:
                self._set_parent(node, previous)
            previous = node
        path.asked = max(path.asked, len(mine))
        for group in path.taken:
            if group.count:
                self.requeue(group)

    def _take_over(self, node: Node, group: Group | Path, path: Path) -> int:
        """Take `node` out of `group` for `path`; how often it has been used with this time."""
        resident = node.chunk is not None
        if isinstance(group, Path):
            group.nodes[node.place] = None
            uses, lru_has_it = 2, resident
            gap, turns = 1, 2
        else:
            path.taken[group] = path.taken.get(group, 0) + 1
            uses, gap = group.uses + 1, rhythm(group, bin_of(self.now + 1 - group.since))
            turns = group.turns + 1
            lru_has_it = self._detach(node, group)
        if path.known == len(path.nodes):
            path.known += 1
            path.gap, path.turns = gap, turns
        if path.leading:
            if resident:
                path.hits += 1
            else:
                path.leading = False
        if path.shadow_leading:
            if lru_has_it:
                path.shadow_hits += 1
            else:
                path.shadow_leading = False
        return uses

    def _detach(self, node: Node, group: Group) -> bool:
        """`node` leaves `group`; whether LRU would have had it."""
        place = node.place
        nodes = group.nodes
        nodes[place] = None
        group.count -= 1
        lru_has_it = self.guard.lost(group, place)
        if not group.count:
            self._end(group)
            return lru_has_it
        if place == group.edge:
            group.find_edge(place - 1)
        if place == group.top:
            while nodes[place] is None:
                place += 1
            group.top = place
        return lru_has_it

    def _end(self, group: Group) -> None:
        """`group` has no block any more."""
        self.queue.take(group)
        del self._ages[group.bin][group]
        del self.groups[group]
        self.guard.gone(group)
        group.nodes = []
        group.edge = -1

    def _set_parent(self, node: Node, parent: Node) -> None:
        old = node.parent
        node.parent = parent
        if node.chunk is not None:
            parent.kids += 1
            if old is not None:
                self._lose_kid(old)

    def _lose_kid(self, parent: Node) -> None:
        parent.kids -= 1
        group = parent.group
        if not parent.kids and isinstance(group, Group) and group.edge == parent.place and parent.chunk is not None:
            self.requeue(group)

    def close(self, path: Path) -> None:
        """The request of `path` has ended: its blocks become groups, and what it used is learnt from."""
        path.closed = True
        self.paths.pop(path, None)
        if not path.goes_on:
            self.now += 1
            self._requests += 1
            if self._requests >= _REMEMBERED_REQUESTS:
                self._requests //= 2
                self._fresh //= 2
        self._learn(path)
        nodes = path.nodes
        if None in nodes:
            self._close_gaps(path)
        groups = []
        for start, stop, kind, uses in stretches(path):
            group_class = self.model.of(path_features(path, kind, uses))
            groups.append(self._make_group(path.nodes[start:stop], group_class, uses, path.turns))
        for group in reversed(groups):
            self.begin(group)
        path.groups = groups
        path.nodes = []
        self.guard.settle(*path.unsettled(), compare=path.context is not None)
        self.guard.trim()
        if not self.guard.lru_leads:
            self.queue.by_rank = None
        self._grow_older()
        for group_class in self.model.renew(_RENEWED_PER_REQUEST):
            self.queue.revalue(group_class)
        self.drop_ghosts()

    def _learn(self, path: Path) -> None:
        model = self.model
        for group, taken in path.taken.items():
            model.used(group.group_class, group.bin, min(1.0, taken / group.size))
            if group.count:
                self.queue.take(group)
                group.group_class = model.of(leftover_features(group))
                group.size = group.count
                model.entered(group.group_class, group.bin)
                self.requeue(group)

    def _close_gaps(self, path: Path) -> None:
        """Take out of `path` what other requests have taken over since."""
        runs = path.runs
        nodes: list[Node | None] = []
        moved: list[tuple[int, int]] = []
        for index, (place, uses) in enumerate(runs):
            stop = runs[index + 1][0] if index + 1 < len(runs) else len(path.nodes)
            kept = [node for node in path.nodes[place:stop] if node is not None]
            if kept:
                moved.append((len(nodes), uses))
                nodes += kept
        path.nodes, path.runs = nodes, moved

    def _make_group(self, nodes: list[Node | None], group_class: GroupClass, uses: int, turns: int) -> Group:
        group = Group(nodes, group_class, uses, self.now, 0, turns)
        edge = -1
        for place, node in enumerate(nodes):
            assert node is not None
            node.group = group
            node.place = place
            if node.chunk is not None:
                edge = place
        group.edge = edge
        return group

    def begin(self, group: Group, *, counts: bool = True) -> None:
        """`group` is the one used last from now on; `counts`: and the model does not know of it yet."""
        group.rank = self._rank = self._rank + 1
        group.bin = bin_of(self.now - group.since)
        self.groups[group] = None
        self._ages[group.bin][group] = None
        if counts:
            self.model.entered(group.group_class, group.bin)
        self.guard.used(group)
        self.requeue(group)

    def requeue(self, group: Group) -> None:
        """Let `group` be evicted if and only if it may be."""
        if group.is_evictable:
            if group.cell is None:
                self.queue.add(group)
        elif group.cell is not None:
            self.queue.take(group)

    def _grow_older(self) -> None:
        for index in range(NUM_BINS - 2, -1, -1):
            young = self._ages[index]
            latest = self.now - BOUNDS[index]
            while young:
                group = next(iter(young))
                if group.since > latest:
                    break
                del young[group]
                self._ages[index + 1][group] = None
                self.model.entered(group.group_class, index + 1)
                waits = group.cell is not None
                if waits:
                    self.queue.take(group)
                group.bin = index + 1
                if waits:
                    self.queue.add(group)

    def reorder(self, path: Path, nodes: list[Node]) -> None:
        """The blocks of `path` turn out to follow each other as in `nodes`."""
        uses = {}
        for index, (place, count) in enumerate(path.runs):
            stop = path.runs[index + 1][0] if index + 1 < len(path.runs) else len(path.nodes)
            uses.update(dict.fromkeys(path.nodes[place:stop], count))
        path.nodes, path.runs = list(nodes), []
        previous: Node | None = None
        for place, node in enumerate(nodes):
            node.place = place
            if not path.runs or path.runs[-1][1] != uses[node]:
                path.runs.append((place, uses[node]))
            if previous is not None and node.parent is not previous:
                self._set_parent(node, previous)
            previous = node

    # Residents and ghosts

    def arrive(self, node: Node, chunk: ChunkStatus) -> None:
        """The block of `node` has become resident."""
        if node.chunk is None:
            self.num_residents += 1
            if node.parent is not None:
                parent = node.parent
                parent.kids += 1
                if isinstance(parent.group, Group) and parent.group.edge == parent.place:
                    self.requeue(parent.group)
        node.chunk = chunk
        group = node.group
        if isinstance(group, Group):
            group.edge = max(group.edge, node.place)
            self.requeue(group)

    def depart(self, node: Node) -> None:
        """The block of `node` is no longer resident; the node stays, as a ghost."""
        node.chunk = None
        self.num_residents -= 1
        group = node.group
        if isinstance(group, Group) and group.edge == node.place:
            group.find_edge(node.place - 1)
            self.requeue(group)
        if node.parent is not None:
            self._lose_kid(node.parent)

    def come_back(self, node: Node, chunk: ChunkStatus) -> None:
        """Undo the latest `depart` that was not undone yet: all is as it was before, orders included."""
        node.chunk = chunk
        self.num_residents += 1
        parent, group = node.parent, node.group
        if parent is not None:
            parent.kids += 1
            if isinstance(parent.group, Group) and parent.group.edge == parent.place:
                self.requeue(parent.group)
        if isinstance(group, Group):
            if group.edge < node.place:
                group.edge = node.place
            self.queue.take(group)
            if group.is_evictable:
                self.queue.add(group, first=True)

    def forget(self, node: Node) -> None:
        """Drop a block, without a ghost."""
        if node.chunk is not None:
            self.depart(node)
        group = node.group
        if isinstance(group, Path):
            group.nodes[node.place] = None
        else:
            self._detach(node, group)
        del self.nodes[node.key]
        node.parent = None

    def drop_ghosts(self) -> None:
        """Forget the ghosts that were used longest ago, as many as are over the bound."""
        over = len(self.nodes) - self.num_residents - self.max_ghosts
        if over <= 0:
            return
        for _ in range(len(self.groups)):
            group = next(iter(self.groups))
            over -= self._drop_ghosts_of(group, over)
            if over <= 0:
                return
            if group.count:
                self.groups.move_to_end(group)
        if self.paths:  # the rest is in running requests
            self.close(next(iter(self.paths)))

    def _drop_ghosts_of(self, group: Group, most: int) -> int:
        """Forget ghosts of `group`, the deepest first; how many."""
        dropped = 0
        nodes = group.nodes
        for place in range(len(nodes) - 1, group.top - 1, -1):
            node = nodes[place]
            if node is not None:
                if node.chunk is not None or dropped >= most:
                    break
                self.forget(node)
                dropped += 1
            if group.count:
                nodes.pop()
        group.shadow = min(group.shadow, len(nodes))
        return dropped

    # All of them

    def last_resort(self) -> Iterator[Node]:
        """Resident blocks where no group may lose one: of running requests, the deepest first, then all others, those
        used longest ago first. The caller may make what it gets depart.
        """
        for path in self.paths:
            for node in reversed(path.nodes):
                if node is not None and node.chunk is not None and not node.kids:
                    yield node
        yield from [node for group in sorted(self.groups, key=_rank_of) for node in group.residents()]
        for path in self.paths:
            yield from [node for node in reversed(path.nodes) if node is not None]

    def residents(self) -> Iterator[Node]:
        """All resident blocks, least worthy first; those of running requests last."""
        order = _rank_of if self.guard.lru_leads else _worth_of
        for group in sorted(self.groups, key=order):
            yield from group.residents()
        for path in self.paths:
            for node in reversed(path.nodes):
                if node is not None and node.chunk is not None:
                    yield node


def _rank_of(group: Group) -> float:
    return group.rank


def _worth_of(group: Group) -> float:
    return group.group_class.worths[group.bin]
