"""What a prompt cache does when things are not as they should be, and between processes."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

import omlxd
from omlxd.engines.caches import UnsupportedCacheError
from omlxd.engines.mlx_lm import PromptCache, generate, stream_generate
from scripts.daemon_process import DaemonProcess
from tests.model.tiny import KINDS, NumberTokenizer, build, prompt

pytestmark = pytest.mark.model

SIZE = 16
LLAMA = KINDS[0]
ANSWER = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "llama"


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return build(LLAMA, folder)


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[omlxd.Cache]:
    with omlxd.connect(daemon.socket) as client:
        yield client


def plain(model: Any, tokens: list[int]) -> list[int]:
    tokenizer = NumberTokenizer()
    return [
        r.token for r in mlx_lm.stream_generate(model, tokenizer, tokens, max_tokens=ANSWER, prefill_step_size=SIZE)
    ]


def ours(model: Any, tokens: list[int], kept: PromptCache) -> list[int]:
    tokenizer = NumberTokenizer()
    return [r.token for r in stream_generate(model, tokenizer, tokens, prompt_cache=kept, max_tokens=ANSWER)]


# -- no daemon


def test_without_a_daemon_the_engine_computes_on_and_says_so_once(
    model: Any, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = PromptCache(tmp_path / "nobody", model, folder, block_tokens=SIZE)
    tokens = prompt(SIZE * 3 + 2)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert ours(model, tokens, kept) == plain(model, tokens)
    assert kept.stats.unavailable > 2
    assert kept.stats.misses == 2
    assert len([record for record in caplog.records if "nobody" in record.getMessage()]) == 1


def test_without_a_daemon_it_raises_when_asked_to(model: Any, folder: Path, tmp_path: Path) -> None:
    kept = PromptCache(tmp_path / "nobody", model, folder, block_tokens=SIZE, raise_errors=True)
    with pytest.raises(omlxd.Unavailable):
        kept.restore(prompt(SIZE * 3))


def test_a_daemon_that_comes_later_is_found(model: Any, folder: Path, tmp_path: Path) -> None:
    process = DaemonProcess(tmp_path / "daemon")
    kept = PromptCache(process.socket, model, folder, block_tokens=SIZE)
    kept._daemon._clock = lambda: 0.0 if not started else 1e9
    started: list[bool] = []
    tokens = prompt(SIZE * 3 + 2)
    assert ours(model, tokens, kept) == plain(model, tokens)
    with process:
        started.append(True)
        assert ours(model, tokens, kept) == plain(model, tokens)
        assert kept.restore(tokens)[1] == SIZE * 3


def test_a_daemon_that_is_killed_and_started_again_between_tokens(model: Any, folder: Path, tmp_path: Path) -> None:
    tokens = prompt(SIZE * 3 + 2)
    expected = plain(model, tokens)
    with DaemonProcess(tmp_path / "daemon") as process:
        kept = PromptCache(omlxd.connect(process.socket), model, folder, block_tokens=SIZE)
        stream = stream_generate(model, NumberTokenizer(), tokens, prompt_cache=kept, max_tokens=ANSWER)
        found = [next(stream).token]
        process.kill()
        found += [response.token for response in stream]
        assert found == expected
        process.start()
        assert ours(model, tokens, kept) == expected


# -- what can't be kept


class StrangeCache(KVCache):  # type: ignore[misc]
    pass


def test_an_unknown_cache_class_is_named_and_the_engine_computes_on(
    model: Any, folder: Path, client: omlxd.Cache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(SIZE * 3 + 2)
    expected = plain(model, tokens)
    monkeypatch.setattr(type(model), "make_cache", lambda self: [StrangeCache() for _ in self.layers])
    with caplog.at_level(logging.WARNING):
        kept = PromptCache(client, model, folder, block_tokens=SIZE)
        assert ours(model, tokens, kept) == expected
    assert "StrangeCache" in caplog.text
    assert kept.stats.refused == {"UnsupportedCacheError": 1}
    assert "StrangeCache" in (kept.save(tokens, kept.fresh()).failed or "")
    with pytest.raises(UnsupportedCacheError, match="StrangeCache"):
        PromptCache(client, model, folder, block_tokens=SIZE, raise_errors=True)


def test_a_cache_of_another_form_is_refused_and_counted(model: Any, folder: Path, client: omlxd.Cache) -> None:
    kept = PromptCache(client, model, folder, block_tokens=SIZE)
    tokens = prompt(SIZE * 2)
    cache = make_prompt_cache(model)
    model(mx.array(tokens)[None], cache=cache)
    quantized = [layer.to_quantized(group_size=32, bits=8) for layer in cache]
    assert "QuantizedKVCache" in (kept.save(tokens, quantized).failed or "")
    assert kept.stats.refused.total() == 1


def test_a_batch_is_kept_row_by_row_and_refused_as_a_whole(model: Any, folder: Path, client: omlxd.Cache) -> None:
    kept = PromptCache(client, model, folder, block_tokens=SIZE, salt="batch")
    prompts = [prompt(SIZE * 2, seed=1), prompt(SIZE * 2, seed=2)]
    cache = make_prompt_cache(model)
    model(mx.array(prompts), cache=cache)
    assert "row" in (kept.save(prompts[0], cache).failed or "")
    singles = []
    for tokens in prompts:
        single = make_prompt_cache(model)
        model(mx.array(tokens)[None], cache=single)
        singles.append(single)
    batch = [KVCache.merge(layers) for layers in zip(*singles, strict=True)]
    for index, tokens in enumerate(prompts):
        assert kept.save(tokens, batch, row=index).stored == 2
        restored, count = kept.restore([*tokens, 1])
        assert count == SIZE * 2
        assert mx.array_equal(restored[0].keys[..., : SIZE * 2, :], singles[index][0].keys[..., : SIZE * 2, :])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_tokens": 0}, "block_tokens=0"),
        ({"prefill_blocks": 0}, "prefill_blocks=0"),
        ({"snapshot_tokens": 24, "block_tokens": 16}, "snapshot_tokens=24"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(model: Any, folder: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptCache(None, model, folder, **options)


def test_another_precision_than_the_prompt_caches_is_refused(model: Any, folder: Path, client: omlxd.Cache) -> None:
    kept = PromptCache(client, model, folder, block_tokens=SIZE)
    with pytest.raises(ValueError, match="kv_bits=4"):
        generate(model, NumberTokenizer(), prompt(20), prompt_cache=kept, kv_bits=4)


def test_a_prefill_of_a_longer_cache_than_the_prompt_is_refused(model: Any, folder: Path, client: omlxd.Cache) -> None:
    kept = PromptCache(client, model, folder, block_tokens=SIZE)
    with pytest.raises(ValueError, match="more than the prompt's 5"):
        kept.prefill(prompt(5), kept.fresh(), 6)


# -- what is kept, and when


def test_who_gives_up_in_the_middle_of_a_prompt_has_not_computed_in_vain(
    model: Any, folder: Path, client: omlxd.Cache
) -> None:
    kept = PromptCache(client, model, folder, block_tokens=SIZE, salt="given up")
    tokens = prompt(SIZE * 8)

    class GivenUpError(Exception):
        pass

    def progress(done: int, total: int) -> None:
        if done == SIZE * 3:
            raise GivenUpError

    with pytest.raises(GivenUpError):
        kept.prefill(tokens, kept.fresh(), 0, progress=progress)
    assert kept.restore(tokens)[1] == SIZE * 3


def test_who_stops_reading_the_answer_has_it_kept(model: Any, folder: Path, client: omlxd.Cache) -> None:
    kept = PromptCache(client, model, folder, block_tokens=SIZE, salt="stopped")
    tokens = prompt(SIZE * 2 + 1)
    answer = []
    stream = stream_generate(model, NumberTokenizer(), tokens, prompt_cache=kept, max_tokens=-1)
    for response in stream:
        answer.append(response.token)
        if len(answer) == SIZE * 2:
            break
    stream.close()
    assert kept.restore(tokens + answer + [1])[1] == SIZE * 4


def test_nothing_is_asked_of_the_daemon_between_tokens(model: Any, folder: Path, client: omlxd.Cache) -> None:
    kept = PromptCache(client, model, folder, block_tokens=SIZE, salt="quiet")
    stream = stream_generate(model, NumberTokenizer(), prompt(SIZE * 2 + 1), prompt_cache=kept, max_tokens=ANSWER)
    next(stream)
    client.close()  # whoever asked now would be told that this client is closed
    assert len(list(stream)) == ANSWER - 1
    assert kept.stats.unavailable == 1, "one call: the save at the end"


def test_progress_and_logits_processors_see_what_mlx_lm_alone_shows_them(
    model: Any, folder: Path, client: omlxd.Cache
) -> None:
    kept = PromptCache(client, model, folder, block_tokens=SIZE, salt="progress")
    tokens = prompt(SIZE * 3 + 4)
    alone: list[list[int]] = []

    def watching(context: mx.array, logits: mx.array) -> mx.array:
        alone.append(context.tolist())
        return logits

    list(mlx_lm.stream_generate(model, NumberTokenizer(), tokens, max_tokens=2, logits_processors=[watching]))
    for expected_first in (0, SIZE * 3):
        seen: list[tuple[int, int]] = []
        shown: list[list[int]] = []

        def processor(context: mx.array, logits: mx.array, shown: list[list[int]] = shown) -> mx.array:
            shown.append(context.tolist())
            return logits

        def progress(done: int, total: int, seen: list[tuple[int, int]] = seen) -> None:
            seen.append((done, total))

        list(
            stream_generate(
                model,
                NumberTokenizer(),
                tokens,
                prompt_cache=kept,
                max_tokens=2,
                prompt_progress_callback=progress,
                logits_processors=[processor],
            )
        )
        assert shown == alone
        assert seen[0] == (expected_first, len(tokens))
        assert seen[-1] == (len(tokens), len(tokens))
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_generate_is_mlx_lms_with_and_without_a_kept_cache(model: Any, folder: Path, client: omlxd.Cache) -> None:
    kept = PromptCache(client, model, folder, block_tokens=SIZE, salt="generate")
    tokens = prompt(SIZE * 2 + 3)
    expected = mlx_lm.generate(model, NumberTokenizer(), tokens, max_tokens=ANSWER, prefill_step_size=SIZE)
    assert generate(model, NumberTokenizer(), tokens, prompt_cache=kept, max_tokens=ANSWER) == expected
    assert generate(model, NumberTokenizer(), tokens, max_tokens=ANSWER, prefill_step_size=SIZE) == expected


def test_larger_pieces_store_the_same_blocks(model: Any, folder: Path, client: omlxd.Cache) -> None:
    kept = PromptCache(client, model, folder, block_tokens=SIZE, prefill_blocks=4, salt="pieces")
    tokens = prompt(SIZE * 10 + 1)
    seen: list[int] = []
    kept.prefill(tokens, kept.fresh(), 0, progress=lambda done, total: seen.append(done))
    assert seen == [SIZE * 4, SIZE * 8, SIZE * 10]
    assert kept.restore(tokens[: SIZE * 5 + 3])[1] == SIZE * 5


def test_changed_weights_are_another_namespace(model: Any, folder: Path, client: omlxd.Cache, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / folder.name)
    tokens = prompt(SIZE * 2 + 1)
    first = PromptCache(client, model, copy, block_tokens=SIZE, salt="changing")
    first.prefill(tokens, first.fresh(), 0)
    assert PromptCache(client, model, copy, block_tokens=SIZE, salt="changing").restore(tokens)[1] == SIZE * 2
    build(LLAMA, copy, seed=8)
    assert PromptCache(client, model, copy, block_tokens=SIZE, salt="changing").restore(tokens)[1] == 0
    assert first.restore(tokens)[1] == SIZE * 2, "the model that is loaded is the one of before"


def test_two_engine_processes_at_once_share_one_namespace(daemon: DaemonProcess, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build(LLAMA, folder)  # the engines make the same weights from the same seed
    trunk = prompt(SIZE * 6, seed=11)
    prompts = [trunk + prompt(SIZE * 2 + 5, seed=seed) for seed in (12, 13, 14, 15)]
    engines = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.model.engine_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=daemon.environment,
            text=True,
        )
        for _ in range(2)
    ]
    jobs = [prompts, prompts[::-1]]
    for engine, job in zip(engines, jobs, strict=True):
        assert engine.stdin is not None
        json.dump({"socket": str(daemon.socket), "folder": str(folder), "prompts": job}, engine.stdin)
        engine.stdin.close()
    results = []
    for engine in engines:
        assert engine.stdout is not None
        results.append(json.loads(engine.stdout.read()))
        assert engine.wait(120) == 0
    logits: dict[str, set[str]] = {}
    for result, job in zip(results, jobs, strict=True):
        for one, tokens in zip(result, job, strict=True):
            logits.setdefault(str(tokens), set()).add(one["logits"])
    assert all(len(found) == 1 for found in logits.values()), "a hit and a miss computed different logits"
    restored = [one["restored"] for result in results for one in result]
    assert sum(restored) >= SIZE * 6 * 6, "all but the first prompts reuse the trunk"
    third = subprocess.run(
        [sys.executable, "-m", "tests.model.engine_process"],
        input=json.dumps({"socket": str(daemon.socket), "folder": str(folder), "prompts": prompts}),
        stdout=subprocess.PIPE,
        env=daemon.environment,
        text=True,
        check=True,
    )
    assert [one["restored"] for one in json.loads(third.stdout)] == [SIZE * 8] * 4
