"""A real language model: SmolLM2-135M in bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

import omlxd
from omlxd.engines.mlx_lm import PromptCache, stream_generate
from scripts.daemon_process import CHECKOUT, DaemonProcess

pytestmark = [pytest.mark.model, pytest.mark.slow]

SIZE = 64
PROMPT_TOKENS = 300
TAIL = 3


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[omlxd.Cache]:
    with omlxd.connect(daemon.socket) as client:
        yield client


@pytest.fixture(scope="module")
def tokens(smollm: tuple[Any, Any]) -> list[int]:
    """The first 300 tokens of a real text."""
    text = (CHECKOUT / "scripts" / "demo_prompt.txt").read_text()
    encoded: list[int] = smollm[1].encode(text)
    return encoded[:PROMPT_TOKENS]


def test_the_model_answers(smollm: tuple[Any, Any]) -> None:
    model, tokenizer = smollm
    assert "Paris" in mlx_lm.generate(model, tokenizer, "The capital of France is", max_tokens=4)
    assert tokenizer.decode(tokenizer.encode("Wörld 1871<|im_end|>")) == "Wörld 1871<|im_end|>"
    assert tokenizer.eos_token_ids == {tokenizer.encode("<|im_end|>")[0]}


def references(model: Any, tokens: list[int], options: dict[str, int]) -> list[mx.array]:
    """Logits after each of 1, 2, ... blocks and a short piece more, without omlxd."""
    cache = make_prompt_cache(model)
    answer = []
    for start in range(0, len(tokens) // SIZE * SIZE, SIZE):
        model(mx.array(tokens[start : start + SIZE])[None], cache=cache)
        if options:
            maybe_quantize_kv_cache(cache, **options)
        mx.eval([layer.state for layer in cache])
        branch = copy.deepcopy(cache)
        answer.append(model(mx.array(tokens[:TAIL])[None], cache=branch)[0, -1])
        mx.eval(answer[-1])
    return answer


@pytest.mark.parametrize(("bits", "length"), [(None, PROMPT_TOKENS), (8, 2 * SIZE), (4, 2 * SIZE)])
def test_logits_after_a_restore_at_every_block_boundary(
    smollm: tuple[Any, Any], smollm_folder: Path, client: omlxd.Cache, tokens: list[int], bits: int | None, length: int
) -> None:
    model, _ = smollm
    tokens = tokens[:length]
    options: dict[str, int] = {} if bits is None else {"kv_bits": bits, "kv_group_size": 64, "quantized_kv_start": 0}
    kept = PromptCache(client, model, smollm_folder, block_tokens=SIZE, raise_errors=True, **options)
    kept.prefill([*tokens, 0], kept.restore(tokens)[0])
    for blocks, expected in enumerate(references(model, tokens, options), start=1):
        branch = tokens[: blocks * SIZE] + tokens[:TAIL]
        cache, restored = kept.restore(branch)
        assert restored == blocks * SIZE
        found = model(mx.array(branch[restored:])[None], cache=cache)[0, -1]
        assert mx.array_equal(found.view(mx.uint8), expected.view(mx.uint8)), f"after {blocks} blocks"


def test_a_lora_adapter_with_its_salt(
    smollm: tuple[Any, Any], smollm_folder: Path, client: omlxd.Cache, tokens: list[int]
) -> None:
    base, tokenizer = smollm
    model = mlx_lm.load(str(smollm_folder))[0]
    linear_to_lora_layers(model, 4, {"rank": 4, "scale": 20.0, "dropout": 0.0})
    mx.random.seed(3)
    for _, module in model.named_modules():
        if "lora_b" in module:
            module.lora_b = mx.random.normal(module.lora_b.shape).astype(mx.bfloat16) * 0.02
    short = tokens[: SIZE * 2 + 9]
    plain = PromptCache(client, base, smollm_folder, salt="base", raise_errors=True)
    adapted = PromptCache(client, model, smollm_folder, salt="adapter 1", raise_errors=True)
    plain.prefill(short, plain.fresh(), 0)
    assert adapted.restore(short)[1] == 0
    expected = [r.token for r in mlx_lm.stream_generate(model, tokenizer, short, max_tokens=8, prefill_step_size=SIZE)]
    for hit in (False, True):
        found = [r.token for r in stream_generate(model, tokenizer, short, prompt_cache=adapted, max_tokens=8)]
        assert found == expected
        assert adapted.stats.restored_tokens == (SIZE * 2 if hit else 0)
