"""What must hold of the prefix policy's memory at any time."""

from __future__ import annotations

from omlxd.policy.prefix_groups import Group, Path
from omlxd.policy.prefix_history import History
from omlxd.policy.prefix_queue import Cell


def check_history(history: History) -> None:
    residents = [node for node in history.nodes.values() if node.chunk is not None]
    assert history.num_residents == len(residents)
    kids: dict[int, int] = {}
    for node in residents:
        if node.parent is not None:
            kids[id(node.parent)] = kids.get(id(node.parent), 0) + 1
    for key, node in history.nodes.items():
        assert node.key == key
        assert node.group.nodes[node.place] is node
        assert node.kids == kids.get(id(node), 0)
        assert node.group in (history.groups if isinstance(node.group, Group) else history.paths)
    for group in history.groups:
        _check_group(history, group)
    assert sum(len(ages) for ages in history._ages) == len(history.groups)
    assert history.guard._kept == sum(
        node is not None and place < group.shadow for group in history.groups for place, node in enumerate(group.nodes)
    )
    in_paths = sum(node is not None for path in history.paths for node in path.nodes)
    assert len(history.nodes) - history.num_residents <= history.max_ghosts + in_paths


def _check_group(history: History, group: Group) -> None:
    places = [place for place, node in enumerate(group.nodes) if node is not None]
    assert group.count == len(places) > 0
    assert group.top <= places[0]
    assert not isinstance(group, Path)
    edges = [place for place in places if (node := group.nodes[place]) is not None and node.chunk is not None]
    assert group.edge == max(edges, default=-1)
    assert group.shadow <= len(group.nodes)
    assert group in history._ages[group.bin]
    assert (group.cell is not None) == group.is_evictable
    if group.cell is not None:
        assert isinstance(group.cell, Cell)
        assert group in group.cell.groups
        assert group.cell.bin == group.bin
        assert group.cell.group_class is group.group_class
