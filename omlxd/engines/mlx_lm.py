"""mlx-lm with its prompt caches kept in omlxd: drop-ins for ``generate`` and ``stream_generate``.

    import mlx_lm, omlxd
    from omlxd.engines.mlx_lm import PromptCache, stream_generate

    model, tokenizer = mlx_lm.load("path/or/hub-name")
    kept = PromptCache(omlxd.connect(), model, "path/or/hub-name")
    for response in stream_generate(model, tokenizer, prompt, prompt_cache=kept):
        print(response.text, end="")

:class:`~omlxd.engines.prompt_cache.PromptCache` says what is exact and what happens without a
daemon.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from omlxd.engines.caches import PromptCacheList, UnsupportedCacheError, mlx_lm_release
from omlxd.engines.forms import Model
from omlxd.engines.prompt_cache import PromptCache, Stats

if TYPE_CHECKING:
    import mlx.core as mx

__all__ = ["PromptCache", "Stats", "UnsupportedCacheError", "generate", "stream_generate"]

#: A tokenizer of transformers, or mlx-lm's wrapper around one.
Tokenizer = Any
#: ``mlx_lm.generate.GenerationResponse``.
Response = Any
LogitsProcessor = Callable[["mx.array", "mx.array"], "mx.array"]


def stream_generate(
    model: Model,
    tokenizer: Tokenizer,
    prompt: str | mx.array | Sequence[int],
    *,
    prompt_cache: PromptCache | PromptCacheList | None = None,
    **options: Any,
) -> Iterator[Response]:
    """As ``mlx_lm.stream_generate``, with a ``prompt_cache`` that is kept.

    The longest kept prefix of the prompt is restored, the rest of its whole blocks computed and kept one by one, and
    after the last token (or when the caller stops asking) so are the blocks of the answer. Nothing is done between
    tokens. Options are mlx-lm's; a draft model or input embeddings go past the cache.

    Raises:
        ValueError: ``kv_bits`` or ``max_kv_size`` differ from those that the prompt cache was made with.
    """
    import mlx_lm

    if not isinstance(prompt_cache, PromptCache):
        yield from mlx_lm.stream_generate(model, tokenizer, prompt, prompt_cache=prompt_cache, **options)
        return
    for name in ("draft_model", "input_embeddings"):
        if options.get(name) is not None:
            prompt_cache.stats.refused[name] += 1
            yield from mlx_lm.stream_generate(model, tokenizer, prompt, **options)
            return
    yield from _kept(model, tokenizer, _encode(tokenizer, prompt), prompt_cache, options)


def generate(
    model: Model,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    verbose: bool = False,
    **options: Any,
) -> str:
    """As ``mlx_lm.generate``, with a ``prompt_cache`` that is kept (see :func:`stream_generate`)."""
    text = ""
    response: Response = None
    for response in stream_generate(model, tokenizer, prompt, **options):
        if verbose:
            print(response.text, end="", flush=True)
        text += response.text
    if verbose and response is not None:
        print(
            f"\nPrompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec\n"
            f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec"
        )
    return text


def _kept(
    model: Model, tokenizer: Tokenizer, tokens: list[int], kept: PromptCache, options: dict[str, Any]
) -> Iterator[Response]:
    import mlx.core as mx
    import mlx_lm

    options = {**options, **_precision(kept, options)}
    progress = options.pop("prompt_progress_callback", None) or (lambda *_: None)
    begun = time.perf_counter()
    cache, restored = kept.restore(tokens)
    progress(restored, len(tokens))
    done = kept.prefill(tokens, cache, restored, progress=progress)
    options["prompt_progress_callback"] = lambda more, _: progress(done + more, len(tokens))
    # mlx-lm shows them the prompt from 0.32 on; before, the last token of it.
    if options.get("logits_processors") and mlx_lm_release() >= (0, 32):
        prefix = mx.array(tokens[:done])
        options["logits_processors"] = [_with_prefix(p, prefix) for p in options["logits_processors"]]
    answer: list[int] = []
    prompt_tps = 0.0
    responses = mlx_lm.stream_generate(model, tokenizer, mx.array(tokens[done:]), prompt_cache=cache, **options)
    try:
        for response in responses:
            if not answer:
                prompt_tps = len(tokens) / (time.perf_counter() - begun)
            if response.finish_reason is None or response.generation_tokens > len(answer):
                answer.append(response.token)
            yield dataclasses.replace(response, prompt_tokens=len(tokens), prompt_tps=prompt_tps)
    except GeneratorExit:  # the caller has read enough
        kept.save(tokens + answer, cache)
        raise
    # mlx-lm computes a token ahead: the cache holds every token that it gave. After an error nobody knows what it holds.
    kept.save(tokens + answer, cache)


def _precision(kept: PromptCache, options: dict[str, Any]) -> dict[str, Any]:
    """mlx-lm's options on the cache's form. They are the prompt cache's; other ones would be another model to it."""
    ours: dict[str, Any] = kept.generation_options
    for name in ("kv_bits", "kv_group_size", "quantized_kv_start", "max_kv_size"):
        wanted = options.get(name)
        if wanted is not None and wanted != ours.get(name):
            raise ValueError(f"{name}={wanted}, but the prompt cache was made with {ours.get(name)}: give it there")
    ours.pop("max_kv_size", None)  # of no effect with a cache that exists
    return ours


def _with_prefix(processor: LogitsProcessor, prefix: mx.array) -> LogitsProcessor:
    """Show a processor the tokens that mlx-lm was not given because they are in the cache already."""
    import mlx.core as mx

    return lambda tokens, logits: processor(mx.concatenate([prefix.astype(tokens.dtype), tokens]), logits)


def _encode(tokenizer: Tokenizer, prompt: str | mx.array | Sequence[int]) -> list[int]:
    """Tokens of a prompt, as ``mlx_lm.stream_generate`` makes them."""
    if isinstance(prompt, str):
        # A chat template has put the token in front already.
        bos = tokenizer.bos_token
        encoded: list[int] = tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos))
        return encoded
    tokens: list[int] = list(prompt) if isinstance(prompt, list | tuple) else prompt.tolist()  # type: ignore
    return tokens
