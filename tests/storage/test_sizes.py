from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.storage.sizes import ALLOWED, MAX_BYTES, format_size, parse_blocks, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (1_048_576, 1 << 20),
        ("0", 0),
        ("0GB", 0),
        ("0.0 GiB", 0),
        ("1048576", 1 << 20),
        ("1_048_576", 1 << 20),
        ("64k", 64_000),
        ("64K", 64_000),
        ("64kB", 64_000),
        ("64KiB", 65_536),
        ("64Ki", 65_536),
        ("8 GB", 8_000_000_000),
        ("8GiB", 8 << 30),
        ("8gib", 8 << 30),
        (" 8GiB\n", 8 << 30),
        ("512MiB", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("0.1GiB", (1 << 30) // 10),
        ("2T", 2_000_000_000_000),
        ("7 B", 7),
        (MAX_BYTES, MAX_BYTES),
    ],
)
def test_a_size_is_read(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(("text", "nbytes"), [("20%", 200), ("100%", 1000), ("0%", 0), ("12.5 %", 125), ("0.05%", 0)])
def test_a_percentage_is_of_the_total(text: str, nbytes: int) -> None:
    assert parse_size(text, total=1000) == nbytes


@pytest.mark.parametrize("text", ["auto", "AUTO", " auto "])
def test_auto_is_what_the_caller_says(text: str) -> None:
    assert parse_size(text, auto=77) == 77


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("-5GB", "negative"),
        (-5, "negative"),
        ("-0", "negative"),
        ("nan", "not a size"),
        ("inf", "not a size"),
        ("GB", "not a size"),
        ("12 parsecs", "unknown unit 'parsecs'"),
        ("1e9", "not a size"),
        ("0x10", "not a size"),
        ("1,5GB", "not a size"),
        ("+5GB", "not a size"),
        ("5 GB 3", "not a size"),
        ("1__0", "not a size"),
        ("٣GB", "not a size"),
        ("1.5", "fraction of a byte"),
        ("1.5B", "fraction of a byte"),
        ("0.0001k", "less than a byte"),
        ("20%", "no total"),
        ("101%", "more than 100%"),
        ("-1%", "negative"),
        ("auto", "no automatic value"),
        (MAX_BYTES + 1, "more than"),
        ("10000000TB", "more than"),
        ("9" * 5000, "not a size"),
        (True, "neither"),
        (1.5, "neither"),
        (None, "neither"),
    ],
)
def test_what_is_no_size_is_refused_with_the_value_the_reason_and_what_is_allowed(text: str | int, why: str) -> None:
    with pytest.raises(ValueError, match="size ") as refused:
        parse_size(text)
    assert repr(text) in str(refused.value)
    assert why in str(refused.value)
    assert ALLOWED in str(refused.value)


def test_more_than_everything_is_refused_with_a_total_too() -> None:
    with pytest.raises(ValueError, match="more than 100%"):
        parse_size("100.01%", total=1000)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (8 << 30, "8.0 GiB"),
        (3 << 29, "1.5 GiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (-(3 << 29), "-1.5 GiB"),
        (MAX_BYTES, "8.0 EiB"),
    ],
)
def test_a_size_is_shown(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(0, 7 << 60))
def test_what_is_shown_reads_back_within_half_a_tenth_of_its_unit(nbytes: int) -> None:
    shown = format_size(nbytes)
    unit = parse_size("1 " + shown.split()[1])
    assert abs(parse_size(shown) - nbytes) <= Fraction(unit, 20)


@given(st.integers(1, 1023), st.sampled_from(["KiB", "MiB", "GiB", "TiB", "PiB"]))
def test_whole_units_round_trip_exactly(count: int, unit: str) -> None:
    nbytes = parse_size(f"{count}{unit}")
    assert parse_size(format_size(nbytes)) == nbytes


@given(st.text())
def test_any_text_is_read_or_refused_with_a_value_error(text: str) -> None:
    try:
        nbytes = parse_size(text, total=1 << 40, auto=5)
    except ValueError as refused:
        message = str(refused)
    else:
        message = ALLOWED
        assert 0 <= nbytes <= MAX_BYTES
    assert ALLOWED in message


@pytest.mark.parametrize(
    ("text", "blocks"),
    [("5000", 5000), ("1_000", 1000), ("1%", 1827), ("0.5%", 913), ("100%", 182_790), ("8GiB", 1024), (" 9MiB ", 1)],
)
def test_numbers_of_blocks(text: str, blocks: int) -> None:
    assert parse_blocks(text, distinct=182_790, block_bytes=8 << 20) == blocks


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0", "less than one block"),
        ("7MiB", "less than one block"),
        ("0.0001%", "less than one block"),
        ("1.5", "a fraction of a block"),
        ("200%", "more than 100%"),
        ("-3", "not a size"),
        ("auto", "not a size"),
        ("5 elephants", "unknown unit"),
        ("5x", "unknown unit"),
        ("", "not a size"),
        ("9" * 80, "not a size"),
    ],
)
def test_refused_numbers_of_blocks_say_why_and_what_is_allowed(text: str, why: str) -> None:
    with pytest.raises(ValueError, match="Allowed: a number of blocks") as caught:
        parse_blocks(text, distinct=1000, block_bytes=8 << 20)
    assert why in str(caught.value)


def test_bytes_are_no_blocks_while_it_is_not_known_how_large_one_is() -> None:
    with pytest.raises(ValueError, match="give --block-bytes"):
        parse_blocks("8GiB", distinct=1000, block_bytes=None)
