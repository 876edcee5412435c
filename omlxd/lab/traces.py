"""Recorded workloads: which blocks requests asked for, in order.

Three formats, told apart by their first line, gzip'd or not:

- **kvtrace**: a header object with `kvtrace`, `name` and `block_tokens`, then one list per request:
  `[t_ms, session, input_tokens, output_tokens, [start, length, start, length, ...]]`, the last item a run-length
  code of the chain's block ids, head to tail;
- **recordings** (`omlxd record`): a kvtrace whose header has `"kind": "recording"`. A request may have a sixth item, an
  object with `space` (the number of its namespace) and `kept` (`[first, stop]`: which of its blocks are stored where
  they are missing; without it all). Object lines among the requests describe namespaces (`space`, `block_tokens`,
  `block_bytes`, `prefill_tokens_per_s`; the last word on each counts) and the end (`end`). Its last line may be cut off;
- **Mooncake** (Qin et al., FAST 2025): one object per request with `timestamp`, `input_length`, `output_length` and
  `hash_ids`; a block has 512 tokens.

An id names a whole prefix, so it always has the same parent. That is not checked: what violates it only makes
prefixes that do not exist.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedReader, TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import TextIO, TypeGuard

from omlxd.storage.blocks import HASH_BYTES, block_key

MOONCAKE_BLOCK_TOKENS = 512
MAX_REQUEST_BLOCKS = 1 << 20
MAX_BLOCKS = 1 << 27
"""Blocks of one request, and of all requests: a file of a few bytes must not fill the memory."""
_GZIP_MAGIC = b"\x1f\x8b"


class TraceError(ValueError):
    """A file is no trace; says where and why."""


@dataclass(frozen=True, slots=True)
class Space:
    """What is known of one namespace's blocks."""

    block_tokens: int
    block_bytes: int | None = None
    """Mean payload bytes of a block."""
    prefill_tokens_per_s: float | None = None
    """How fast the engine said that it computes."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it came, how many tokens its prompt had, and the blocks of it, heads first.

    One without a prompt (`input_tokens` 0) asks for nothing: it stores, or says that it used its own copy.
    """

    t_ms: int
    session: int
    input_tokens: int
    output_tokens: int
    blocks: list[int]
    space: int = 0
    first: int = 0
    stop: int | None = None
    """`blocks[first:stop]` are stored where they are missing; None: to the last one."""

    @property
    def end(self) -> int:
        """`stop` as a number of blocks."""
        return len(self.blocks) if self.stop is None else self.stop

    def asked(self, block_tokens: int) -> int:
        """How many leading blocks the prompt itself asks for; those behind them are only stored."""
        return min(len(self.blocks), -(-self.input_tokens // block_tokens))


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    block_tokens: int
    requests: list[Request]
    spaces: Mapping[int, Space] = field(default_factory=dict)
    """Namespaces by number, where the trace has several or says more of them."""
    header: Mapping[str, object] = field(default_factory=dict)
    """The first line, where it is a header."""
    end: Mapping[str, object] | None = None
    """What a recording says at its end; None where it has none: it was cut off, or is no recording."""
    cut: bool = False
    """Was the last line of a recording left out, because it is not whole?"""

    @property
    def recorded(self) -> bool:
        """Is it what a daemon did, rather than what engines wanted?"""
        return self.header.get("kind") == "recording"

    @property
    def distinct_blocks(self) -> int:
        """How many different blocks were asked for: 100 % of the sizes in percent."""
        return len(set(chain.from_iterable(request.blocks for request in self.requests)))

    @property
    def references(self) -> int:
        """Blocks of all requests, each as often as it is named."""
        return sum(len(request.blocks) for request in self.requests)

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.input_tokens for request in self.requests)

    @property
    def seconds(self) -> float:
        """From the first request to the last."""
        times = [request.t_ms for request in self.requests]
        return (max(times) - min(times)) / 1000 if times else 0.0

    @property
    def block_bytes(self) -> int | None:
        """Mean payload bytes of the distinct blocks, as far as the trace says; None where it does not."""
        owner = {block: request.space for request in self.requests for block in request.blocks}
        known = [
            (blocks, size)
            for space, blocks in Counter(owner.values()).items()
            if (size := self.space(space).block_bytes) is not None
        ]
        blocks = sum(blocks for blocks, _ in known)
        return sum(blocks * size for blocks, size in known) // blocks if blocks else None

    def weights(self) -> dict[bytes, int] | None:
        """Bytes of each key, where namespaces have blocks of different sizes; None where all blocks count the same."""
        sizes = {number: self.space(number).block_bytes for number in {request.space for request in self.requests}}
        known = {size for size in sizes.values() if size is not None}
        if len(known) < 2:
            return None
        mean = self.block_bytes or 1
        return {key_of(block): sizes[request.space] or mean for request in self.requests for block in request.blocks}

    def space(self, number: int) -> Space:
        """What is known of a namespace."""
        return self.spaces.get(number) or Space(self.block_tokens)

    def keys(self) -> list[list[bytes]]:
        """The blocks of each request as keys, as a tier knows them."""
        names: dict[int, bytes] = {}
        for block in chain.from_iterable(request.blocks for request in self.requests):
            if block not in names:
                names[block] = key_of(block)
        return [[names[block] for block in request.blocks] for request in self.requests]


def key_of(block: int) -> bytes:
    """The key that stands for a block of a trace."""
    return block_key(block.to_bytes(HASH_BYTES, "big"))


def read_trace(path: Path) -> Trace:
    """Read a whole trace. TraceError names the line that is wrong; OSError where the file cannot be read."""
    with path.open("rb") as raw, _text(raw) as lines:
        try:
            return parse_trace(lines, path.name.removesuffix(".gz").removesuffix(".jsonl"))
        except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError) as error:
            raise TraceError(f"{path}: not a whole text or gzip file ({error}); fetch it again") from error
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from None


def _text(raw: BufferedReader) -> TextIO:
    """Its lines, unzipped where it is gzip'd. Read once, so that it may be a pipe."""
    if raw.peek(2)[:2] == _GZIP_MAGIC:
        return TextIOWrapper(gzip.GzipFile(fileobj=raw), encoding="utf-8")
    return TextIOWrapper(raw, encoding="utf-8")


def parse_trace(lines: Iterable[str], name: str) -> Trace:
    """The trace in `lines`; `name` is used where it does not say its own."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        raise TraceError("the file is empty; a trace has at least one request")
    head = _json(*first)
    if not isinstance(head, dict):
        raise TraceError("line 1: neither the header of a trace nor a request in Mooncake's format")
    reader = _Reader()
    if "hash_ids" in head:
        requests = [reader.mooncake(number, _json(number, line)) for number, line in chain((first,), numbered)]
        return Trace(name, MOONCAKE_BLOCK_TOKENS, requests)
    block_tokens = head.get("block_tokens")
    if head.get("kvtrace") != 1 or not _is_count(block_tokens):
        raise TraceError('line 1: no header {"kvtrace": 1, "block_tokens": N, ...} and no Mooncake request')
    reader.recording = head.get("kind") == "recording"
    requests = list(reader.requests(numbered))
    if not requests:
        raise TraceError("there is a header and no request behind it; a trace has at least one")
    return Trace(str(head.get("name", name)), block_tokens, requests, reader.spaces, head, reader.end, reader.cut)


def run_lengths(blocks: Iterable[int]) -> list[int]:
    """[start, length, start, length, ...] for block ids."""
    runs: list[int] = []
    for block in blocks:
        if runs and runs[-2] + runs[-1] == block:
            runs[-1] += 1
        else:
            runs += (block, 1)
    return runs


class _Reader:
    """Lines to requests; what it has met on the way."""

    def __init__(self) -> None:
        self.recording = False
        self.spaces: dict[int, Space] = {}
        self.end: Mapping[str, object] | None = None
        self.cut = False
        self._blocks = 0

    def requests(self, numbered: Iterator[tuple[int, str]]) -> Iterator[Request]:
        for number, line in numbered:
            whole = line.endswith("\n")
            try:
                item = _json(number, line)
            except TraceError:
                if self.recording and not whole:
                    self.cut = True
                    return
                raise
            if not self.recording:
                yield self._request(number, item)
            elif isinstance(item, dict):
                self._told(number, item)
            else:
                yield self._request(number, item)

    def mooncake(self, number: int, item: object) -> Request:
        if not isinstance(item, dict) or not isinstance(item.get("hash_ids"), list):
            raise TraceError(f"line {number}: no object with hash_ids")
        fields = [item.get(field, 0) for field in ("timestamp", "input_length", "output_length")]
        blocks = list(_ints(number, item["hash_ids"]))
        if any(block < 0 for block in blocks):
            raise TraceError(f"line {number}: hash_ids must be 0 or more")
        self._count(number, len(blocks))
        t_ms, input_tokens, output_tokens = _ints(number, fields)
        return _checked(number, Request(t_ms, -1, input_tokens, output_tokens, blocks))

    def _request(self, number: int, item: object) -> Request:
        most = 6 if self.recording else 5
        if not (
            isinstance(item, list) and 5 <= len(item) <= most and isinstance(item[4], list) and len(item[4]) % 2 == 0
        ):
            raise TraceError(f"line {number}: not [t_ms, session, input_tokens, output_tokens, [start, length, ...]]")
        t_ms, session, input_tokens, output_tokens = _ints(number, item[:4])
        runs = list(_ints(number, item[4]))
        if any(value < 0 for value in runs):
            raise TraceError(f"line {number}: block ids and lengths of runs must be 0 or more")
        self._count(number, sum(runs[1::2]))
        blocks: list[int] = []
        for start, length in zip(runs[::2], runs[1::2], strict=True):
            blocks.extend(range(start, start + length))
        more = item[5] if len(item) == 6 else {}
        if not isinstance(more, dict):
            raise TraceError(f"line {number}: the sixth item is no object")
        (space,) = _ints(number, [more.get("space", 0)])
        kept = more.get("kept", [0, len(blocks)])
        if not isinstance(kept, list) or len(kept) != 2:
            raise TraceError(f"line {number}: kept is {kept!r}; it must be [first, stop]")
        first, stop = _ints(number, kept)
        if not 0 <= first <= stop <= len(blocks):
            raise TraceError(f"line {number}: kept is {kept!r} of {len(blocks)} blocks")
        return _checked(number, Request(t_ms, session, input_tokens, output_tokens, blocks, space, first, stop))

    def _told(self, number: int, item: Mapping[str, object]) -> None:
        """An object among the requests of a recording; what it does not know is left out."""
        if isinstance(end := item.get("end"), dict):
            self.end = end
        if "space" not in item:
            return
        space, block_tokens, block_bytes = item["space"], item.get("block_tokens"), item.get("block_bytes")
        speed = item.get("prefill_tokens_per_s")
        if (
            not isinstance(space, int)
            or not _is_count(block_tokens)
            or not (block_bytes is None or _is_count(block_bytes))
            or not (speed is None or (isinstance(speed, int | float) and 0 < speed < 1e12))
        ):
            raise TraceError(f"line {number}: {item!r:.120} describes no namespace")
        self.spaces[space] = Space(block_tokens, block_bytes, speed)

    def _count(self, number: int, blocks: int) -> None:
        self._blocks += blocks
        if blocks > MAX_REQUEST_BLOCKS or self._blocks > MAX_BLOCKS:
            raise TraceError(
                f"line {number}: {blocks:,} blocks, {self._blocks:,} so far; a request may have "
                f"{MAX_REQUEST_BLOCKS:,}, a trace {MAX_BLOCKS:,}"
            )


def _checked(number: int, request: Request) -> Request:
    if request.input_tokens < 0 or request.output_tokens < 0:
        raise TraceError(f"line {number}: numbers of tokens must be 0 or more")
    return request


def _json(number: int, line: str) -> object:
    try:
        value: object = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"line {number}: not JSON ({error})") from None
    return value


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 62


def _ints(number: int, values: Iterable[object]) -> Iterator[int]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) > 1 << 62:
            raise TraceError(f"line {number}: {value!r:.60} is no number")
        yield int(value)
