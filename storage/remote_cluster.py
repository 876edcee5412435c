"""Which server has which names: one server has all, the nodes of a cluster share 16,384 slots.

Names carry one of 256 tags in braces, and a tag is on one slot: so a block's header and pieces are on one node, and the
headers of a whole prefix are one round trip to each node. Loop thread only, but for ``read_slots``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from omlxd.storage.remote_breaker import Breaker
from omlxd.storage.remote_server import Patience, Server
from omlxd.storage.remote_url import Address, Target
from omlxd.storage.tier import Trouble

TAGS = 256


@dataclass(slots=True, eq=False)
class Node:
    """A server and how it is."""

    server: Server
    breaker: Breaker
    write_state: str = "ok"
    """``ok``, ``read-only``, ``full`` or ``refused``: reading may go on where writing does not."""
    write_reason: str = ""
    write_again: float = 0.0
    """When a write may be tried again, on the tier's clock."""
    heard: float = 0.0
    """When it last answered, on the tier's clock."""
    asking: int = 0
    """Workers that wait for its answer."""

    def writable(self, now: float) -> bool:
        """May a write be tried?"""
        return self.breaker.closed and (self.write_state == "ok" or now >= self.write_again)


@dataclass(slots=True)
class Cluster:
    """The nodes, and which of them has a tag."""

    target: Target
    patience: Patience
    ca_file: str
    clock: Callable[[], float]
    nodes: dict[Address, Node] = field(default_factory=dict)
    stale: bool = False
    """Has a node told that the map is not true any more?"""
    _of_tag: list[Address | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._of_tag = [None if self.target.cluster else self.target.address] * TAGS
        self.stale = self.target.cluster
        self._add(self.target.address)

    def node_of(self, tag: int) -> Node | None:
        """The node that has the names of a tag; None while that is not known."""
        address = self._of_tag[tag]
        return self.nodes.get(address) if address is not None else None

    def adopt(self, slots: Iterable[tuple[int, int, Address]]) -> bool:
        """Take over what a node said of the slots; is it another map than before?"""
        tags = slots_of_tags()
        of_tag: list[Address | None] = [None] * TAGS
        for first, last, address in slots:
            for tag, slot in enumerate(tags):
                if first <= slot <= last:
                    of_tag[tag] = address
        changed = of_tag != self._of_tag
        self._of_tag = of_tag
        wanted = {address for address in of_tag if address is not None}
        for address in wanted:
            self._add(address)
        for address in [one for one in self.nodes if one not in wanted and wanted]:
            self.nodes.pop(address).server.close()
        self.stale = None in of_tag
        return changed

    def well(self) -> list[Node]:
        """Nodes that answer."""
        return [node for node in self.nodes.values() if node.breaker.closed]

    def close(self) -> None:
        """End all connections."""
        for node in self.nodes.values():
            node.server.close()

    def to_ask_for_slots(self) -> list[Server]:
        """Whom to ask for the map, the likeliest first; the address of the configuration last."""
        servers = [node.server for node in sorted(self.nodes.values(), key=lambda node: not node.breaker.closed)]
        if self.target.address not in self.nodes:
            servers.append(Server(self.target, self.target.address, self.patience, self.ca_file))
        return servers

    def _add(self, address: Address) -> None:
        if address not in self.nodes:
            server = Server(self.target, address, self.patience, self.ca_file)
            self.nodes[address] = Node(server, Breaker(self.clock))


def read_slots(servers: Sequence[Server]) -> list[tuple[int, int, Address]]:
    """Worker. The map, from the first that tells it. ``Trouble`` of the last when none does."""
    trouble: Trouble | None = None
    for server in servers:
        try:
            return server.slots()
        except Trouble as error:
            trouble = error
    raise trouble or Trouble("gone", "no node of the cluster is known")


def slots_of_tags() -> Sequence[int]:
    """The slot of each tag."""
    from valkey.crc import key_slot

    return [key_slot(b"omlxd:{%02x}:" % tag) for tag in range(TAGS)]


def by_tag(names: Mapping[bytes, int]) -> list[list[bytes]]:
    """Names grouped by their tags."""
    groups: dict[int, list[bytes]] = {}
    for name, tag in names.items():
        groups.setdefault(tag, []).append(name)
    return list(groups.values())
