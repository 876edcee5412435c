"""The matrix: every kind of model and cache class x what must be exact after a restore.

"A run without omlxd" is :func:`run`: plain mlx-lm objects, given the same pieces of the same tokens.
"Exact" is bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

import omlxd
from omlxd.engines import caches
from omlxd.engines.mlx_lm import PromptCache, stream_generate
from scripts.daemon_process import DaemonProcess
from tests.model.tiny import KINDS, Kind, NumberTokenizer, build, prompt

pytestmark = pytest.mark.model

SIZE = 16
BLOCKS = 9
ANSWER = 40


@dataclass
class Subject:
    """A model in small, and a prompt cache for it in a namespace that no other test has."""

    kind: Kind
    model: Any
    folder: Path
    client: omlxd.Cache

    def kept(self, salt: str, **options: Any) -> PromptCache:
        return PromptCache(
            self.client,
            self.model,
            self.folder,
            block_tokens=SIZE,
            snapshot_tokens=SIZE,
            salt=salt,
            raise_errors=True,
            **{**self.kind.options, **options},
        )

    def run(self, tokens: list[int], pieces: list[int]) -> tuple[mx.array, list[Any]]:
        """Logits after the last token, and the cache, without omlxd."""
        cache = make_prompt_cache(self.model, self.kind.options.get("max_kv_size"))
        start, logits = 0, mx.zeros(())
        for count in pieces:
            logits = self.model(mx.array(tokens[start : start + count])[None], cache=cache)[0, -1]
            options = {"kv_bits": None, "kv_group_size": 64, "quantized_kv_start": 0, **self.kind.options}
            options.pop("max_kv_size", None)
            maybe_quantize_kv_cache(cache, **options)
            mx.eval(logits, [layer.state for layer in cache])
            start += count
        assert start == len(tokens)
        return logits, cache

    def answer(self, tokens: list[int], count: int = ANSWER, **options: Any) -> list[int]:
        """A greedy continuation by mlx-lm alone."""
        return [
            response.token
            for response in mlx_lm.stream_generate(
                self.model, NumberTokenizer(), tokens, max_tokens=count, prefill_step_size=SIZE, **self.kind.options
            )
        ]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def subject(
    request: pytest.FixtureRequest, daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    folder = tmp_path_factory.mktemp("model")
    with omlxd.connect(daemon.socket) as client:
        yield Subject(request.param, build(request.param, folder), folder, client)


def pieces(tokens: int) -> list[int]:
    """How a prompt of so many tokens is computed: whole blocks, the rest but one, the last one."""
    whole = (tokens - 1) // SIZE
    rest = tokens - whole * SIZE
    return [SIZE] * whole + [count for count in (rest - 1, 1) if count]


def cut(counts: list[int], tokens: int) -> list[int]:
    """The pieces before a boundary."""
    result: list[int] = []
    while sum(result) < tokens:
        result.append(min(counts[len(result)], tokens - sum(result)))
    return result


def continued(subject: Subject, kept: PromptCache, tokens: list[int]) -> tuple[mx.array, int]:
    """Logits after ``tokens``, with omlxd, and how many of them were restored."""
    cache, restored = kept.restore(tokens)
    start = kept.prefill(tokens, cache, restored)
    logits = mx.zeros(())
    for count in pieces(len(tokens))[start // SIZE :]:
        logits = subject.model(mx.array(tokens[start : start + count])[None], cache=cache)[0, -1]
        start += count
    return logits, restored


def assert_bits_equal(one: mx.array, other: mx.array) -> None:
    assert one.dtype == other.dtype
    assert mx.array_equal(one.view(mx.uint8), other.view(mx.uint8)), f"off by up to {mx.abs(one - other).max()}"


def stored_bytes(kept: PromptCache, tokens: list[int]) -> list[bytes | None]:
    """What the daemon has of a prompt, in all groups."""
    spaces = kept.spaces(tokens=len(tokens)).values()
    return [space.get(chain_hash) for space in spaces for chain_hash in space.hashes(tokens)]


def test_the_model_uses_the_cache_classes_it_stands_for(subject: Subject) -> None:
    _, cache = subject.run(prompt(SIZE * 4), [SIZE] * 4)
    found = {type(leaf).__name__ for _, leaf in caches.leaves(cache)}
    assert found <= set(subject.kind.classes)
    if subject.kind.options.get("quantized_kv_start", 0) == 0:
        assert found == set(subject.kind.classes)


def test_logits_after_a_restore_at_every_block_boundary(subject: Subject) -> None:
    kept = subject.kept("boundaries")
    tokens = prompt(SIZE * BLOCKS + 5)
    kept.prefill(tokens, kept.restore(tokens)[0])
    for blocks in range(1, BLOCKS + 1):
        for tail in (1, 5, SIZE):
            branch = tokens[: blocks * SIZE] + prompt(tail, seed=blocks)
            cache, restored = kept.restore(branch)
            assert restored == blocks * SIZE
            expected, _ = subject.run(branch, [SIZE] * blocks + [tail])
            assert_bits_equal(subject.model(mx.array(branch[restored:])[None], cache=cache)[0, -1], expected)


def test_a_prompt_of_whole_blocks_leaves_its_last_block_to_be_computed(subject: Subject) -> None:
    kept = subject.kept("whole")
    tokens = prompt(SIZE * 4)
    miss, _ = continued(subject, kept, tokens)
    expected, cache = subject.run(tokens, pieces(SIZE * 4))
    kept.save(tokens, cache)
    hit, restored = continued(subject, kept, tokens)
    assert restored == SIZE * 3
    assert_bits_equal(miss, expected)
    assert_bits_equal(hit, expected)


def test_greedy_continuations_of_miss_and_hit_are_mlx_lms(subject: Subject) -> None:
    kept = subject.kept("greedy")
    tokens = prompt(SIZE * 5 + 5)
    expected = subject.answer(tokens)
    assert len(set(expected)) > 5, "this model repeats itself: its answers show nothing"
    for hit in (False, True):
        found = list(stream_generate(subject.model, NumberTokenizer(), tokens, prompt_cache=kept, max_tokens=ANSWER))
        assert [response.token for response in found] == expected
        assert found[-1].prompt_tokens == len(tokens)
        assert kept.stats.restored_tokens == (SIZE * 5 if hit else 0)


def test_the_second_turn_of_a_conversation(subject: Subject) -> None:
    kept = subject.kept("turns")
    first = prompt(SIZE * 4 + 3)
    answer = [
        response.token
        for response in stream_generate(subject.model, NumberTokenizer(), first, prompt_cache=kept, max_tokens=ANSWER)
    ]
    second = first + answer + prompt(SIZE + 7, seed=2)
    found, restored = continued(subject, kept, second)
    assert restored >= SIZE * 4
    computed = cut(pieces(len(first)) + [1] * ANSWER, restored)
    rest = pieces(len(second))[restored // SIZE :]
    expected, _ = subject.run(second, computed + rest)
    assert_bits_equal(found, expected)


def test_an_answer_that_ends_with_a_block_is_restored_whole(subject: Subject) -> None:
    kept = subject.kept("whole answer")
    first = prompt(SIZE * 4 + 3)
    count = SIZE * 2 - 3
    stream = stream_generate(subject.model, NumberTokenizer(), first, prompt_cache=kept, max_tokens=count)
    answer = [response.token for response in stream]
    second = first + answer + prompt(5, seed=2)
    found, restored = continued(subject, kept, second)
    if caches.Group.WINDOW not in kept.spaces(tokens=len(second)):  # a ring has overwritten blocks that it needs
        assert restored == SIZE * 6
    computed = cut(pieces(len(first)) + [1] * count, restored)
    expected, _ = subject.run(second, computed + pieces(len(second))[restored // SIZE :])
    assert_bits_equal(found, expected)


def test_branches_of_a_conversation_do_not_disturb_each_other(subject: Subject) -> None:
    kept = subject.kept("branches")
    trunk = prompt(SIZE * 3)
    branches = [trunk + prompt(SIZE * 3 + 2, seed=seed) for seed in (5, 6, 7)]
    for _ in range(2):
        for branch in branches:
            found, _ = continued(subject, kept, branch)
            expected, _ = subject.run(branch, pieces(len(branch)))
            assert_bits_equal(found, expected)
    assert kept.stats.restored_tokens == 2 * SIZE * 3 + 3 * SIZE * 6


def test_after_a_block_in_the_middle_is_gone(subject: Subject) -> None:
    kept = subject.kept("middle")
    tokens = prompt(SIZE * 6 + 4)
    expected, _ = subject.run(tokens, pieces(len(tokens)))
    continued(subject, kept, tokens)
    for space in kept.spaces(tokens=SIZE * 6).values():
        key = space.hashes(tokens)[3] + bytes(4)
        subject.client.call("remove", keys=key)
    found, restored = continued(subject, kept, tokens)
    # Recurrent state and windows can be restored behind a gap that attention can't bridge.
    assert restored <= SIZE * 6
    if caches.Group.ATTENTION in kept.spaces(tokens=SIZE * 6):
        assert restored == SIZE * 3
    assert_bits_equal(found, expected)
    again, restored = continued(subject, kept, tokens)
    assert restored == SIZE * 6
    assert_bits_equal(again, expected)


def test_continuing_a_restored_cache_changes_no_stored_block(subject: Subject) -> None:
    kept = subject.kept("unchanged")
    tokens = prompt(SIZE * 3 + 1)
    continued(subject, kept, tokens)
    before = stored_bytes(kept, tokens)
    assert None not in before
    cache, restored = kept.restore(tokens)
    for token in prompt(SIZE * 3, seed=9):
        mx.eval(subject.model(mx.array([[token]]), cache=cache))
    assert restored == SIZE * 3
    assert stored_bytes(kept, tokens) == before


def test_a_salt_keeps_blocks_apart(subject: Subject) -> None:
    tokens = prompt(SIZE * 2 + 1)
    mine, theirs = subject.kept("lora a"), subject.kept("lora b")
    mine.prefill(tokens, mine.restore(tokens)[0])
    assert mine.restore(tokens)[1] == SIZE * 2
    assert theirs.restore(tokens)[1] == 0
