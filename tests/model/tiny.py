"""Small random models of each kind that mlx-lm knows, seeded: fast, and with all their cache classes."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import ChunkedKVCache
from mlx_lm.tokenizer_utils import TokenizerWrapper

VOCABULARY = 96

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
}
_MLA = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_MOE = {
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
_LLAMA4_TEXT = {
    **_COMMON,
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "head_dim": 32,
    "intermediate_size_mlp": 96,
    # mlx-lm 0.31 goes wrong with a chunk smaller than its buffer's step.
    "attention_chunk_size": 48 if hasattr(ChunkedKVCache, "keys_and_values") else 256,
    "interleave_moe_layer_step": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "no_rope_layers": [1, 1, 1, 0],
    "use_qk_norm": True,
    "attention_bias": False,
    "rope_scaling": None,
}


@dataclass(frozen=True)
class Kind:
    """A model in small, and how its prompt cache is made."""

    name: str
    module: str
    config: dict[str, Any]
    classes: tuple[str, ...]
    """The cache classes that it must turn out to use."""
    options: dict[str, Any] = field(default_factory=dict)
    """For ``PromptCache`` and ``mlx_lm.generate``: ``kv_bits``, ``max_kv_size``, ..."""

    def __str__(self) -> str:
        return self.name


def _kind(
    name: str, module: str, classes: tuple[str, ...], options: dict[str, Any] | None = None, **config: Any
) -> Kind:
    return Kind(name, module, {**_COMMON, "model_type": module, **config}, classes, options or {})


_LLAMA = {"head_dim": 32}


def _quantized(bits: int, start: int = 0) -> dict[str, Any]:
    return {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": start}


KINDS = [
    _kind("llama", "llama", ("KVCache",), **_LLAMA),
    _kind("llama, 8-bit KV", "llama", ("QuantizedKVCache",), _quantized(8), **_LLAMA),
    _kind("llama, 4-bit KV", "llama", ("QuantizedKVCache",), _quantized(4), **_LLAMA),
    _kind("llama, 8-bit KV from token 40", "llama", ("KVCache", "QuantizedKVCache"), _quantized(8, 40), **_LLAMA),
    _kind(
        "gemma 3, sliding window",
        "gemma3_text",
        ("KVCache", "RotatingKVCache"),
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=24,
        sliding_window_pattern=2,
        num_hidden_layers=4,
    ),
    _kind("llama 4, chunked", "llama4", ("ChunkedKVCache", "KVCache"), text_config=_LLAMA4_TEXT),
    _kind(
        "mamba 2",
        "mamba2",
        ("ArraysCache",),
        num_heads=4,
        head_dim=16,
        state_size=16,
        layer_norm_epsilon=1e-5,
        conv_kernel=4,
        n_groups=1,
        use_bias=False,
        use_conv_bias=True,
        time_step_limit=(0.0, float("inf")),
        time_step_rank="auto",
    ),
    _kind(
        "qwen 3 next, GatedDeltaNet",
        "qwen3_next",
        ("ArraysCache", "KVCache"),
        num_hidden_layers=4,
        head_dim=32,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[],
        moe_intermediate_size=48,
        partial_rotary_factor=0.25,
        norm_topk_prob=True,
    ),
    _kind(
        "falcon h1, lists of caches",
        "falcon_h1",
        ("ArraysCache", "KVCache"),
        head_dim=32,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_n_groups=1,
    ),
    _kind("deepseek 3, MLA", "deepseek_v3", ("KVCache",), **_MLA),
    _kind(
        "deepseek 3.2, lists of caches",
        "deepseek_v32",
        ("KVCache",),
        index_head_dim=32,
        index_n_heads=2,
        index_topk=32,
        **_MLA,
    ),
    _kind("qwen 3, MoE", "qwen3_moe", ("KVCache",), **_MOE),
    _kind("qwen 3, MoE, max_kv_size", "qwen3_moe", ("RotatingKVCache",), {"max_kv_size": 40}, **_MOE),
    _kind(
        "afm 7, layers that share keys",
        "afm7",
        ("KVCache",),
        hidden_dim=64,
        num_layers=3,
        num_kv_reuse_layers=1,
        num_heads=2,
        num_kv_heads=1,
    ),
    _kind("llama, concatenated", "llama", ("ConcatenateKVCache",), cache_class="ConcatenateKVCache", **_LLAMA),
]


def build(kind: Kind, folder: Path, *, seed: int = 7, save: bool = True) -> Any:
    """Make the model with random weights, and (``save``) a folder with its configuration and weights."""
    module = importlib.import_module(f"mlx_lm.models.{kind.module}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(kind.config))
    # Initial weights are small; larger ones make continuations depend on every token.
    model.update(tree_map(_spread, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    if "cache_class" in kind.config:
        cache_class = getattr(mlx_lm.models.cache, kind.config["cache_class"])
        model.make_cache = lambda: [cache_class() for _ in model.layers]
    if save:
        _save(kind, model, folder)
    return model


def _save(kind: Kind, model: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(kind.config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))


def _spread(weight: mx.array) -> mx.array:
    if weight.ndim < 2 or not mx.issubdtype(weight.dtype, mx.floating):
        return weight
    return (mx.random.normal(weight.shape) * weight.shape[-1] ** -0.5 * 1.5).astype(weight.dtype)


class NumberTokenizer(TokenizerWrapper):  # type: ignore[misc]
    """A tokenizer of numbers, which never ends an answer. What mlx-lm's loop asks of one, and no more."""

    class Detokenizer:
        last_segment = ""

        def add_token(self, token: int) -> None:
            self.last_segment = f"{token} "

        def finalize(self) -> None:
            self.last_segment = ""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        pass  # there is no tokenizer of transformers to wrap

    @property
    def detokenizer(self) -> Detokenizer:
        return self.Detokenizer()


def prompt(length: int, *, seed: int = 1) -> list[int]:
    """Random tokens, always the same ones for a seed; a longer prompt begins as a shorter one does."""
    state, tokens = seed * 7919 + 12345, []
    for _ in range(length):
        state = (state * 1103515245 + 12345) % (1 << 31)
        tokens.append(state // 65536 % VOCABULARY)
    return tokens
