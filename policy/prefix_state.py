"""What the prefix policy takes over a restart: groups of residents and all that was learnt, but no ghosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

from omlxd.policy.base import ChunkStatus, state_keys
from omlxd.policy.prefix_groups import Group, Node
from omlxd.policy.prefix_guard import NUM_SAVED
from omlxd.policy.prefix_history import History
from omlxd.policy.prefix_model import SurvivalModel, is_features

_DISCARD = "discard the state to start without it"


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A group's residents, heads first, and what is known of it."""

    features: tuple[int, ...]
    uses: int
    turns: int
    since: int
    parent: bytes | None
    """Key of the block before the first one."""
    keys: list[bytes]


@dataclass(frozen=True, slots=True)
class PrefixState:
    """All that is saved."""

    order: list[bytes]
    now: int
    groups: list[SavedGroup]
    """In the order of use."""
    model: SurvivalModel
    guard: tuple[float, ...]

    @classmethod
    def of(cls, history: History) -> PrefixState:
        """What there is to save of `history`."""
        groups = []
        for group in sorted(history.groups, key=lambda group: group.rank):
            nodes = list(group.residents())[::-1]
            if nodes:
                before = nodes[0].parent
                parent = before.key if before is not None else None
                keys = [node.key for node in nodes]
                groups.append(
                    SavedGroup(group.group_class.features, group.uses, group.turns, group.since, parent, keys)
                )
        order = [node.key for node in history.residents()]
        return cls(order, history.now, groups, history.model, history.guard.state())

    def pack(self) -> dict[str, object]:
        """As msgpack can pack it."""
        groups = [[list(g.features), g.uses, g.turns, g.since, g.parent, g.keys] for g in self.groups]
        return {
            "order": self.order,
            "now": self.now,
            "groups": groups,
            "model": self.model.state(),
            "guard": list(self.guard),
        }

    @classmethod
    def unpack(cls, state: Mapping[str, object]) -> PrefixState | None:
        """The reverse; None for another policy's state; ValueError where it has another shape."""
        order = state_keys(state, "order")
        if "model" not in state:
            return None
        groups = state.get("groups")
        guard = state.get("guard")
        now = state.get("now")
        if not isinstance(groups, list | tuple) or not isinstance(now, int):
            raise ValueError(f"policy state: 'groups' must be a list and 'now' a number; {_DISCARD}")
        if (
            not isinstance(guard, list | tuple)
            or len(guard) != NUM_SAVED
            or not all(isinstance(n, int | float) and isfinite(n) for n in guard)
        ):
            raise ValueError(f"policy state: 'guard' must be {NUM_SAVED} finite numbers; {_DISCARD}")
        saved = [_unpack_group(item, now) for item in groups]
        if any(later.since < earlier.since for earlier, later in pairwise(saved)):
            raise ValueError(f"policy state: 'groups' must be in the order of use; {_DISCARD}")
        return cls(order, now, saved, SurvivalModel.from_state(state["model"]), tuple(guard))

    def rebuild(self, capacity: int, residents: Mapping[bytes, ChunkStatus]) -> History:
        """A history with those of `residents` that the groups name."""
        history = History(capacity, self.model)
        history.now = self.now
        history.guard.restore(*self.guard)
        for saved in self.groups:
            keys = [key for key in dict.fromkeys(saved.keys) if key in residents and key not in history.nodes]
            if not keys:
                continue
            group = Group([], history.model.of(saved.features), saved.uses, saved.since, 0, saved.turns)
            previous: Node | None = None
            for place, key in enumerate(keys):
                history.nodes[key] = node = Node(key, group, place)
                node.parent = previous
                group.nodes.append(node)
                previous = node
            group.count = group.size = len(keys)
            history.begin(group, counts=False)
        self._link(history)
        for node in history.nodes.values():
            history.arrive(node, residents[node.key])
        return history

    def _link(self, history: History) -> None:
        """Give the groups' first blocks their parents."""
        for saved in self.groups:
            first = next((history.nodes[key] for key in saved.keys if key in history.nodes), None)
            if first is not None and first.parent is None and saved.parent is not None:
                first.parent = history.nodes.get(saved.parent)


def _unpack_group(item: object, now: int) -> SavedGroup:
    if isinstance(item, list | tuple) and len(item) == 6:
        features, uses, turns, since, parent, keys = item
        if (
            isinstance(uses, int)
            and isinstance(turns, int)
            and isinstance(since, int)
            and since <= now
            and (parent is None or isinstance(parent, bytes))
            and is_features(features)
        ):
            return SavedGroup(tuple(features), uses, turns, since, parent, state_keys({"keys": keys}, "keys"))
    raise ValueError(f"policy state: {item!r} is no group; {_DISCARD}")
