"""The chains that a client is in the middle of storing: it sends each key once, however many requests that takes.

A request to reserve slots names the whole chain, since a block is nothing without what comes before it. A client that
stores a long one in several requests gives it a number, and later sends only the keys that it has not sent under that number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omlxd.fields import MAX_KEYS
from omlxd.protocol import Code, RequestError


@dataclass(slots=True)
class Chain:
    """The keys of a chain as far as they are known, from its head on."""

    keys: list[bytes] = field(default_factory=list)
    _known: set[bytes] = field(default_factory=set)

    def extend(self, keys: list[bytes]) -> None:
        """Take what comes behind. RequestError, and nothing changed: a key twice, or too many."""
        new = set(keys)
        if len(new) < len(keys) or not self._known.isdisjoint(new):
            raise RequestError(Code.BAD_REQUEST, "keys holds a key twice; a chain has no loops")
        if len(self.keys) + len(keys) > MAX_KEYS:
            raise RequestError(Code.TOO_MANY, f"a chain of {len(self.keys) + len(keys)} keys; at most {MAX_KEYS}")
        self.keys += keys
        self._known |= new


class Chains:
    """Those of one connection, by the client's numbers: at most ``MAX_KEYS`` keys in all, the oldest chains go."""

    def __init__(self) -> None:
        self._chains: dict[int, Chain] = {}

    def __len__(self) -> int:
        return len(self._chains)

    def take(self, number: int, known: int) -> Chain:
        """The chain ``number``, of which ``known`` keys were sent; it is not remembered any more.

        RequestError (``not_found``): it is not known to that extent. The client sends all of its keys then.
        """
        chain = self._chains.pop(number, None)
        if chain is None or len(chain.keys) != known:
            raise RequestError(Code.NOT_FOUND, f"chain {number} is not known with {known} keys: send all of them")
        return chain

    def keep(self, number: int, chain: Chain) -> None:
        """More of it will come. One without keys is as one that is not known."""
        if chain.keys:
            self._chains[number] = chain
        while sum(len(one.keys) for one in self._chains.values()) > MAX_KEYS:
            del self._chains[next(iter(self._chains))]
