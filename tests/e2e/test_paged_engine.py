"""The engine of docs/paged.md, as it stands there, with a real daemon behind it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import omlxd
from scripts.daemon_process import DaemonProcess
from tests.storage.paged_checks import check_invariants

DOC = Path(__file__).parents[2] / "docs" / "paged.md"
SIZE = 16
PROMPT = list(range(7, 7 + 10 * SIZE + 5))


@pytest.fixture(scope="module")
def engine_class() -> Any:
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(), flags=re.DOTALL)
    (source,) = [block for block in blocks if "class Engine" in block]
    scope: dict[str, Any] = {"__name__": "docs_paged"}
    exec(compile(source, str(DOC), "exec"), scope)
    return scope["Engine"]


def space_of(cache: omlxd.Cache, fingerprint: str = "f") -> omlxd.Space:
    return cache.namespace(model="org/toy", fingerprint=fingerprint, block_tokens=SIZE)


def expected(tokens: list[int]) -> list[int]:
    total, entries = 0, []
    for index, token in enumerate(tokens):
        total += (index + 1) * (token + 1)
        entries.append(total)
    return entries


def test_allocate_fill_register_release_evict_and_find_again_after_restarts(
    daemon: DaemonProcess, engine_class: Any
) -> None:
    with omlxd.connect(daemon.socket) as cache:
        engine = engine_class(space_of(cache), 24)
        table = engine.prefill("a", PROMPT)
        assert engine.read(table) == expected(PROMPT)
        assert engine.computed == len(PROMPT)
        engine.finish(table)
        assert engine.manager.size == 0

        # In memory: only what is not a full block is computed.
        table = engine.prefill("b", PROMPT)
        assert engine.read(table) == expected(PROMPT)
        assert engine.computed == len(PROMPT) + 5
        engine.finish(table)

        # Evicted from the engine's memory: from the daemon's.
        assert engine.manager.evict_lru_blocks(99) == 10
        engine.kv[:] = 0
        table = engine.prefill("c", PROMPT)
        assert engine.read(table) == expected(PROMPT)
        assert engine.computed == len(PROMPT) + 10
        assert engine.manager.cold_block_count == 0
        check_invariants(engine.manager)

    # Both processes gone: from the SSD.
    daemon.stop()
    daemon.start()
    with omlxd.connect(daemon.socket) as cache:
        space = space_of(cache)
        engine = engine_class(space, 24)
        assert space.match_keys(engine.cold.keys([b"x" * 32])).blocks == 0
        table = engine.prefill("d", PROMPT)
        assert engine.read(table) == expected(PROMPT)
        assert engine.computed == 5
        assert engine.manager.stats.hits == 10
        check_invariants(engine.manager)


def test_fork_copy_on_write_and_generate(daemon: DaemonProcess, engine_class: Any) -> None:
    with omlxd.connect(daemon.socket) as cache:
        engine = engine_class(space_of(cache), 64)
        table = engine.prefill("a", PROMPT)
        fork = engine.fork(table, "f")
        assert engine.manager.stats.shared_blocks == 11
        first = engine.generate(fork, PROMPT, [1] * 40)
        assert engine.manager.stats.shared_blocks == 0
        second = engine.generate(table, PROMPT, [2] * 40)
        assert engine.read(fork) == expected(first)
        assert engine.read(table) == expected(second)
        assert engine.manager.stats.cow_copies == 11
        engine.finish(fork)
        engine.finish(table)
        assert engine.manager.size == 0
        for tokens in (first, second):
            assert engine.manager.get_computed_blocks(tokens)[1] == len(tokens) // SIZE * SIZE
        check_invariants(engine.manager)


def test_one_lookup_round_trip_answers_for_a_whole_prompt(daemon: DaemonProcess, engine_class: Any) -> None:
    with omlxd.connect(daemon.socket) as cache:
        engine = engine_class(space_of(cache), 24)
        engine.finish(engine.prefill("a", PROMPT))
        engine.manager.reset_prefix_cache()
        questions: list[int] = []
        lookup_keys = engine.cold.space.lookup_keys

        def counted(hashes: list[bytes]) -> list[bool]:
            questions.append(len(hashes))
            return lookup_keys(hashes)

        engine.cold.space.lookup_keys = counted
        assert engine.manager.get_computed_blocks(PROMPT)[1] == 10 * SIZE
        assert questions == [10]


def test_another_namespace_with_the_same_model_name_finds_nothing(daemon: DaemonProcess, engine_class: Any) -> None:
    with omlxd.connect(daemon.socket) as cache:
        engine = engine_class(space_of(cache), 24)
        engine.finish(engine.prefill("a", PROMPT))
        other = engine_class(space_of(cache, "other weights"), 24)
        other.finish(other.prefill("a", PROMPT))
        assert other.computed == len(PROMPT)


def test_a_block_that_is_gone_when_it_is_claimed_is_computed_with_all_behind_it(
    daemon: DaemonProcess, engine_class: Any
) -> None:
    with omlxd.connect(daemon.socket) as cache:
        engine = engine_class(space_of(cache), 24)
        engine.finish(engine.prefill("a", PROMPT))
        assert engine.manager.evict_lru_blocks(99) == 10
        engine.kv[:] = 0
        blocks, _ = engine.manager.get_computed_blocks(PROMPT)
        gone = engine.cold.keys([blocks[4].block_hash])
        cache.call("remove", ns=cache._handle(cache._current(), engine.cold.space), keys=gone[0] + bytes(4))
        table = engine.prefill("b", PROMPT)
        assert engine.read(table) == expected(PROMPT)
        assert engine.computed == len(PROMPT) + 6 * SIZE + 5
        check_invariants(engine.manager)


def test_without_a_daemon_the_engine_computes(daemon: DaemonProcess, engine_class: Any, caplog: Any) -> None:
    with omlxd.connect(daemon.socket) as cache:
        engine = engine_class(space_of(cache), 24)
        engine.finish(engine.prefill("a", PROMPT))
        engine.manager.evict_lru_blocks(99)
        blocks, _ = engine.manager.get_computed_blocks(PROMPT)  # cold; now they can't be had
        assert len(blocks) == 10
        daemon.kill()
        table = engine.prefill("b", PROMPT)
        assert engine.read(table) == expected(PROMPT)
        assert engine.computed == 2 * len(PROMPT)
        engine.finish(table)
        table = engine.prefill("c", [1, *PROMPT])
        assert engine.read(table) == expected([1, *PROMPT])
        assert engine.cold.failures >= 2
        assert caplog.text.count("does not answer") == 1
        check_invariants(engine.manager)
        daemon.start()
        engine.finish(engine.prefill("d", [2, *PROMPT]))
        assert engine.cold.has_block(engine.manager.claim_computed_blocks([2, *PROMPT])[0][0].block_hash)
