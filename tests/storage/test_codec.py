from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.storage.codec import (
    CODECS,
    PLANES_2,
    PLANES_4,
    RAW,
    SPAN_BYTES,
    ZSTD,
    CodecError,
    count_frames,
    decode,
    encode,
)


def bf16_noise(elements: int) -> bytes:
    """What a KV cache looks like to a codec: normally distributed bfloat16."""
    values = (np.random.default_rng(7).standard_normal(elements) * 0.7).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def round_trip(codec: str, payload: bytes) -> bytes:
    encoded = encode(codec, payload)
    stored = b"".join(encoded.parts)
    assert len(stored) == encoded.stored_bytes
    assert len(encoded.frames) == 4 * count_frames(codec, len(payload))
    out = bytearray(len(payload))
    decode(codec, encoded.frames, stored, memoryview(out))
    return bytes(out)


@given(codec=st.sampled_from(CODECS), payload=st.binary(max_size=300), repeat=st.integers(1, 5))
def test_what_was_encoded_is_decoded(codec: str, payload: bytes, repeat: int) -> None:
    assert round_trip(codec, payload * repeat) == payload * repeat


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("nbytes", [0, 1, 3, SPAN_BYTES - 1, SPAN_BYTES, SPAN_BYTES + 1, 3 * SPAN_BYTES + 2])
def test_every_length_around_a_span_comes_back(codec: str, nbytes: int) -> None:
    payload = bf16_noise(nbytes // 2 + 1)[:nbytes]
    assert round_trip(codec, payload) == payload


@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_at_an_odd_address_comes_back(codec: str) -> None:
    payload = b"x" + bf16_noise(1000)
    view = memoryview(payload)[1:]
    encoded = encode(codec, view)
    out = bytearray(len(payload))
    decode(codec, encoded.frames, b"".join(encoded.parts), memoryview(out)[1:])
    assert out[1:] == view


def test_raw_makes_no_copy_of_the_payload() -> None:
    payload = bytearray(b"abcd")
    part = encode(RAW, payload).parts[0]
    payload[0] = ord("z")
    assert bytes(part) == b"zbcd"


def test_planes_store_less_of_a_bf16_cache_than_plain_zstd_and_leave_the_mantissas_alone() -> None:
    payload = bf16_noise(SPAN_BYTES)
    planes, plain = encode(PLANES_2, payload), encode(ZSTD, payload)
    assert planes.stored_bytes < 0.72 * len(payload) < plain.stored_bytes < 0.85 * len(payload)
    words = struct.unpack(f"<{len(planes.frames) // 4}I", planes.frames)
    assert [bool(word >> 31) for word in words] == [True, False] * (len(words) // 2)


def test_four_byte_elements_have_four_planes() -> None:
    values = np.arange(100_000, dtype="<u4").tobytes()  # the two upper bytes hardly ever change
    assert encode(PLANES_4, values).stored_bytes < 0.4 * len(values)
    assert round_trip(PLANES_4, values) == values


@pytest.mark.parametrize("codec", CODECS)
def test_noise_is_never_stored_larger_than_it_is(codec: str) -> None:
    noise = np.random.default_rng(1).bytes(2 * SPAN_BYTES + 7)
    assert encode(codec, noise).stored_bytes == len(noise)


@pytest.mark.parametrize("codec", [ZSTD, PLANES_2, PLANES_4])
@pytest.mark.parametrize(
    "harm", ["shorter", "longer", "frames_cut", "frames_more", "frames_odd", "other_length", "flip"]
)
def test_stored_bytes_that_do_not_fit_are_refused(codec: str, harm: str) -> None:
    payload = bytes(1000) + bf16_noise(SPAN_BYTES)
    encoded = encode(codec, payload)
    stored, frames, length = b"".join(encoded.parts), encoded.frames, len(payload)
    if harm == "shorter":
        stored = stored[:-1]
    elif harm == "longer":
        stored += b"x"
    elif harm == "frames_cut":
        frames = frames[:-4]
    elif harm == "frames_more":
        frames += struct.pack("<I", 0)
    elif harm == "frames_odd":
        frames += b"x"
    elif harm == "other_length":
        length += 2
    else:  # a frame's own magic number
        words = struct.unpack(f"<{len(frames) // 4}I", frames)
        at = sum(word & 0x7FFFFFFF for word in words[: next(i for i, word in enumerate(words) if not word >> 31)])
        stored = stored[:at] + bytes([stored[at] ^ 0xFF]) + stored[at + 1 :]
    with pytest.raises(CodecError):
        decode(codec, frames, stored, memoryview(bytearray(length)))


def test_unknown_codecs_are_named() -> None:
    with pytest.raises(ValueError, match="lz77"):
        encode("lz77", b"")
    with pytest.raises(CodecError, match="lz77"):
        decode("lz77", b"", b"", memoryview(bytearray()))
    with pytest.raises(CodecError, match="payload of 4"):
        decode(RAW, b"", b"abc", memoryview(bytearray(4)))
