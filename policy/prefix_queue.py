"""Which group loses a block next: groups in cells of one class and one age, cells by worth."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush

from omlxd.policy.prefix_groups import Group
from omlxd.policy.prefix_model import NUM_BINS, GroupClass

_SLACK = 256  # stale entries of the heap that are never worth a rebuild


class Cell:
    """Evictable groups of one class in one bin of age, in the order in which they came there."""

    __slots__ = ("bin", "group_class", "groups", "worth")

    def __init__(self, group_class: GroupClass, index: int) -> None:
        self.group_class = group_class
        self.bin = index
        self.groups: OrderedDict[Group, None] = OrderedDict()
        self.worth = group_class.worths[index]


class WorthQueue:
    """Evictable groups, the least worthy first; of equal worth the one that came first.

    All groups of a cell have one worth, so learning moves cells and never groups. The heap holds (worth, -bin,
    number of the class, cell); an entry whose worth is no longer the cell's is stale.
    """

    def __init__(self) -> None:
        self._cells: dict[GroupClass, list[Cell | None]] = {}
        self._heap: list[tuple[float, int, int, Cell]] = []
        self._live = 0
        self.by_rank: list[tuple[int, Group]] | None = None
        """Also in the order of use, while somebody wants that: a heap of (rank, group), stale entries included."""

    def add(self, group: Group, *, first: bool = False) -> None:
        """Let `group` be evicted; `first`: before all others of its cell."""
        cells = self._cells.get(group.group_class)
        if cells is None:
            cells = self._cells[group.group_class] = [None] * NUM_BINS
        cell = cells[group.bin]
        if cell is None:
            cell = cells[group.bin] = Cell(group.group_class, group.bin)
        if not cell.groups:
            self._live += 1
            cell.worth = group.group_class.worths[group.bin]
            self._push(cell)  # once too often where its last entry is still there; both then say the same
        cell.groups[group] = None
        if first:
            cell.groups.move_to_end(group, last=False)
        group.cell = cell
        if self.by_rank is not None:
            heappush(self.by_rank, (group.rank, group))

    def take(self, group: Group) -> None:
        """Keep `group` from being evicted."""
        cell = group.cell
        if cell is not None:
            assert isinstance(cell, Cell)
            del cell.groups[group]
            group.cell = None
            if not cell.groups:
                self._live -= 1

    def least(self) -> tuple[float, Group] | None:
        """Worth and group of what should lose a block first."""
        heap = self._heap
        while heap:
            worth, _, _, cell = heap[0]
            if cell.worth == worth and cell.groups:
                return worth, next(iter(cell.groups))
            heappop(heap)
        return None

    def oldest(self) -> tuple[float, Group] | None:
        """As `least`, in the order of use."""
        if self.by_rank is None:
            self.by_rank = [
                (group.rank, group) for cells in self._cells.values() for cell in cells if cell for group in cell.groups
            ]
            heapify(self.by_rank)
        heap = self.by_rank
        while heap:
            _, group = heap[0]
            if group.cell is not None:
                return 0.0, group
            heappop(heap)
        return None

    def revalue(self, group_class: GroupClass) -> None:
        """The class's worths have changed."""
        cells = self._cells.get(group_class)
        if cells is None:
            return
        for cell in cells:
            if cell is not None and cell.groups and cell.worth != group_class.worths[cell.bin]:
                cell.worth = group_class.worths[cell.bin]
                self._push(cell)

    def _push(self, cell: Cell) -> None:
        if len(self._heap) > 4 * self._live + _SLACK:
            self._heap = [
                _entry(other)
                for cells in self._cells.values()
                for other in cells
                if other is not None and other.groups and other is not cell
            ]
            heapify(self._heap)
        heappush(self._heap, _entry(cell))


def _entry(cell: Cell) -> tuple[float, int, int, Cell]:
    return cell.worth, -cell.bin, cell.group_class.number, cell
