from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from omlxd.storage.extents import ExtentAllocator, Supposition

CAPACITY = 48
FREE = 0


class AgainstAByteArray(RuleBasedStateMachine):
    """The model is one byte per byte: 0 free, else the number of the extent that has it."""

    extents = Bundle("extents")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = ExtentAllocator(CAPACITY)
        self.model = bytearray(CAPACITY)
        self.taken: dict[int, tuple[int, int]] = {}
        self.next_owner = 1

    def holes(self, model: bytearray) -> list[tuple[int, int]]:
        holes, start = [], None
        for offset, owner in enumerate([*model, 1]):
            if owner == FREE and start is None:
                start = offset
            elif owner != FREE and start is not None:
                holes.append((start, offset - start))
                start = None
        return holes

    @rule(target=extents, nbytes=st.integers(1, 20))
    def allocate(self, nbytes: int) -> object:
        fitting = [(size, offset) for offset, size in self.holes(self.model) if size >= nbytes]
        assert self.allocator.best_fit(nbytes) == (min(fitting)[0] if fitting else None)
        offset = self.allocator.allocate(nbytes)
        if not fitting:
            assert offset is None
            return multiple()
        assert offset == min(fitting)[1], "the smallest hole that is large enough, the lowest among equals"
        owner = self.next_owner
        self.next_owner = owner % 250 + 1
        while self.next_owner in self.taken:
            self.next_owner = self.next_owner % 250 + 1
        self.model[offset : offset + nbytes] = bytes([owner]) * nbytes
        self.taken[owner] = (offset, nbytes)
        return owner

    @rule(owner=consumes(extents))
    def free(self, owner: int) -> None:
        offset, nbytes = self.taken.pop(owner)
        self.allocator.free(offset, nbytes)
        self.model[offset : offset + nbytes] = bytes(nbytes)
        with pytest.raises(ValueError, match=f"extent at {offset}"):
            self.allocator.free(offset, nbytes)

    @rule(owner=extents, shift=st.integers(-3, 3), growth=st.integers(-3, 3))
    def free_what_was_never_handed_out(self, owner: int, shift: int, growth: int) -> None:
        offset, nbytes = self.taken[owner]
        wrong = (offset + shift, nbytes + growth)
        if wrong not in self.taken.values():
            with pytest.raises(ValueError, match=f"extent at {wrong[0]}"):
                self.allocator.free(*wrong)

    @rule(data=st.data(), nbytes=st.integers(1, CAPACITY))
    def suppose(self, data: st.DataObject, nbytes: int) -> None:
        chosen = data.draw(st.permutations(sorted(self.taken)))
        chosen = chosen[: data.draw(st.integers(0, len(chosen)))]
        model = bytearray(self.model)
        for owner in chosen:
            offset, size = self.taken[owner]
            model[offset : offset + size] = bytes(size)
        largest = max((size for _, size in self.holes(model)), default=0)
        supposed = Supposition(self.allocator)
        for owner in chosen:
            supposed.free(*self.taken[owner])
        assert supposed.largest_free == largest
        assert supposed.used == CAPACITY - model.count(FREE)
        assert self.allocator.fits_after([self.taken[owner] for owner in chosen], nbytes) == (nbytes <= largest)

    @rule()
    def give_back_touched_holes(self) -> None:
        for offset, _ in self.allocator.touched_holes():
            self.allocator.forget_touched(offset)
        assert self.allocator.touched_holes() == []

    @invariant()
    def holes_are_those_of_the_model(self) -> None:
        holes = list(self.allocator.holes())
        assert holes == self.holes(self.model)
        assert all(one + size < other for (one, size), (other, _) in pairwise(holes)), "neighbours merge"
        assert set(self.allocator.touched_holes()) <= set(holes)

    @invariant()
    def the_figures_add_up(self) -> None:
        free = self.model.count(FREE)
        largest = max((size for _, size in self.holes(self.model)), default=0)
        assert self.allocator.free_bytes == free
        assert self.allocator.used == CAPACITY - free
        assert self.allocator.largest_free == largest
        assert len(self.allocator) == len(self.taken)
        assert self.allocator.fragmentation == pytest.approx(1 - largest / free if free else 0)


TestAgainstAByteArray = AgainstAByteArray.TestCase
TestAgainstAByteArray.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_freed_hole_counts_as_touched_until_it_is_given_back_and_so_does_what_is_left_of_it() -> None:
    allocator = ExtentAllocator(100)
    assert allocator.touched_holes() == []
    first = allocator.allocate(10)
    assert allocator.touched_holes() == [], "what was never handed out has no memory behind it"
    assert first == 0
    allocator.free(0, 10)
    assert allocator.touched_holes() == [(0, 100)]
    allocator.forget_touched(0)
    allocator.allocate(10)
    assert allocator.touched_holes() == []
    allocator.free(0, 10)
    allocator.allocate(4)
    assert allocator.touched_holes() == [(4, 96)]


def test_one_extent_cannot_be_supposed_free_twice() -> None:
    allocator = ExtentAllocator(10)
    allocator.allocate(5)
    with pytest.raises(ValueError, match="named twice"):
        allocator.fits_after([(0, 5), (0, 5)], 10)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_empty_extent_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match=str(nbytes)):
        ExtentAllocator(10).allocate(nbytes)


def test_an_allocator_over_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        ExtentAllocator(0)
