"""Headers, seals, names, and the small machines around the remote tier, without a server."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from omlxd.storage.durations import parse_duration
from omlxd.storage.remote_breaker import FAILURES, FIRST_PAUSE, LONGEST_PAUSE, Breaker
from omlxd.storage.remote_cluster import slots_of_tags
from omlxd.storage.remote_records import Header, Stranger, cut, pack_header, unpack_header
from omlxd.storage.remote_seal import Keyed, Plain, Seal, Unsealed, piece_name, read_key_file, tag_of
from omlxd.storage.remote_settings import RemoteSettings
from omlxd.storage.remote_url import parse_url
from omlxd.storage.remote_writer import Admission, Allowance
from tests.storage.ssd_store import NAMESPACE, OTHER, Clock, chain_of

SEALS: list[Seal] = [Plain(), Keyed(b"k" * 32)]
(HEAD, NEXT) = chain_of("records", [3000, 5000])


def header_of(**changes: object) -> Header:
    made = Header(
        NEXT.key, NAMESPACE, 5000, 5000, "raw", b"", b"c" * 16, HEAD.key, 1, None, 1.5e9, b"w" * 16, 4096, "abcd"
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("seal", SEALS)
def test_a_header_reads_back(seal: Seal) -> None:
    header = header_of(layout=b"own")
    stored = pack_header(header, seal, seal.name(NEXT.key))
    assert unpack_header(NEXT.key, {NAMESPACE}, stored, seal) == header
    assert (header.pieces, header.piece_length(0), header.piece_length(1)) == (2, 4096, 904)


@pytest.mark.parametrize("seal", SEALS)
@given(stored=st.one_of(st.binary(max_size=300), st.none(), st.integers(), st.lists(st.binary(), max_size=2)))
def test_bytes_of_a_stranger_are_no_header(seal: Seal, stored: object) -> None:
    with pytest.raises(Stranger):
        unpack_header(NEXT.key, {NAMESPACE}, stored, seal)


@pytest.mark.parametrize("seal", SEALS)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_flipped_bit_is_accepted(seal: Seal, at: int, bit: int) -> None:
    stored = bytearray(pack_header(header_of(), seal, seal.name(NEXT.key)))
    stored[at % len(stored)] ^= 1 << bit
    with pytest.raises(Stranger):
        unpack_header(NEXT.key, {NAMESPACE}, bytes(stored), seal)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@given(at=st.integers(0, 14), value=VALUES)
def test_a_header_with_a_correct_hash_and_any_field_of_another_kind_is_refused_or_is_sound(
    at: int, value: object
) -> None:
    """Whoever can write can also hash: what comes through must still be a header that can be worked with."""
    fields: list[object] = [1, *(getattr(header_of(), name) for name in Header.__slots__)]
    fields[at] = value
    body = msgpack.packb(fields, use_bin_type=True)
    try:
        header = unpack_header(NEXT.key, {NAMESPACE}, xxhash.xxh3_64_digest(body) + body, Plain())
    except Stranger:
        return
    assert header.key == NEXT.key
    assert header.namespace == NAMESPACE
    assert header.meta.nbytes == header.nbytes > 0
    assert header.pieces >= 1
    assert sum(header.piece_length(number) for number in range(header.pieces)) == header.stored_bytes


@pytest.mark.parametrize(
    "changes",
    [
        {"key": HEAD.key},
        {"namespace": OTHER},
        {"nbytes": 0},
        {"nbytes": 1 << 50},
        {"stored_bytes": 5001},
        {"stored_bytes": 4999},
        {"codec": "zstd", "frames": b"123"},
        {"codec": "brotli"},
        {"frames": b"1234"},
        {"checksum": b"short"},
        {"write_id": b"short"},
        {"piece_bytes": 1},
        {"piece_bytes": 0},
        {"parent": b"short"},
        {"position": -1},
        {"position": 0},
    ],
)
def test_a_header_that_contradicts_itself_is_a_strangers(changes: dict[str, object]) -> None:
    stored = pack_header(header_of(**changes), Plain(), Plain().name(NEXT.key))
    with pytest.raises(Stranger):
        unpack_header(NEXT.key, {NAMESPACE}, stored, Plain())


def test_a_sealed_piece_opens_in_its_own_place_only() -> None:
    seal = Keyed(b"k" * 32)
    name = seal.name(NEXT.key)
    places = [piece_name(name, b"w" * 16, number) for number in range(2)]
    sealed = seal.pieces(b"w" * 16).seal(0, places[0], b"piece")
    assert seal.pieces(b"w" * 16).open(0, places[0], sealed) == b"piece"
    for opener, number, place in [
        (seal.pieces(b"w" * 16), 1, places[0]),
        (seal.pieces(b"w" * 16), 0, places[1]),
        (seal.pieces(b"x" * 16), 0, places[0]),
        (Keyed(b"j" * 32).pieces(b"w" * 16), 0, places[0]),
    ]:
        with pytest.raises(Unsealed):
            opener.open(number, place, sealed)


@given(parts=st.lists(st.binary(max_size=300), min_size=1, max_size=4), piece=st.integers(1, 100))
def test_pieces_put_together_are_the_stored_bytes(parts: list[bytes], piece: int) -> None:
    whole = b"".join(parts)
    pieces = [bytes(one) for one in cut(parts, len(whole), piece)]
    assert b"".join(pieces) == whole
    assert all(len(one) == piece for one in pieces[:-1])


@pytest.mark.parametrize("seal", SEALS)
def test_a_blocks_names_are_on_one_node_and_blocks_spread(seal: Seal) -> None:
    from valkey.crc import key_slot

    names = [seal.name(meta.key) for meta in chain_of("names", [1] * 500)]
    assert all(name.startswith(b"omlxd:{") for name in names)
    assert {key_slot(name) for name in names} == {key_slot(piece_name(name, b"}{" * 8, 3)) for name in names}
    assert [slots_of_tags()[tag_of(name)] for name in names] == [key_slot(name) for name in names]
    assert len(set(slots_of_tags())) > 250


@pytest.mark.parametrize(
    ("url", "shown", "cluster", "tls"),
    [
        ("valkey://host", "valkey://host:6379", False, False),
        ("valkeys://u:p%40ss@host:7000/3", "valkeys://host:7000/3", False, True),
        ("valkey+cluster://[::1]:7000", "valkey+cluster://[::1]:7000", True, False),
        ("rediss+cluster://:pw@host", "valkeys+cluster://host:6379", True, True),
    ],
)
def test_urls(url: str, shown: str, cluster: bool, tls: bool) -> None:
    target = parse_url(url)
    assert (str(target), target.cluster, target.tls) == (shown, cluster, tls)
    assert "p@ss" not in repr(target)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host",
        "http://host",
        "valkey://",
        "valkey://h:99999",
        "valkey+x://h",
        "valkey://h/x",
        "valkey+cluster://h/1",
    ],
)
def test_wrong_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"remote\.url: .*(write valkey://|port|after the host)"):
        RemoteSettings.from_options({"url": url})


def test_a_key_file_must_be_long_and_private(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ValueError, match="cannot be read"):
        read_key_file(path)
    path.write_text("short\n")
    path.chmod(0o600)
    with pytest.raises(ValueError, match="5 bytes, 32 are the least: openssl rand"):
        read_key_file(path)
    path.write_text("x" * 64 + "\n")
    path.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        read_key_file(path)
    path.chmod(0o600)
    assert read_key_file(path) == b"x" * 64


def test_a_breaker_opens_for_what_is_certain_at_once_and_for_timeouts_in_a_row() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    assert not breaker.closed
    assert breaker.probe_due()
    breaker.succeeded()
    for _ in range(FAILURES - 1):
        assert not breaker.failed("slow", "late")
    breaker.succeeded()
    for _ in range(FAILURES - 1):
        assert not breaker.failed("slow", "late")
    assert breaker.failed("slow", "late")
    assert (breaker.closed, breaker.state, breaker.reason) == (False, "slow", "late")
    breaker.succeeded()
    assert breaker.failed("gone", "refused")
    assert breaker.opened == 2


def test_a_breaker_probes_one_at_a_time_and_ever_less_often() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.succeeded()
    breaker.failed("gone", "")
    pauses = []
    for _ in range(12):
        begun = clock.now
        while not breaker.probe_due():
            clock.now += FIRST_PAUSE
        assert not breaker.probe_due(), "one is under way"
        pauses.append(clock.now - begun)
        breaker.failed("gone", "")
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE


@given(sizes=st.lists(st.integers(1, 10_000_000), max_size=30))
def test_no_more_is_sent_than_the_rate_allows(sizes: list[int]) -> None:
    clock = Clock()
    allowance = Allowance(1_000_000.0, clock)
    begun = clock.now
    sent = 0
    for size in sizes:
        clock.now += allowance.owed() + 1e-9
        assert sent <= 1_000_000.0 * (clock.now - begun) + 1
        allowance.spend(size)
        sent += size
    assert Allowance(0.0, clock).owed() == 0.0


@pytest.mark.parametrize("text", ["", "all", "prefix", "prefix:", "prefix:0", "prefix:-1", "everything:3"])
def test_wrong_admissions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="second_touch"):
        Admission.parse(text)


def test_durations() -> None:
    assert [parse_duration(text) for text in ("50ms", "90s", "15m", "12h", "7d", "2w", "3.5", 8)] == [
        0.05, 90, 900, 43_200, 604_800, 1_209_600, 3.5, 8,
    ]  # fmt: skip
    for text in ("", "d", "7y", "-3s", "0", "1e999", "nan", "ms", "3 4"):
        with pytest.raises(ValueError, match="duration"):
            parse_duration(text)
