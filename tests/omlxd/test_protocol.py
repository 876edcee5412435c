"""The protocol without I/O: both ends against each other, in pieces of any size, and against noise."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.protocol import (
    Answer,
    ClientSide,
    Code,
    FrameReader,
    ProtocolError,
    Request,
    RequestError,
    ServerSide,
    encode,
)

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
messages = st.dictionaries(st.text(), values, max_size=6)


def greeted() -> ServerSide:
    server = ServerSide()
    server.greeted = True
    return server


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """``data`` in pieces of these sizes, then the rest."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [*pieces, data[at:]]


@given(st.lists(messages, max_size=5), st.lists(st.integers(0, 40), max_size=30))
def test_messages_come_out_as_they_went_in_however_they_are_cut(sent: list[dict[str, Any]], sizes: list[int]) -> None:
    reader = FrameReader()
    stream = b"".join(map(encode, sent))
    received = [message for piece in cut(stream, sizes) for message in reader.feed(piece)]
    assert received == sent
    assert reader.buffered == 0


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_noise_is_a_message_or_a_protocol_error_and_never_more_memory_than_a_frame(pieces: list[bytes]) -> None:
    reader = FrameReader(max_frame=256)
    for piece in pieces:
        try:
            for message in reader.feed(piece):
                assert isinstance(message, dict)
        except ProtocolError as error:
            assert error.code in (Code.BAD_FRAME, Code.FRAME_TOO_LARGE)
            return
        assert reader.buffered <= 4 + 256


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_a_server_survives_whatever_follows_hello(bodies: list[bytes]) -> None:
    server = greeted()
    for body in bodies:
        try:
            for item in server.feed(struct.pack("<I", len(body)) + body):
                assert isinstance(item, Request | bytes)
        except ProtocolError as error:
            assert b"code" in server.farewell(error)
            return


def test_a_length_over_the_limit_is_refused_before_its_body_comes() -> None:
    with pytest.raises(ProtocolError, match="frame of 101 bytes; at most 100") as caught:
        list(FrameReader(max_frame=100).feed(struct.pack("<I", 101)))
    assert caught.value.code is Code.FRAME_TOO_LARGE


def test_questions_and_answers_find_each_other() -> None:
    client, server = ClientSide(), greeted()
    first, frame_1 = client.request("lookup", {"keys": b"k"})
    second, frame_2 = client.request("load", {"keys": b"k"})
    requests = list(server.feed(frame_1 + frame_2))
    assert requests == [Request(first, "lookup", {"keys": b"k"}), Request(second, "load", {"keys": b"k"})]
    assert server.open_requests == 2
    sent = [
        server.more(second, {"slots": []}, [(1, 4096)]),
        server.ok(first, {"where": b"\2"}),
        server.error(second, Code.REFUSED, "no"),
    ]
    assert list(client.feed(b"".join(sent))) == [
        Answer(second, "more", {"slots": []}, [(1, 4096)]),
        Answer(first, "ok", {"where": b"\2"}),
        Answer(second, "err", {"code": "refused", "message": "no"}),
    ]
    assert server.open_requests == 0


def test_an_id_may_be_used_again_only_after_its_last_frame() -> None:
    server = greeted()
    frame = encode({"i": 4, "v": "stats"})
    assert list(server.feed(frame)) == [Request(4, "stats", {})]
    with pytest.raises(ProtocolError, match="request id 4 is still open"):
        list(server.feed(frame))
    server = greeted()
    list(server.feed(frame))
    server.ok(4, {})
    assert list(server.feed(frame)) == [Request(4, "stats", {})]


def test_hello_comes_first_and_refusals_keep_the_connection() -> None:
    server = ServerSide(max_open=2)
    (refusal,) = server.feed(encode({"i": 0, "v": "stats"}))
    assert isinstance(refusal, bytes)
    assert b"hello_first" in refusal
    assert list(server.feed(encode({"i": 1, "v": "hello"}))) == [Request(1, "hello", {})]
    server.greeted = True
    server.ok(1, {})
    items = [item for number in (2, 3, 4) for item in server.feed(encode({"i": number, "v": "load"}))]
    assert [type(item) for item in items] == [Request, Request, bytes]
    assert b"too_many" in items[2]


def test_unknown_fields_are_kept_for_the_verb_to_ignore() -> None:
    (request,) = greeted().feed(encode({"i": 1, "v": "stats", "from_the_future": [1]}))
    assert isinstance(request, Request)
    assert request.fields == {"from_the_future": [1]}


def test_a_client_refuses_a_frame_that_the_daemon_would_not_take() -> None:
    with pytest.raises(RequestError, match="use smaller batches"):
        ClientSide(max_frame=1000).request("put", {"payload": bytes(2000)})


def test_an_answer_of_no_known_kind_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="without ok, more or err"):
        list(ClientSide().feed(encode({"i": 1, "perhaps": {}})))
