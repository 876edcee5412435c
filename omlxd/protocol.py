"""The wire protocol, without any I/O.

A frame is a 4-byte little-endian length and then one msgpack map of that many bytes. There are five kinds of map:

====================================  =========================================================
``{"i": id, "v": verb, ...fields}``   a request; ``id`` is chosen by the client, unique while it is open
``{"i": id, "ok": {...}}``            its answer, the last frame for this id
``{"i": id, "more": {...}}``          a part of its answer; more frames follow
``{"i": id, "err": {code, message}}`` its refusal, the last frame for this id
``{"i": None, "err": {...}}``         the connection itself is at fault; it is closed after this frame
====================================  =========================================================

A frame from the daemon may carry ``"fds": [[segment, bytes], ...]``: that many file descriptors came with it
(``SCM_RIGHTS``), in this order. The first request of a connection is ``hello``. Unknown fields are ignored, unknown
verbs are answered with ``unknown_verb``, a malformed frame ends the connection. Request ids keep answers apart, so any
number of requests may be open at once; the daemon bounds how many.

Both ends use the classes below: bytes go in through ``feed``, messages come out; bytes to send are returned. That is
why one test suite (and one fuzzer) covers the server, the blocking client and the asyncio client.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgpack

VERSION = 1
MIN_VERSION = 1
MAX_FRAME_BYTES = 64 << 20
KEY_BYTES = 36

_HEADER = struct.Struct("<I")
_TEXT = {str}

Message = dict[str, Any]


class Code(StrEnum):
    """Stable error codes; the message beside them is for people."""

    BAD_FRAME = "bad_frame"
    FRAME_TOO_LARGE = "frame_too_large"
    BAD_REQUEST = "bad_request"
    BAD_VERSION = "bad_version"
    HELLO_FIRST = "hello_first"
    UNKNOWN_VERB = "unknown_verb"
    UNKNOWN_NAMESPACE = "unknown_namespace"
    UNKNOWN_LEASE = "unknown_lease"
    UNKNOWN_RESERVATION = "unknown_reservation"
    TOO_MANY = "too_many"
    TOO_LARGE = "too_large"
    NOT_FOUND = "not_found"
    REFUSED = "refused"
    SHUTTING_DOWN = "shutting_down"
    SSD_UNAVAILABLE = "ssd_unavailable"
    INTERNAL = "internal"


class ProtocolError(Exception):
    """The peer sent something that is not this protocol; the connection can't go on."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class RequestError(Exception):
    """One request is refused; the connection goes on."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


def encode(message: Message) -> bytes:
    """The frame of ``message``, length included."""
    body: bytes = msgpack.packb(message, use_bin_type=True)
    return _HEADER.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into messages.

    ``max_frame`` bounds (bytes) what one frame may hold, and so what this reader ever buffers: a longer length is
    refused when its header is seen, before its body is read.
    """

    def __init__(self, max_frame: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max_frame = max_frame

    @property
    def buffered(self) -> int:
        """Bytes received that are not yet a whole frame."""
        return len(self._buffer)

    def feed(self, data: bytes | memoryview) -> Iterator[Message]:
        """Take ``data``; yield each message that is now whole.

        Raises:
            ProtocolError: a length over the limit, a body that is no msgpack map, or a map with other than text keys.
        """
        buffer = self._buffer
        if not buffer and len(data) >= 4 and _HEADER.unpack_from(data)[0] == len(data) - 4 <= self._max_frame:
            yield _decode(data[4:])  # one whole frame, as it nearly always is: no copy
            return
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= 4:
                (length,) = _HEADER.unpack_from(buffer, start)
                if length > self._max_frame:
                    raise ProtocolError(
                        Code.FRAME_TOO_LARGE,
                        f"frame of {length} bytes; at most {self._max_frame} are allowed: use smaller batches",
                    )
                end = start + 4 + length
                if len(buffer) < end:
                    break
                body = bytes(memoryview(buffer)[start + 4 : end])
                start = end
                yield _decode(body)
        finally:
            del buffer[:start]


def _decode(body: bytes | memoryview) -> Message:
    try:
        message = msgpack.unpackb(body, raw=False, strict_map_key=True)
    except Exception as error:  # msgpack raises a dozen unrelated types, ValueError to RecursionError
        raise ProtocolError(Code.BAD_FRAME, f"frame of {len(body)} bytes is no msgpack: {error}") from None
    if not isinstance(message, dict) or set(map(type, message)) - _TEXT:
        raise ProtocolError(Code.BAD_FRAME, f"frame holds a {type(message).__name__}, not a map with text keys")
    return message


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the daemon sees it."""

    id: int
    verb: str
    fields: Message


class ServerSide:
    """The daemon's end of one connection: what may come when.

    States: *new* (only ``hello`` is allowed), *open*, *closed* (after a ProtocolError nothing is accepted).
    """

    def __init__(self, max_frame: int = MAX_FRAME_BYTES, max_open: int = 256) -> None:
        self._reader = FrameReader(max_frame)
        self._open: set[int] = set()
        self._max_open = max_open
        self.greeted = False

    @property
    def open_requests(self) -> int:
        """How many requests wait for their last frame."""
        return len(self._open)

    def feed(self, data: bytes | memoryview) -> Iterator[Request | bytes]:
        """Requests that came whole; ``bytes`` is an answer to send at once (a request that is refused by its form).

        Raises:
            ProtocolError: the connection has to end; send :meth:`farewell` first.
        """
        for message in self._reader.feed(data):
            request_id = message.pop("i", None)
            verb = message.pop("v", None)
            if type(request_id) is not int or not 0 <= request_id < 1 << 63:
                raise ProtocolError(
                    Code.BAD_FRAME, f"request id {request_id!r}: a number from 0 to 2**63 - 1 is needed"
                )
            if request_id in self._open:
                raise ProtocolError(Code.BAD_FRAME, f"request id {request_id} is still open: number requests upwards")
            self._open.add(request_id)
            if type(verb) is not str:
                yield self.error(request_id, Code.BAD_REQUEST, f"verb {verb!r}: a text is needed")
            elif not self.greeted and verb != "hello":
                yield self.error(request_id, Code.HELLO_FIRST, f"{verb!r} before hello: greet first")
            elif len(self._open) > self._max_open:
                yield self.error(
                    request_id,
                    Code.TOO_MANY,
                    f"{len(self._open)} requests open on this connection; at most {self._max_open}",
                )
            else:
                yield Request(request_id, verb, message)

    def ok(self, request_id: int, result: Message, fds: list[tuple[int, int]] | None = None) -> bytes:
        """The last frame of a request that succeeded."""
        self._open.discard(request_id)
        return encode({"i": request_id, "ok": result} if not fds else {"i": request_id, "ok": result, "fds": fds})

    def more(self, request_id: int, part: Message, fds: list[tuple[int, int]] | None = None) -> bytes:
        """A frame of a request whose answer comes in parts."""
        return encode({"i": request_id, "more": part} if not fds else {"i": request_id, "more": part, "fds": fds})

    def error(self, request_id: int, code: Code, message: str) -> bytes:
        """The last frame of a request that is refused."""
        self._open.discard(request_id)
        return encode({"i": request_id, "err": {"code": str(code), "message": message}})

    @staticmethod
    def event(body: Message) -> bytes:
        """Something that the client did not ask for and has to know: ``revoked`` leases, ``dropped_segments``."""
        return encode({"i": None, "ok": body})

    @staticmethod
    def farewell(error: ProtocolError) -> bytes:
        """What is said before a connection is closed."""
        return encode({"i": None, "err": {"code": str(error.code), "message": str(error)}})


@dataclass(slots=True)
class Answer:
    """A frame of an answer as a client sees it."""

    id: int | None
    kind: str  # "ok", "more" or "err"
    body: Message
    fds: list[tuple[int, int]] = field(default_factory=list)


class ClientSide:
    """An engine's end of one connection."""

    def __init__(self, max_frame: int = MAX_FRAME_BYTES) -> None:
        self._reader = FrameReader(max_frame)
        self._next = 0
        self.max_frame = max_frame

    def request(self, verb: str, fields: Message) -> tuple[int, bytes]:
        """A new request's id and its frame.

        Raises:
            RequestError: the frame would pass the daemon's limit; nothing has to be sent.
        """
        request_id = self._next
        self._next += 1
        frame = encode({"i": request_id, "v": verb, **fields})
        if len(frame) - 4 > self.max_frame:
            raise RequestError(
                Code.FRAME_TOO_LARGE,
                f"{verb} needs a frame of {len(frame) - 4} bytes; the daemon takes {self.max_frame}: use smaller batches",
            )
        return request_id, frame

    def feed(self, data: bytes | memoryview) -> Iterator[Answer]:
        """Answers that came whole. Raises ProtocolError for what no daemon sends."""
        for message in self._reader.feed(data):
            request_id = message.get("i")
            for kind in ("ok", "more", "err"):
                body = message.get(kind)
                if isinstance(body, dict):
                    yield Answer(request_id, kind, body, [tuple(pair) for pair in message.get("fds", ())])
                    break
            else:
                raise ProtocolError(Code.BAD_FRAME, f"answer without ok, more or err: {sorted(message)}")
