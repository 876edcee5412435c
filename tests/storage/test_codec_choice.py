from __future__ import annotations

import numpy as np
import pytest

from omlxd.storage.codec import PLANES_2, PLANES_4, RAW, ZSTD
from omlxd.storage.codec_choice import MEASURE_EVERY, SAMPLE_BYTES, CodecChoice
from tests.storage.test_codec import bf16_noise

SPACE, OTHER = b"a" * 32, b"b" * 32


class Timer:
    """Each measurement takes as long as a test wants."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        self.now += self.seconds
        return self.now


def choice(
    configured: str = "auto", *, disk: float = 1e9, decode: float = 1e9, restored: float = 0.0
) -> tuple[CodecChoice, Timer]:
    timer = Timer(SAMPLE_BYTES / decode)
    made = CodecChoice(configured, fetch_rate=lambda: disk, decode_rate=lambda codec: restored, timer=timer)
    return made, timer


BF16 = bf16_noise(1 << 18)
FP32 = np.random.default_rng(5).standard_normal(1 << 17).astype("<f4").tobytes()
NOISE = np.random.default_rng(3).bytes(1 << 19)


@pytest.mark.parametrize(
    ("disk", "decode", "expected"),
    [
        (1e8, 1e9, PLANES_2),  # reading 0.31 less saves 3.1 ns a byte, decoding costs 1
        (1e9, 1e9, RAW),  # it saves 0.31 ns and costs 1
        (1e9, 4e9, PLANES_2),  # 0.31 against 0.25
        (1e9, 3e9, RAW),  # 0.31 against 0.33: a restore must never become slower
        (0.0, 4e9, RAW),  # nothing is known of the disk yet
    ],
)
def test_auto_compresses_where_a_restore_gets_no_slower(disk: float, decode: float, expected: str) -> None:
    chosen, _ = choice(disk=disk, decode=decode)
    assert chosen.codec_for(SPACE, BF16) == expected


@pytest.mark.parametrize("disk", [1e8, 3e8, 1e9, 3e9, 1e10])
@pytest.mark.parametrize("sample", [2e8, 1e9, 5e9])
@pytest.mark.parametrize("restored", [0.0, 2e8, 1e9, 5e9])
@pytest.mark.parametrize("name", ["bf16", "fp32", "noise"])
def test_what_auto_chooses_is_restored_no_slower_than_raw(
    disk: float, sample: float, restored: float, name: str
) -> None:
    """By the speeds that a restore has: fetching goes by stored bytes, decoding as restores were, or else the sample was."""
    payload = {"bf16": BF16, "fp32": FP32, "noise": NOISE}[name]
    chosen, _ = choice(disk=disk, decode=sample, restored=restored)
    codec = chosen.codec_for(SPACE, payload)
    if codec == RAW:
        return
    share = next(one.ratio for one in chosen.measurements()[SPACE][1] if one.codec == codec)
    seconds = share / disk + 1 / (restored or sample)
    assert seconds <= 1 / disk * 1.000001


def test_auto_believes_restores_rather_than_a_fast_sample() -> None:
    assert choice(disk=5e8, decode=5e9)[0].codec_for(SPACE, BF16) == PLANES_2
    assert choice(disk=5e8, decode=5e9, restored=5e8)[0].codec_for(SPACE, BF16) == RAW


def test_auto_leaves_noise_alone() -> None:
    assert choice(disk=1e6, decode=1e12)[0].codec_for(SPACE, NOISE) == RAW


def test_auto_measures_each_namespace_by_itself_and_not_for_each_block() -> None:
    chosen, timer = choice(disk=1e8)
    assert chosen.codec_for(SPACE, BF16) == PLANES_2
    assert chosen.codec_for(OTHER, NOISE) == RAW
    calls = timer.calls
    for _ in range(MEASURE_EVERY):
        assert chosen.codec_for(SPACE, NOISE) == PLANES_2
    assert timer.calls == calls
    assert chosen.codec_for(SPACE, NOISE) == RAW, "measured again after a while"
    assert chosen.measurements()[SPACE][0] == RAW


@pytest.mark.parametrize(("payload", "expected"), [(BF16, PLANES_2), (FP32, PLANES_4)])
def test_planes_take_the_width_that_compresses_better(payload: bytes, expected: str) -> None:
    assert choice("zstd-planes", disk=1e12)[0].codec_for(SPACE, payload) == expected


def test_a_namespace_can_have_its_own_codec() -> None:
    chosen, timer = choice("raw")
    chosen.set(SPACE, "zstd")
    assert (chosen.codec_for(SPACE, BF16), chosen.codec_for(OTHER, BF16)) == (ZSTD, RAW)
    chosen.set(SPACE, None)
    assert chosen.codec_for(SPACE, BF16) == RAW
    assert timer.calls == 0


def test_tiny_payloads_are_not_worth_measuring() -> None:
    chosen, timer = choice(disk=1e6, decode=1e12)
    assert chosen.codec_for(SPACE, bytes(100)) == RAW
    assert timer.calls == 0


def test_unknown_codecs_are_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"lzma.*zstd-planes"):
        choice("lzma")
    with pytest.raises(ValueError, match="lzma"):
        choice()[0].set(SPACE, "lzma")
