"""Recorded workloads: which blocks requests asked for, in order.

Three formats, told apart by their first line, gzip'd or not:

- **kvtrace** (and what `omlxd record` writes): a header object with `kvtrace`, `name` and `block_tokens`, then one
  list per request: `[t_ms, session, input_tokens, output_tokens, [start, length, start, length, ...]]`, the last item
  a run-length code of the chain's block ids, head to tail;
- **Mooncake** (Qin et al., FAST 2025): one object per request with `timestamp`, `input_length`, `output_length` and
  `hash_ids`; a block has 512 tokens.

An id names a whole prefix, so it always has the same parent. That is not checked: what violates it only makes
prefixes that do not exist.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from omlxd.storage.blocks import HASH_BYTES

MOONCAKE_BLOCK_TOKENS = 512
_GZIP_MAGIC = b"\x1f\x8b"


class TraceError(ValueError):
    """A file is no trace; says where and why."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it came, how many tokens its prompt had, and the blocks of it, heads first."""

    t_ms: int
    session: int
    input_tokens: int
    output_tokens: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    block_tokens: int
    requests: list[Request]

    @property
    def distinct_blocks(self) -> int:
        """How many different blocks were asked for: 100 % of the sizes in percent."""
        return len(set(chain.from_iterable(request.blocks for request in self.requests)))

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.input_tokens for request in self.requests)

    def keys(self) -> list[list[bytes]]:
        """The blocks of each request as keys, as a tier knows them."""
        names: dict[int, bytes] = {}
        zero_group = bytes(4)
        for block in chain.from_iterable(request.blocks for request in self.requests):
            if block not in names:
                names[block] = block.to_bytes(HASH_BYTES, "big") + zero_group
        return [[names[block] for block in request.blocks] for request in self.requests]


def read_trace(path: Path) -> Trace:
    """Read a whole trace. TraceError names the line that is wrong; OSError where the file cannot be read."""
    with path.open("rb") as raw:
        zipped = raw.read(2) == _GZIP_MAGIC
    with gzip.open(path, "rt", encoding="utf-8") if zipped else path.open(encoding="utf-8") as lines:
        try:
            return parse_trace(lines, path.name.removesuffix(".gz").removesuffix(".jsonl"))
        except (EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
            raise TraceError(f"{path}: not a whole text or gzip file ({error}); fetch it again") from error
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from None


def parse_trace(lines: Iterable[str], name: str) -> Trace:
    """The trace in `lines`; `name` is used where it does not say its own."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        raise TraceError("the file is empty; a trace has at least one request")
    head = _json(*first)
    if not isinstance(head, dict):
        raise TraceError("line 1: neither the header of a trace nor a request in Mooncake's format")
    if "hash_ids" in head:
        requests = [_mooncake(number, _json(number, line)) for number, line in chain((first,), numbered)]
        return Trace(name, MOONCAKE_BLOCK_TOKENS, requests)
    block_tokens = head.get("block_tokens")
    if head.get("kvtrace") != 1 or not isinstance(block_tokens, int) or block_tokens < 1:
        raise TraceError('line 1: no header {"kvtrace": 1, "block_tokens": N, ...} and no Mooncake request')
    requests = [_request(number, _json(number, line)) for number, line in numbered]
    return Trace(str(head.get("name", name)), block_tokens, requests)


def run_lengths(blocks: Iterable[int]) -> list[int]:
    """[start, length, start, length, ...] for block ids."""
    runs: list[int] = []
    for block in blocks:
        if runs and runs[-2] + runs[-1] == block:
            runs[-1] += 1
        else:
            runs += (block, 1)
    return runs


def _json(number: int, line: str) -> object:
    try:
        value: object = json.loads(line)
    except ValueError as error:
        raise TraceError(f"line {number}: not JSON ({error})") from None
    return value


def _request(number: int, item: object) -> Request:
    if not (isinstance(item, list) and len(item) == 5 and isinstance(item[4], list) and len(item[4]) % 2 == 0):
        raise TraceError(f"line {number}: not [t_ms, session, input_tokens, output_tokens, [start, length, ...]]")
    t_ms, session, input_tokens, output_tokens, runs = item
    numbers = list(_ints(number, (t_ms, session, input_tokens, output_tokens, *runs)))
    blocks: list[int] = []
    for start, length in zip(numbers[4::2], numbers[5::2], strict=True):
        if start < 0 or length < 0 or length > 1 << 24:
            raise TraceError(f"line {number}: {length} blocks from {start} on cannot be")
        blocks.extend(range(start, start + length))
    return Request(numbers[0], numbers[1], numbers[2], numbers[3], blocks)


def _mooncake(number: int, item: object) -> Request:
    if not isinstance(item, dict) or not isinstance(item.get("hash_ids"), list):
        raise TraceError(f"line {number}: no object with hash_ids")
    fields = [item.get(field, 0) for field in ("timestamp", "input_length", "output_length")]
    blocks = list(_ints(number, item["hash_ids"]))
    if any(block < 0 for block in blocks):
        raise TraceError(f"line {number}: hash_ids must be 0 or more")
    t_ms, input_tokens, output_tokens = _ints(number, fields)
    return Request(t_ms, -1, input_tokens, output_tokens, blocks)


def _ints(number: int, values: Iterable[object]) -> Iterator[int]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) > 1 << 62:
            raise TraceError(f"line {number}: {value!r} is no number")
        yield int(value)
