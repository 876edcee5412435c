from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from omlxd.storage.arena import Arena, Extent, Segment
from omlxd.storage.pages import PAGE_BYTES, can_punch, populate, punch, round_up
from omlxd.storage.segments import open_shared_memory, unlinked_shared_memory

MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much of a memory file is resident")


def fill(arena: Arena, extent: Extent, value: int) -> None:
    np.frombuffer(arena.view(extent), np.uint8)[:] = value


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(8 * MIB, segment_bytes=2 * MIB)
    yield made
    made.close()


def test_a_block_starts_on_a_page_and_takes_whole_pages(arena: Arena) -> None:
    one, other = arena.allocate(1), arena.allocate(PAGE_BYTES + 1)
    assert one is not None
    assert other is not None
    assert (one.nbytes, other.nbytes) == (PAGE_BYTES, 2 * PAGE_BYTES)
    assert other.offset % PAGE_BYTES == 0
    assert np.frombuffer(arena.view(other), np.uint8).ctypes.data % PAGE_BYTES == 0
    assert arena.used == 3 * PAGE_BYTES
    assert arena.waste == PAGE_BYTES - 1 + PAGE_BYTES - 1


def test_an_empty_payload_has_a_place_too(arena: Arena) -> None:
    extent = arena.allocate(0)
    assert extent is not None
    assert extent.nbytes == PAGE_BYTES
    assert len(arena.view(extent, 0)) == 0


@pytest.mark.parametrize(
    ("budget", "segment_bytes", "sizes"),
    [
        (64 * MIB, 1 << 30, [64 * MIB]),
        (5 * MIB, 2 * MIB, [2 * MIB, 2 * MIB, MIB]),
        (5 * MIB + 100, 2 * MIB, [2 * MIB, 2 * MIB, MIB]),
        (PAGE_BYTES - 1, MIB, []),
        (0, MIB, []),
    ],
)
def test_segments_fill_the_budget_and_the_last_one_gets_the_rest(
    budget: int, segment_bytes: int, sizes: list[int]
) -> None:
    arena = Arena(budget, segment_bytes=segment_bytes)
    while arena.allocate(MIB // 2) is not None:
        pass
    assert [segment.nbytes for segment in arena.segments.values()] == sizes
    assert arena.reserved == sum(sizes) <= budget
    arena.close()


def test_a_block_larger_than_a_segment_gets_its_own(arena: Arena) -> None:
    large = arena.allocate(5 * MIB + 1)
    assert large is not None
    assert arena.segments[large.segment].nbytes == large.nbytes == round_up(5 * MIB + 1)
    assert arena.allocate(4 * MIB) is None
    assert arena.allocate(2 * MIB) is not None


def test_empty_segments_make_way_for_a_block_that_fits_in_none_of_them(arena: Arena) -> None:
    small = [arena.allocate(2 * MIB) for _ in range(4)]
    for extent in small[1:]:
        assert extent is not None
        arena.free(extent)
    assert arena.largest_free() == 6 * MIB
    assert arena.allocate(7 * MIB) is None
    assert arena.allocate(6 * MIB) is not None
    assert arena.reserved == 8 * MIB
    assert len(arena.segments) == 2


def test_a_fit_within_one_segment_is_not_two_halves_of_two() -> None:
    arena = Arena(4 * MIB, segment_bytes=2 * MIB)
    extents = [arena.allocate(MIB) for _ in range(4)]
    halves = [extents[1], extents[2]]
    assert None not in extents
    assert {extent.segment for extent in halves if extent} == {1, 2}
    assert not arena.fits_after([e for e in halves if e], 2 * MIB), "a block never crosses a segment"
    assert arena.fits_after([e for e in extents[:2] if e], 2 * MIB)
    arena.close()


def test_a_double_free_and_a_foreign_extent_are_refused(arena: Arena) -> None:
    extent = arena.allocate(MIB)
    assert extent is not None
    arena.free(extent)
    for wrong in (extent, Extent(77, 0, PAGE_BYTES)):
        with pytest.raises(ValueError, match="not handed out"):
            arena.free(wrong)
        with pytest.raises(ValueError, match="not handed out"):
            arena.view(wrong)
        with pytest.raises(ValueError, match="not handed out"):
            arena.fits_after([wrong], 1)
    assert arena.used == 0


def test_part_of_an_extent_is_not_an_extent(arena: Arena) -> None:
    extent = arena.allocate(MIB)
    assert extent is not None
    with pytest.raises(ValueError, match="not handed out"):
        arena.free(Extent(extent.segment, extent.offset, PAGE_BYTES))


def test_a_view_does_not_reach_beyond_its_extent(arena: Arena) -> None:
    extent = arena.allocate(100)
    assert extent is not None
    assert len(arena.view(extent, 100)) == 100
    assert len(arena.view(extent)) == extent.nbytes
    for wrong in (extent.nbytes + 1, -1):
        with pytest.raises(ValueError, match=str(wrong)):
            arena.view(extent, wrong)


def test_extents_do_not_share_memory(arena: Arena) -> None:
    extents = [extent for extent in (arena.allocate(MIB // 4) for _ in range(32)) if extent]
    for number, extent in enumerate(extents):
        fill(arena, extent, number + 1)
    for number, extent in enumerate(extents):
        assert set(bytes(arena.view(extent))) == {number + 1}


def test_a_view_outlives_its_segment_and_the_arena() -> None:
    arena = Arena(MIB)
    extent = arena.allocate(MIB)
    assert extent is not None
    fill(arena, extent, 7)
    view = arena.view(extent)
    arena.free(extent)
    assert arena.release_empty() == MIB
    arena.close()
    gc.collect()
    assert set(bytes(view)) in ({7}, {0}), "given back, where that is possible, but still there"
    view[:1] = b"x"
    assert view[0] == ord("x")


def test_segments_are_announced_when_made_and_before_they_go(arena: Arena) -> None:
    heard: list[tuple[int, int, bool]] = []

    def listen(segment: Segment, added: bool) -> None:
        assert os.fstat(segment.fd).st_size == segment.nbytes, "the descriptor is open at that moment"
        heard.append((segment.id, segment.nbytes, added))

    arena.on_segment(listen)
    extent = arena.allocate(1)
    assert extent is not None
    arena.free(extent)
    assert arena.release_empty() == 2 * MIB
    assert heard == [(1, 2 * MIB, True), (1, 2 * MIB, False)]
    assert arena.reserved == 0


def test_a_new_segment_never_has_the_id_of_an_old_one(arena: Arena) -> None:
    seen = set()
    for _ in range(3):
        extent = arena.allocate(1)
        assert extent is not None
        assert extent.segment not in seen
        seen.add(extent.segment)
        arena.free(extent)
        arena.release_empty()


@linux
def test_memory_is_taken_when_touched_and_goes_back_with_an_emptied_segment(arena: Arena) -> None:
    extents = [extent for extent in (arena.allocate(MIB) for _ in range(4)) if extent]
    assert arena.reserved == 4 * MIB
    assert arena.resident == 0
    for extent in extents:
        fill(arena, extent, 1)
    assert arena.resident == 4 * MIB
    for extent in extents[:3]:
        arena.free(extent)
    assert arena.resident == 4 * MIB
    assert arena.release_empty() == 2 * MIB
    assert arena.resident == 2 * MIB


@linux
def test_trim_gives_back_what_free_extents_held_and_nothing_else(arena: Arena) -> None:
    extents = [extent for extent in (arena.allocate(MIB // 2) for _ in range(4)) if extent]
    for extent in extents:
        fill(arena, extent, 9)
    arena.free(extents[1])
    arena.free(extents[3])
    assert arena.resident == 2 * MIB
    assert arena.trim() == MIB
    assert arena.resident == MIB
    assert set(bytes(arena.view(extents[0]))) == {9}
    assert set(bytes(arena.view(extents[2]))) == {9}
    assert arena.trim() == 0, "what was given back is not given back again"
    again = arena.allocate(MIB // 2)
    assert again is not None
    assert set(bytes(arena.view(again))) == {0}


@linux
def test_trim_can_be_done_in_steps(arena: Arena) -> None:
    extents = [extent for extent in (arena.allocate(MIB // 4) for _ in range(8)) if extent]
    for extent in extents:
        fill(arena, extent, 9)
    for extent in extents[::2]:
        arena.free(extent)
    assert arena.trim(1) == MIB // 4, "one extent at least"
    assert arena.trim(MIB // 2) == MIB // 2
    assert arena.trim() == MIB // 4
    assert arena.resident == MIB


@linux
def test_after_the_budget_was_lowered_memory_follows_what_is_used() -> None:
    arena = Arena(8 * MIB, segment_bytes=4 * MIB)
    extents = [extent for extent in (arena.allocate(MIB) for _ in range(8)) if extent]
    for extent in extents:
        fill(arena, extent, 5)
    assert arena.resize(3 * MIB) == 5 * MIB, "that much has to be evicted"
    for extent in extents[::2]:  # no segment empties
        arena.free(extent)
    assert arena.resident == arena.used == 4 * MIB
    assert arena.allocate(1) is None
    assert not arena.fits_after([], 1)
    assert not arena.fits_after([extents[1]], 1)
    assert arena.fits_after([extents[1], extents[3]], MIB)
    arena.free(extents[1])
    arena.free(extents[3])
    again = arena.allocate(MIB)
    assert again is not None
    fill(arena, again, 6)
    assert arena.resident == 3 * MIB
    assert arena.allocate(1) is None
    assert arena.resize(8 * MIB) == 0
    assert arena.largest_free() >= 2 * MIB
    arena.close()


def test_where_pages_cannot_be_given_back_whole_segments_must_be_vacated() -> None:
    arena = Arena(8 * MIB, segment_bytes=4 * MIB, punching=False)
    extents = [extent for extent in (arena.allocate(MIB) for _ in range(8)) if extent]
    arena.free(extents[0])
    assert arena.to_vacate() == []
    assert arena.resize(4 * MIB) == 4 * MIB
    assert arena.to_vacate() == extents[1:4], "the segment with the least in it"
    assert arena.allocate(1) is None, "a free extent is not room while the segments pass the budget"
    assert arena.trim() == 0
    for extent in arena.to_vacate():
        arena.free(extent)
    assert arena.reserved == 4 * MIB
    assert arena.to_vacate() == []
    arena.close()


def test_a_budget_can_go_to_zero_and_come_back(arena: Arena) -> None:
    extent = arena.allocate(MIB)
    assert extent is not None
    assert arena.resize(0) > 0
    arena.free(extent)
    assert (arena.reserved, arena.used) == (0, 0)
    assert arena.allocate(1) is None
    arena.resize(MIB)
    assert arena.allocate(MIB) is not None


def test_impossible_sizes_are_refused(arena: Arena) -> None:
    with pytest.raises(ValueError, match="budget of -1"):
        Arena(-1)
    with pytest.raises(ValueError, match="segment_bytes 0"):
        Arena(1, segment_bytes=0)
    with pytest.raises(ValueError, match="page_bytes 100"):
        Arena(1, page_bytes=100)
    with pytest.raises(ValueError, match="block of -1"):
        arena.allocate(-1)
    with pytest.raises(ValueError, match="budget of -5"):
        arena.resize(-5)
    assert arena.budget == 8 * MIB


def test_larger_pages_are_kept_to() -> None:
    arena = Arena(4 * MIB, page_bytes=16 * PAGE_BYTES)
    one, other = arena.allocate(1), arena.allocate(1)
    assert one is not None
    assert other is not None
    assert other.offset == one.nbytes == 16 * PAGE_BYTES
    arena.close()


def test_a_segment_that_the_system_refuses_is_counted_and_no_error(arena: Arena) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        assert arena.allocate(1) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert arena.stats()["segment_failures"] == 1
    assert arena.reserved == 0
    assert arena.allocate(1) is not None


def test_no_descriptor_is_left_after_close() -> None:
    before = open_descriptors()
    arena = Arena(8 * MIB, segment_bytes=MIB)
    while arena.allocate(MIB):
        pass
    assert open_descriptors() > before
    arena.close()
    gc.collect()
    assert open_descriptors() == before


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


@pytest.mark.parametrize("make", [lambda: open_shared_memory(PAGE_BYTES), unlinked_shared_memory])
def test_shared_memory_has_no_name_and_is_not_inherited(make: object) -> None:
    fd = make()  # type: ignore[operator]
    try:
        assert not os.get_inheritable(fd)
        if sys.platform == "linux":
            assert os.fstat(fd).st_nlink == 0
            assert "(deleted)" in os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def test_a_name_that_is_taken_is_passed_over() -> None:
    import _posixshmem  # type: ignore[import-not-found]

    name = f"/omlxd-{os.getpid()}-0"
    taken = _posixshmem.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
    try:
        fd = unlinked_shared_memory()
        assert os.fstat(fd).st_ino != os.fstat(taken).st_ino
        os.close(fd)
    finally:
        _posixshmem.shm_unlink(name)
        os.close(taken)


@linux
def test_a_client_cannot_take_the_memory_away_from_under_the_daemon() -> None:
    fd = open_shared_memory(2 * PAGE_BYTES)
    for size in (0, PAGE_BYTES, 4 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


@linux
def test_punching_needs_a_page_to_start_on() -> None:
    assert can_punch()
    arena = Arena(MIB)
    extent = arena.allocate(MIB)
    assert extent is not None
    with pytest.raises(ValueError, match="not on a page"):
        punch(arena.view(extent)[1:])
    arena.close()


class AgainstAList(RuleBasedStateMachine):
    """Every extent carries its number in memory; the budget moves; `largest_free` and `fits_after` tell the truth."""

    extents = Bundle("extents")

    @initialize(punching=st.booleans(), budget=st.integers(0, 24), segment=st.integers(1, 8))
    def start(self, punching: bool, budget: int, segment: int) -> None:
        self.punching = punching and can_punch()
        self.arena = Arena(budget * PAGE_BYTES, segment_bytes=segment * PAGE_BYTES, punching=self.punching)
        self.live: dict[Extent, int] = {}
        self.segments: dict[int, int] = {}
        self.arena.on_segment(self.hear)
        self.stamp = 0

    def hear(self, segment: Segment, added: bool) -> None:
        if added:
            assert segment.id not in self.segments
            self.segments[segment.id] = segment.nbytes
        else:
            assert not any(extent.segment == segment.id for extent in self.live)
            del self.segments[segment.id]

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.arena.close()

    @rule(target=extents, pages=st.integers(1, 12), short=st.integers(0, PAGE_BYTES - 1))
    def allocate(self, pages: int, short: int) -> object:
        promised = self.arena.largest_free()
        extent = self.arena.allocate(pages * PAGE_BYTES - short)
        assert (extent is not None) == (pages * PAGE_BYTES <= promised)
        if extent is None:
            return multiple()
        assert extent.nbytes == pages * PAGE_BYTES
        assert extent not in self.live
        self.stamp = self.stamp % 255 + 1
        fill(self.arena, extent, self.stamp)
        self.live[extent] = self.stamp
        return extent

    @rule(extent=consumes(extents))
    def free(self, extent: Extent) -> None:
        if extent not in self.live:
            return  # freed together with others before
        self.check(extent)
        del self.live[extent]
        self.arena.free(extent)

    @rule(data=st.data(), pages=st.integers(1, 16))
    def free_some_as_tried(self, data: st.DataObject, pages: int) -> None:
        chosen = data.draw(st.permutations(sorted(self.live, key=lambda e: (e.segment, e.offset))))
        chosen = chosen[: data.draw(st.integers(0, len(chosen)))]
        before = self.arena.stats()
        trial = self.arena.trial()
        for extent in chosen:
            trial.free(extent)
        fits = self.arena.fits_after(chosen, pages * PAGE_BYTES)
        assert fits == trial.fits(pages * PAGE_BYTES)
        assert self.arena.stats() == before, "asking changes nothing"
        if not fits:
            return
        for extent in chosen:
            del self.live[extent]
            self.arena.free(extent)
        placed = self.arena.allocate(pages * PAGE_BYTES)
        assert placed is not None
        self.arena.free(placed)

    @rule(budget=st.integers(0, 30))
    def resize(self, budget: int) -> None:
        over = self.arena.resize(budget * PAGE_BYTES)
        wanted = self.arena.used if self.punching else self.arena.reserved
        if self.arena.reserved > self.arena.budget:
            assert over == max(0, wanted - self.arena.budget)
        else:
            assert over == 0
        assert set(self.arena.to_vacate()) <= set(self.live)

    @rule()
    def release(self) -> None:
        self.arena.release_empty()
        assert set(self.segments) == {extent.segment for extent in self.live}

    @rule()
    def trim(self) -> None:
        self.arena.trim()

    def check(self, extent: Extent) -> None:
        assert set(bytes(self.arena.view(extent))) == {self.live[extent]}

    @invariant()
    def the_figures_add_up(self) -> None:
        if not hasattr(self, "arena"):
            return
        assert self.arena.used == sum(extent.nbytes for extent in self.live)
        assert {s.id: s.nbytes for s in self.arena.segments.values()} == self.segments
        assert self.arena.reserved == sum(self.segments.values())
        limit = max(self.arena.budget, self.arena.used)
        if self.punching:
            assert self.arena.resident <= limit, "memory follows the budget, or what is still in use"
        elif self.arena.reserved > self.arena.budget:
            assert all(segment.used for segment in self.arena.segments.values())
            assert self.arena.allocate(1) is None

    @invariant()
    def every_extent_has_its_bytes(self) -> None:
        for extent in getattr(self, "live", {}):
            self.check(extent)


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_memory_ahead_of_the_next_blocks_is_named_once_and_only_what_is_missing() -> None:
    arena = Arena(64 * MIB, segment_bytes=64 * MIB)
    first = arena.take_cold(24 * MIB)
    second = arena.take_cold(24 * MIB)
    assert first is not None
    assert second is not None
    assert len(first) + len(second) == 24 * MIB
    assert arena.take_cold(24 * MIB) is None, "as much as was asked for is there"
    extent = arena.allocate(10 * MIB)
    assert extent is not None
    assert extent.offset == 0, "what was made ready is used first"
    third = arena.take_cold(24 * MIB)
    assert third is not None
    assert len(third) == 10 * MIB
    arena.resize(10 * MIB)
    assert arena.take_cold(24 * MIB) is None, "not while the budget is lower than what there is"
    arena.close()


@linux
def test_memory_made_ready_goes_back_with_the_rest() -> None:
    arena = Arena(64 * MIB, segment_bytes=64 * MIB)
    extent = arena.allocate(MIB)
    run = arena.take_cold(16 * MIB)
    assert extent is not None
    assert run is not None
    assert populate(run, write=True)
    assert arena.resident >= 16 * MIB
    arena.trim()
    assert arena.resident <= MIB
    again = arena.take_cold(16 * MIB)
    assert again is not None
    assert len(again) == len(run)
    arena.close()
