"""A recording: what the daemon tells while it serves (`record`), as lines of a trace.

Blocks, namespaces and sessions are numbered in the order of their appearance: the file has no hash, no name, no token.
What is written when:

- a load is a request for its blocks of which the engine kept those that it got; the blocks behind were computed, and
  are kept when they are stored;
- a store asks for nothing and keeps what it offers; a use of the engine's own copy keeps nothing;
- a lookup becomes part of the load of the same chain that follows it on its connection; one that none follows, and that
  missed something, is a request that keeps nothing.

So a replay with the same policy and sizes makes the daemon's own hits, and one with others stores what an engine would have
stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omlxd.lab.traces import run_lengths
from omlxd.storage.blocks import KEY_BYTES

MAX_BLOCKS = 1 << 21
"""Different blocks of one recording, some 400 MB of the recorder's memory."""
LOOKUP_SECONDS = 2.0
"""How long a lookup waits for its load."""

Event = Mapping[str, Any]


class TooManyBlocks(Exception):
    """The recording has as many different blocks as one may."""


@dataclass(slots=True)
class _Space:
    number: int
    block_tokens: int
    told_bytes: int | None = None
    """What the file says of a block's bytes."""
    nbytes: int = 0
    blocks: int = 0
    prefill_tokens_per_s: float | None = None
    told_speed: float | None = None

    @property
    def block_bytes(self) -> int | None:
        return self.nbytes // self.blocks if self.blocks else None


@dataclass(slots=True)
class _Chain:
    """The chain that a connection named last in a namespace."""

    keys: bytes = b""
    ids: list[int] = field(default_factory=list)


class Scribe:
    """Turns events into lines, each with its newline."""

    def __init__(self, header: Mapping[str, object]) -> None:
        """``header``: what the first line says beside what it must."""
        self.requests = 0
        """Those that ask for something."""
        self.lost = 0
        self._header: Mapping[str, object] | None = header
        self._blocks: dict[bytes, int] = {}
        self._spaces: dict[bytes, _Space] = {}
        self._sessions: dict[int, int] = {}
        self._chains: dict[tuple[int, bytes], _Chain] = {}
        self._lookups: dict[tuple[int, bytes], Event] = {}
        self._begin: float | None = None
        self._last = 0.0

    @property
    def blocks(self) -> int:
        """Different blocks so far."""
        return len(self._blocks)

    @property
    def seconds(self) -> float:
        """From the first event to the last."""
        return self._last - self._begin if self._begin is not None else 0.0

    def lines(self, events: Iterable[Event], lost: int = 0) -> Iterator[str]:
        """What these events make. TooManyBlocks."""
        self.lost += lost
        for event in events:
            if self._begin is None:
                self._begin = event["at"]
            self._last = max(self._last, event["at"])
            yield from self._describe(event)
            yield from self._overdue(event["at"])
            yield from self._note(event)

    def end(self, why: str) -> Iterator[str]:
        """The last lines."""
        if self._begin is None:
            return
        for lookup in list(self._lookups.values()):
            yield from self._unloaded(lookup)
        self._lookups.clear()
        yield from (self._space_line(space) for space in self._spaces.values())
        told = {"requests": self.requests, "blocks": self.blocks, "seconds": round(self.seconds, 3), "lost": self.lost}
        yield _line({"end": {**told, "why": why}})

    def _note(self, event: Event) -> Iterator[str]:
        of = (event["session"], event["namespace"])
        before = self._lookups.pop(of, None)
        kind = event["event"]
        if before is not None and not (kind == "load" and before["keys"].startswith(event["keys"])):
            yield from self._unloaded(before)
            before = None
        if kind == "lookup":
            self._lookups[of] = event
        elif kind == "load":
            asked = before or event
            yield self._request(event, asked["keys"], asks=True, kept=(0, event["blocks"]))
        elif kind == "store":
            count = len(event["keys"]) // KEY_BYTES
            yield self._request(event, event["keys"], asks=False, kept=(event["first"], count))
        elif kind == "touch":
            yield self._request(event, event["keys"], asks=False, kept=(0, 0))

    def _overdue(self, now: float) -> Iterator[str]:
        for of, lookup in list(self._lookups.items()):
            if now - lookup["at"] > LOOKUP_SECONDS:
                del self._lookups[of]
                yield from self._unloaded(lookup)

    def _unloaded(self, lookup: Event) -> Iterator[str]:
        """A lookup that no load followed: if it found all, the engine did not want it."""
        if lookup["found"] < len(lookup["keys"]) // KEY_BYTES:
            yield self._request(lookup, lookup["keys"], asks=True, kept=(0, 0))

    def _request(self, event: Event, keys: bytes, *, asks: bool, kept: tuple[int, int]) -> str:
        space = self._spaces[event["namespace"]]
        ids = self._ids((event["session"], event["namespace"]), keys)
        session = self._sessions.setdefault(event["session"], len(self._sessions))
        t_ms = round(1000 * (event["at"] - (self._begin or 0.0)))
        self.requests += asks
        request: list[object] = [t_ms, session, len(ids) * space.block_tokens if asks else 0, 0, run_lengths(ids)]
        more: dict[str, object] = {}
        if space.number:
            more["space"] = space.number
        if kept != (0, len(ids)):
            more["kept"] = kept
        return _line([*request, more] if more else request)

    def _ids(self, of: tuple[int, bytes], keys: bytes) -> Sequence[int]:
        """The blocks' numbers. A connection mostly names a chain that begins as its last one did."""
        last = self._chains.setdefault(of, _Chain())
        if last.keys.startswith(keys):
            return last.ids[: len(keys) // KEY_BYTES]
        known = len(last.ids) if keys.startswith(last.keys) else 0
        ids = last.ids[:known]
        for at in range(known * KEY_BYTES, len(keys), KEY_BYTES):
            ids.append(self._blocks.setdefault(keys[at : at + KEY_BYTES], len(self._blocks)))
        if len(self._blocks) > MAX_BLOCKS:
            raise TooManyBlocks
        last.keys, last.ids = keys, ids
        return ids

    def _describe(self, event: Event) -> Iterator[str]:
        """The header before all else; a namespace when something new is known of it."""
        if self._header is not None:
            head = {"kvtrace": 1, "kind": "recording", "block_tokens": event["block_tokens"], **self._header}
            self._header = None
            yield _line(head)
        space = self._spaces.get(event["namespace"])
        new = space is None
        if space is None:
            space = self._spaces[event["namespace"]] = _Space(len(self._spaces), event["block_tokens"])
        size = event.get("block_bytes")
        if size is not None:
            blocks = event["blocks"] if event["event"] == "load" else len(event["keys"]) // KEY_BYTES - event["first"]
            space.nbytes += size * blocks
            space.blocks += blocks
        space.prefill_tokens_per_s = event.get("prefill_tokens_per_s") or space.prefill_tokens_per_s
        tells_bytes = space.told_bytes is None and space.block_bytes is not None
        if new or tells_bytes or (space.told_speed is None and space.prefill_tokens_per_s is not None):
            yield self._space_line(space)

    def _space_line(self, space: _Space) -> str:
        space.told_bytes, space.told_speed = space.block_bytes, space.prefill_tokens_per_s
        line: dict[str, object] = {"space": space.number, "block_tokens": space.block_tokens}
        if space.told_bytes is not None:
            line["block_bytes"] = space.told_bytes
        if space.told_speed is not None:
            line["prefill_tokens_per_s"] = space.told_speed
        return _line(line)


def _line(value: object) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"
