from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.storage import pressure
from omlxd.storage.control_group import within
from omlxd.storage.pressure import Governor, Level, Reading

GIB = 1 << 30


def test_little_available_memory_is_tight_and_next_to_none_critical() -> None:
    assert Reading(100, 50).level is Level.EASE
    assert Reading(100, 10).level is Level.ENOUGH
    assert Reading(100, 4).level is Level.TIGHT
    assert Reading(100, 1).level is Level.CRITICAL


def test_stalls_count_where_memory_is_not_plenty() -> None:
    assert Reading(100, 14, stalled=20.0).level is Level.TIGHT
    assert Reading(100, 60, stalled=20.0).level is Level.ENOUGH, "a container that thrashes is none of ours"
    assert Reading(100, 60, stalled=0.5).level is Level.EASE


def test_the_verdict_of_macos_is_taken() -> None:
    assert [Reading(100, 50, verdict=v).level for v in (1, 2, 4)] == [Level.EASE, Level.TIGHT, Level.CRITICAL]


def test_pressure_stall_information_is_read_from_its_full_line() -> None:
    lines = [
        "some avg10=12.50 avg60=3.00 avg300=1.00 total=123456",
        "full avg10=4.25 avg60=1.00 avg300=0.50 total=3456",
    ]
    assert pressure.parse_stalls(lines) == 4.25
    assert pressure.parse_stalls(lines[:1]) is None
    assert pressure.parse_stalls([]) is None


def test_this_system_can_be_asked() -> None:
    reading = pressure.read(lambda: (100, 50))
    assert reading.total == 100
    assert reading.level in Level


def test_it_gives_way_at_once_and_takes_back_slowly() -> None:
    governor = Governor(16 * GIB)
    assert governor.step(Level.TIGHT, 16 * GIB, 0.0) == 12 * GIB
    assert governor.step(Level.TIGHT, 12 * GIB, 1.0) == 12 * GIB, "the first step has not shown its effect yet"
    assert governor.step(Level.CRITICAL, 12 * GIB, 6.0) == 6 * GIB
    assert governor.gives_way
    assert governor.step(Level.EASE, 6 * GIB, 7.0) == 6 * GIB
    assert governor.step(Level.EASE, 6 * GIB, 36.0) == 6 * GIB
    assert governor.step(Level.EASE, 6 * GIB, 37.0) == 8 * GIB
    assert governor.step(Level.ENOUGH, 8 * GIB, 60.0) == 8 * GIB
    assert governor.step(Level.EASE, 8 * GIB, 68.0) == 8 * GIB, "the calm begins anew"
    for second in range(70, 400):
        governor.step(Level.EASE, 8 * GIB, float(second))
    assert governor.budget == 16 * GIB
    assert not governor.gives_way


def test_what_is_not_used_is_no_reason_to_keep_a_budget() -> None:
    assert Governor(16 * GIB).step(Level.TIGHT, 4 * GIB, 0.0) == 3 * GIB


def test_a_new_configuration_counts_at_once() -> None:
    governor = Governor(16 * GIB)
    governor.step(Level.CRITICAL, 16 * GIB, 0.0)
    governor.configure(4 * GIB)
    assert governor.budget == 4 * GIB
    assert not governor.gives_way


@given(st.lists(st.tuples(st.sampled_from(Level), st.floats(0, 1), st.floats(0.1, 20)), max_size=200))
def test_the_budget_stays_between_a_sixteenth_and_all(steps: list[tuple[Level, float, float]]) -> None:
    governor = Governor(16 * GIB)
    now = 0.0
    for level, share, seconds in steps:
        now += seconds
        before = governor.budget
        budget = governor.step(level, int(before * share), now)
        assert GIB <= budget <= 16 * GIB
        if level >= Level.TIGHT:
            assert budget <= before
        elif level is Level.ENOUGH:
            assert budget == before
        else:
            assert before <= budget <= before + 2 * GIB


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/a/b\n", {"a/memory.max": "600", "a/memory.current": "500"}, (600, 100)),
        (
            "0::/a/b\n",
            {"a/memory.max": "600", "a/memory.current": "500", "a/memory.stat": "anon 1\ninactive_file 80\n"},
            (600, 180),
        ),
        ("0::/a/b\n", {"a/memory.max": "max", "a/memory.current": "500"}, (1000, 700)),
        (
            "0::/a/b\n",
            {"a/memory.max": "900", "a/memory.current": "800", "a/b/memory.max": "400", "a/b/memory.current": "10"},
            (400, 100),
        ),
        (
            "4:memory:/x\n0::/\n",
            {"memory/x/memory.limit_in_bytes": "500", "memory/x/memory.usage_in_bytes": "450"},
            (500, 50),
        ),
        (
            "4:cpu,memory:/of/the/host\n",
            {"memory/memory.limit_in_bytes": "300", "memory/memory.usage_in_bytes": "400"},
            (300, 0),
        ),
        (
            "4:memory:/x\n",
            {"memory/x/memory.limit_in_bytes": "9223372036854771712", "memory/x/memory.usage_in_bytes": "5"},
            (1000, 700),
        ),
        ("nonsense\n4:memory:/../../etc\n", {"memory/memory.limit_in_bytes": "words"}, (1000, 700)),
    ],
)
def test_a_control_group_may_leave_less_than_the_machine_has(
    tmp_path: Path, membership: str, files: dict[str, str], expected: tuple[int, int]
) -> None:
    (tmp_path / "member").write_text(membership)
    for name, text in files.items():
        file = tmp_path / "mount" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    if "0::/a/b" in membership:
        (tmp_path / "mount" / "a" / "b").mkdir(exist_ok=True)
    assert within(1000, 700, membership=tmp_path / "member", mount=tmp_path / "mount") == expected


def test_without_control_groups_it_is_the_machine(tmp_path: Path) -> None:
    assert within(1000, 700, membership=tmp_path / "none", mount=tmp_path) == (1000, 700)
