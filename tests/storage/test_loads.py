"""One load against a made-up source: whatever order blocks come in, the lease is a prefix, and every pin is undone."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlxd.policy.base import ChunkStatus, RequestContext
from omlxd.storage.arena import Extent
from omlxd.storage.blocks import BlockMeta
from omlxd.storage.loads import WAIT, Load, Part
from omlxd.storage.ram import RamBlock


def key(index: int) -> bytes:
    return index.to_bytes(36, "big")


class Blocks:
    """A source in which each block is in RAM, on its way, to be waited for, or nowhere."""

    def __init__(self, states: Sequence[str]) -> None:
        self.states = dict(enumerate(states))
        self.blocks = [RamBlock(BlockMeta(key(i), b"n" * 32, 100, None, i), Extent(1, i, 4096)) for i in self.states]
        for block in self.blocks:
            block.chunk = ChunkStatus(0)
            block.chunk.ref_cnt = 0
        self.pins: Counter[int] = Counter()
        self.asked: list[int] = []
        self.outstanding: list[int] = []
        self.finished = 0

    def take_ready(self, load: Load, keys: Sequence[bytes], *, past_holes: bool = False) -> list[RamBlock | None]:
        found: list[RamBlock | None] = []
        for one in keys:
            index = int.from_bytes(one, "big")
            if self.states[index] == "ram":
                self.pins[index] += 1
                found.append(self.blocks[index])
            elif past_holes and self.states[index] in ("ssd", "full"):
                found.append(None)
            else:
                break
        return found

    def ask_for(self, load: Load, index: int) -> str | None:
        state = self.states[index]
        if state == "ssd":
            assert index not in self.outstanding, "asked twice"
            self.asked.append(index)
            self.outstanding.append(index)
            return None
        return WAIT if state == "full" else "miss"

    def give_back(self, load: Load, blocks: Sequence[RamBlock]) -> None:
        for block in blocks:
            self.pins[block.meta.position] -= 1
            assert self.pins[block.meta.position] >= 0, "given back twice"

    def load_finished(self, load: Load) -> None:
        self.finished += 1

    def arrive(self, load: Load, index: int) -> None:
        self.outstanding.remove(index)
        self.pins[index] += 1
        load.arrived(index, self.blocks[index])

    def fail(self, load: Load, index: int) -> None:
        self.outstanding.remove(index)
        load.failed(index, "damaged")


def a_load(source: Blocks, *, window: int = 4) -> Load:
    keys = [key(index) for index in source.states]
    return Load(1, "owner", keys, RequestContext("test"), source, window=window, since=0.0)


states = st.lists(st.sampled_from(["ram", "ram", "ssd", "ssd", "ssd", "full", "miss"]), max_size=24)


@settings(deadline=None, max_examples=300)
@given(states, st.integers(1, 6), st.integers(0, 1 << 30), st.sampled_from(["all", "early release", "deadline"]))
def test_a_lease_is_a_prefix_and_every_pin_is_undone(start: list[str], window: int, seed: int, end: str) -> None:
    async def work() -> None:
        rng = random.Random(seed)
        source = Blocks(start)
        parts: list[Part] = []
        load = a_load(source, window=window)
        failed: set[int] = set()
        load.begin(60.0, parts.append)
        for _ in range(200):
            if load.finished:
                break
            assert len(source.outstanding) <= window
            full = [index for index, state in source.states.items() if state == "full"]
            if source.outstanding and (rng.random() < 0.8 or not full):
                index = rng.choice(source.outstanding)
                if rng.random() < 0.1:
                    failed.add(index)
                    source.fail(load, index)
                else:
                    source.arrive(load, index)
            elif full:  # room comes
                source.states[rng.choice(full)] = rng.choice(["ssd", "ram", "miss"])
                load.advance()
            if rng.random() < 0.05 and end != "all":
                break
        if end == "deadline":
            load.end("deadline")
        handed = [block.meta.position for part in parts for block in part.blocks]
        assert handed == list(range(len(handed))), "in order, without holes, each once"
        assert handed == [block.meta.position for block in load.blocks][: len(handed)]
        if load.finished:
            assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
            assert source.finished == 1
            assert len(handed) == len(load.blocks)
            stopped_early = len(load.blocks) < len(start)
            assert stopped_early is (parts[-1].stopped is not None)
        if end == "all":
            expected = next((i for i, s in source.states.items() if s == "miss" or i in failed), len(start))
            assert len(load.blocks) == expected
        load.release()
        load.release()
        for index in list(source.outstanding):  # what was on its way arrives in an ended load
            source.arrive(load, index)
        assert not +source.pins, "a block stays pinned"
        assert source.finished == 1

    asyncio.run(work())


def test_what_is_all_in_ram_is_one_part_at_once() -> None:
    source = Blocks(["ram"] * 5)
    parts: list[Part] = []
    load = a_load(source)
    load.begin(None, parts.append)
    assert [(len(part.blocks), part.last, part.stopped) for part in parts] == [(5, True, None)]


def test_without_a_deadline_nothing_is_asked_for() -> None:
    source = Blocks(["ram", "ssd", "ram"])
    parts: list[Part] = []
    load = a_load(source)
    load.begin(None, parts.append)
    assert [(len(part.blocks), part.last, part.stopped) for part in parts] == [(1, True, "not_in_ram")]
    assert not source.asked
    load.release()
    assert not +source.pins


def test_blocks_behind_a_hole_are_kept_and_given_up_for_room() -> None:
    async def work() -> None:
        source = Blocks(["ssd", "ram", "ram"])
        load = a_load(source)
        load.begin(60.0, lambda part: None)
        assert source.pins[1] == source.pins[2] == 1
        assert load.give_up_tail(0)
        assert not +source.pins
        assert not load.give_up_tail(0)
        source.arrive(load, 0)
        assert len(load.blocks) == 3, "taken again, as they are still there"
        load.release()
        assert not +source.pins

    asyncio.run(work())


def test_the_deadline_ends_it() -> None:
    async def work() -> None:
        source = Blocks(["ram", "ssd"])
        done = asyncio.Event()
        parts: list[Part] = []

        def emit(part: Part) -> None:
            parts.append(part)
            if part.last:
                done.set()

        load = a_load(source)
        load.begin(0.01, emit)
        await asyncio.wait_for(done.wait(), 10)
        assert parts[-1].stopped == "deadline"
        assert [len(part.blocks) for part in parts] == [1, 0]
        load.release()
        assert not +source.pins

    asyncio.run(work())


@pytest.mark.parametrize("window", [1, 3, 8])
def test_no_more_than_the_window_is_under_way(window: int) -> None:
    async def work() -> None:
        source = Blocks(["ssd"] * 20)
        load = a_load(source, window=window)
        load.begin(60.0, lambda part: None)
        while source.outstanding:
            assert len(source.outstanding) <= window
            source.arrive(load, source.outstanding[-1])
        assert len(load.blocks) == 20

    asyncio.run(work())
