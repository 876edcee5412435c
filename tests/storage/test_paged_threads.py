"""Eight threads on one small pool: nobody's block is taken away, and every number is right when they are
done.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from omlxd.storage.paged import PagedCacheManager
from tests.policy.models import LONG
from tests.storage.paged_checks import check_invariants

THREADS = 8
OPERATIONS = 100_000 if LONG else 12_500  # each
SIZE = 4
PROMPTS = [[p // 4, p % 4, *range(22)] for p in range(16)]


class HalfOfThem:
    """A cold tier that has every second block, as a pure function of its hash."""

    def has_blocks(self, hashes: list[bytes]) -> list[bool]:
        return [self.has_block(block_hash) for block_hash in hashes]

    def has_block(self, block_hash: bytes) -> bool:
        return block_hash[0] % 2 == 0


class Engine:
    """One thread's requests. It knows which content it put into each block that it holds, and checks that it
    stays.
    """

    def __init__(self, manager: PagedCacheManager, number: int) -> None:
        self.manager = manager
        self.random = random.Random(number)
        self.number = number
        self.requests: dict[str, list[bytes | None]] = {}
        self.errors: list[BaseException] = []
        self.count = 0

    def run(self) -> None:
        try:
            for step in range(OPERATIONS):
                self.step(step)
        except BaseException as error:
            self.errors.append(error)

    def step(self, step: int) -> None:
        choice = self.random.random()
        if len(self.requests) < 3 and choice < 0.5:
            self.begin(f"{self.number}/{step}")
        elif not self.requests:
            self.manager.evict_lru_blocks(1)
        else:
            request = self.random.choice(list(self.requests))
            if choice < 0.2:
                self.fork(request, f"{self.number}/{step}")
            elif choice < 0.4:
                self.generate(request)
            elif choice < 0.45:
                self.manager.handle_memory_pressure(2)
            elif choice < 0.5:
                self.manager.mark_block_cold(self.random.randrange(24))
            else:
                self.end(request)
            self.check(request)

    def begin(self, request: str) -> None:
        prompt = self.random.choice(PROMPTS)[: self.random.randrange(25)]
        found, _ = self.manager.claim_computed_blocks(prompt)
        try:
            blocks = found + self.manager.get_new_blocks(len(prompt) // SIZE - len(found))
        except ValueError:
            self.manager.release_for_eviction([block.block_id for block in reversed(found)])
            return
        table = self.manager.create_block_table(request)
        for block in blocks:
            self.manager.add_block_to_table(table, block, SIZE)
        self.manager.cache_full_blocks(blocks, prompt, len(found), len(blocks))
        self.requests[request] = [block.block_hash for block in blocks]
        assert None not in self.requests[request]

    def fork(self, request: str, new: str) -> None:
        table = self.manager.get_block_table(request)
        assert table is not None
        self.manager.fork_block_table(table, new)
        self.requests[new] = list(self.requests[request])

    def generate(self, request: str) -> None:
        table = self.manager.get_block_table(request)
        assert table is not None
        try:
            blocks, _ = self.manager.get_blocks_for_generation(table)
        except ValueError:
            return
        self.requests[request] = [block.block_hash for block in blocks]

    def end(self, request: str) -> None:
        del self.requests[request]
        if self.random.random() < 0.3:
            self.manager.delete_block_table(request)
        else:
            self.manager.release_block_table(request)

    def check(self, request: str) -> None:
        """What is held still has the content that it had."""
        if request not in self.requests:
            return
        table = self.manager.get_block_table(request)
        assert table is not None
        blocks = [self.manager.blocks[block_id] for block_id in table.block_ids]
        assert [block.block_hash for block in blocks] == self.requests[request]
        assert all(block.ref_count > 0 for block in blocks)


@pytest.fixture
def often_interrupted() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("often_interrupted")
def test_eight_threads_keep_every_invariant() -> None:
    manager = PagedCacheManager(SIZE, 64, model_name="m", initial_blocks=16)
    manager.set_paged_ssd_cache_manager(HalfOfThem())
    engines = [Engine(manager, number) for number in range(THREADS)]
    threads = [threading.Thread(target=engine.run) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [engine.errors for engine in engines] == [[]] * THREADS
    check_invariants(manager)
    held = Counter(block_id for table in manager.request_tables.values() for block_id in table.block_ids)
    assert {
        block.block_id: block.ref_count for block in manager.blocks if block.ref_count and not block.is_null
    } == held
    assert manager.stats.hits
    assert manager.stats.evictions
    for engine in engines:
        for request in list(engine.requests):
            engine.end(request)
    assert manager.size == 0
    assert manager.reset_prefix_cache()
    check_invariants(manager)
    assert manager.stats.total_tokens_cached == 0
