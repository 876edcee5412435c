"""mlx-lm's HTTP server with its prompt cache kept in omlxd.

    python -m omlxd.engines.mlx_lm_server --model FOLDER [every flag of mlx_lm.server]

The server's own code runs unchanged; three of the names it uses are replaced:

- its prompt cache (``fetch_nearest_cache`` / ``insert_cache``) by :class:`ServerCache`, so that servers
  share, and a restarted one finds the conversations of the one before. mlx-lm's own cache stays in front
  of it, as large as its flags make it: what a conversation left in this process is reused to the token,
  what is longer in the daemon, in whole blocks;
- its batch generator by :class:`KeepingBatches`, which keeps each prompt's blocks while it is being
  computed: a request that is cancelled after 30,000 tokens was not computed in vain;
- its ``stream_generate``, which it uses for requests that it serves one at a time, to the same end.

While there is no daemon, or for a model whose cache can't be kept, mlx-lm's own cache does the work alone.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from omlxd.engines.caches import PromptCacheList, state_survives_batches
from omlxd.engines.prompt_cache import BLOCK_TOKENS, SNAPSHOT_TOKENS, PromptCache

logger = logging.getLogger(__name__)

#: (model path, adapter path, draft model path), as the server has it.
ModelKey = tuple[str, str | None, str | None]
#: ``mlx_lm.generate.BatchGenerator`` and what it returns.
BatchGenerator = Any
PromptResponse = Any


class Provider(Protocol):
    """What is used of ``mlx_lm.server.ModelProvider``."""

    model: Any
    cli_args: argparse.Namespace


class LocalCache(Protocol):
    """What is used of ``mlx_lm.server.LRUPromptCache``."""

    def __len__(self) -> int: ...

    def fetch_nearest_cache(self, model: ModelKey, tokens: list[int]) -> tuple[PromptCacheList | None, list[int]]:
        """A copy of the cache that helps most, and the tokens that it does not hold."""

    def insert_cache(self, model: ModelKey, tokens: list[int], prompt_cache: PromptCacheList, **options: Any) -> None:
        """Take a cache that holds ``tokens``."""


@dataclass(frozen=True, slots=True)
class Options:
    """Our own flags."""

    socket: str | None
    block_tokens: int
    snapshot_tokens: int
    salt: str | None


class ServerCache:
    """The server's prompt cache: mlx-lm's own, in this process, and omlxd behind it.

    Used by the server's generation thread alone.
    """

    def __init__(self, local: LocalCache, provider: Provider, options: Options) -> None:
        self._local = local
        self._provider = provider
        self._options = options
        self._key: ModelKey | None = None
        self._kept: PromptCache | None = None
        self.fetched: list[int] = []
        """The tokens of the last fetch."""
        self.batched = False
        """Does what is inserted come from a batch?"""

    def __len__(self) -> int:
        return len(self._local)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)  # sizes and statistics of what is in this process

    @property
    def kept(self) -> PromptCache | None:
        """The prompt cache of the model that is loaded; None before the first request."""
        return self._kept

    def fetch_nearest_cache(self, model: ModelKey, tokens: list[int]) -> tuple[PromptCacheList | None, list[int]]:
        """A cache for the longest known prefix, and the tokens that are left. The cache is the caller's own."""
        kept = self._for(model, tokens)
        self.fetched = list(tokens)
        nearest, rest = self._local.fetch_nearest_cache(model, tokens)
        here = len(tokens) - len(rest) if nearest is not None else 0
        if kept is None:
            return nearest, rest
        if here and kept.match(tokens) <= here:
            kept.touch(tokens[:here])
            return nearest, rest
        cache, count = kept.restore(tokens)
        logger.info("omlxd: %d of %d prompt tokens restored", count, len(tokens))
        return (cache, tokens[count:]) if count > here else (nearest, rest)

    def insert_cache(self, model: ModelKey, tokens: list[int], prompt_cache: PromptCacheList, **options: Any) -> None:
        """Keep a cache that holds ``tokens``."""
        kept = self._for(model, tokens)
        if kept is not None and self._right(kept):
            kept.save(tokens, prompt_cache)
        self._local.insert_cache(model, tokens, prompt_cache, **options)

    def keep(self, tokens: Sequence[int], cache: PromptCacheList) -> None:
        """Keep what there is of a prompt that is still being computed."""
        if self._kept is not None and self._right(self._kept):
            self._kept.save(tokens, cache)

    def _right(self, kept: PromptCache) -> bool:
        """May what was computed be kept? Not what a batch has spoiled: it would be wrong for ever."""
        return not (self.batched and kept.has_state) or state_survives_batches()

    def _for(self, model: ModelKey, tokens: Sequence[int]) -> PromptCache | None:
        """The prompt cache of a model; None for requests that omlxd can't serve."""
        path, adapter, draft = model
        if draft is not None:
            return None  # the cache holds the draft model's layers too
        if any(token < 0 for token in tokens):
            return None  # images stand in the prompt as negative numbers
        if self._kept is None or self._key != model:
            arguments = self._provider.cli_args
            kv_bits = getattr(arguments, "kv_bits", None)
            self._kept = PromptCache(
                self._options.socket,
                self._provider.model,
                path,
                block_tokens=self._options.block_tokens,
                snapshot_tokens=self._options.snapshot_tokens,
                kv_bits=kv_bits,
                kv_group_size=getattr(arguments, "kv_group_size", 64),
                quantized_kv_start=getattr(arguments, "quantized_kv_start", 0) if kv_bits else 0,
                adapter_path=adapter,
                salt=self._options.salt,
            )
            self._key = model
        return self._kept


@dataclass(slots=True)
class _Prompt:
    """A prompt in a batch."""

    restored: int
    """Tokens that it began with."""
    ends: frozenset[int]
    """Where the server's segments end, in tokens from there."""
    kept: int
    """Blocks that are kept."""


class KeepingBatches:
    """A batch generator that keeps the blocks of its prompts as they are computed.

    Prompts of models with state that can't be cut are made to stop where a snapshot is due; the server doesn't notice.
    """

    def __init__(self, generator: BatchGenerator, cache: ServerCache) -> None:
        self._generator = generator
        self._cache = cache
        self._prompts: dict[int, _Prompt] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def insert_segments(
        self,
        segments: list[list[list[int]]],
        max_tokens: list[int] | None = None,
        caches: list[PromptCacheList] | None = None,
        all_tokens: list[list[int]] | None = None,
        **options: Any,
    ) -> list[int]:
        """As mlx-lm's: a list of segments for each prompt; returns their ids."""
        self._cache.batched = True
        kept = self._cache.kept
        starts = [len(tokens) for tokens in all_tokens] if all_tokens else [0] * len(segments)
        prompts = [_last_alone([s for s in prompt if s]) for prompt in segments]
        ends = [frozenset(_ends(prompt)) for prompt in prompts]
        if kept is not None and kept.has_state:
            prompts = [
                _split(prompt, [at - start for at in kept.snapshots(start + sum(map(len, prompt)))])
                for prompt, start in zip(prompts, starts, strict=True)
            ]
        uids: list[int] = self._generator.insert_segments(prompts, max_tokens, caches, all_tokens, **options)
        size = kept.block_tokens if kept is not None else 1
        for uid, start, end in zip(uids, starts, ends, strict=True):
            self._prompts[uid] = _Prompt(start, end, start // size)
        return uids

    def next(self) -> tuple[list[PromptResponse], list[Any]]:
        """As mlx-lm's: one step for all prompts; their progress, and the tokens of those that are past them."""
        prompts, generated = self._generator.next()
        for response in prompts:
            prompt = self._prompts.get(response.uid)
            if prompt is None:
                continue
            if response.end_of_prompt:
                del self._prompts[response.uid]
                continue
            done = response.progress[0]
            response.end_of_segment = response.end_of_segment and done in prompt.ends
            self._keep(response.uid, prompt, prompt.restored + done)
        return prompts, generated

    def remove(self, uids: list[int], *arguments: Any, **options: Any) -> Any:
        """As mlx-lm's: end these prompts (their clients went away). What they have computed is kept."""
        for tokens, cache in self._computed(uids):
            self._cache.keep(tokens, cache)
        for uid in uids:
            self._prompts.pop(uid, None)
        return self._generator.remove(uids, *arguments, **options)

    def _keep(self, uid: int, prompt: _Prompt, tokens: int) -> None:
        kept = self._cache.kept
        if kept is None or tokens // kept.block_tokens <= prompt.kept:
            return
        if kept.has_state and tokens % kept.block_tokens:
            return  # its state would be of no use, and taking a row out of a batch is a copy
        prompt.kept = tokens // kept.block_tokens
        for held, cache in self._computed([uid]):
            self._cache.keep(held, cache)

    def _computed(self, uids: list[int]) -> Iterator[tuple[list[int], PromptCacheList]]:
        for cache, tokens in self._generator.extract_cache(uids).values():
            yield list(tokens), cache


def _last_alone(prompt: list[list[int]]) -> list[list[int]]:
    """As mlx-lm does it: the last token is a segment of its own, since it begins the answer."""
    if not prompt or len(prompt[-1]) == 1:
        return prompt
    return [*prompt[:-1], prompt[-1][:-1], prompt[-1][-1:]]


def _ends(prompt: list[list[int]]) -> Iterator[int]:
    end = 0
    for segment in prompt:
        end += len(segment)
        yield end


def _split(prompt: list[list[int]], places: Sequence[int]) -> list[list[int]]:
    """Cut the segments further, so that one ends at each place (in tokens from the first one's start)."""
    pieces, start = [], 0
    for segment in prompt:
        end = start + len(segment)
        inside = [place for place in places if start < place < end]
        pieces += [segment[a - start : b - start] for a, b in zip([start, *inside], [*inside, end], strict=True)]
        start = end
    return pieces


def _stream_generate(original: Callable[..., Iterator[Any]], cache: ServerCache) -> Callable[..., Iterator[Any]]:
    """``stream_generate`` for requests that are served alone: whole blocks are computed here, and kept one by one."""

    def stream_generate(model: Any, tokenizer: Any, prompt: list[int], **options: Any) -> Iterator[Any]:
        cache.batched = False
        kept, tokens = cache.kept, cache.fetched
        start = len(tokens) - len(prompt)
        alone = options.get("draft_model") is None and options.get("input_embeddings") is None
        if kept is not None and alone and start >= 0 and tokens[start:] == list(prompt):
            progress = options.get("prompt_progress_callback") or (lambda *_: None)
            done = kept.prefill(
                tokens,
                options["prompt_cache"],
                start,
                progress=lambda count, _: progress(count - start, len(prompt)),
                stream=options.get("stream"),
            )
            shift, prompt = done - start, tokens[done:]
            options["prompt_progress_callback"] = lambda count, total: progress(count + shift, total + shift)
        yield from original(model=model, tokenizer=tokenizer, prompt=prompt, **options)

    return stream_generate


def install(server: Any, options: Options) -> None:
    """Replace the names in ``mlx_lm.server`` that are to be ours. Call before its ``main()``."""
    local_cache, generator, run = server.LRUPromptCache, server.BatchGenerator, server.run
    stream_generate = server.stream_generate

    def run_with_ours(host: str, port: int, model_provider: Provider, *arguments: Any, **more: Any) -> None:
        def make_cache(*size: Any, **limits: Any) -> ServerCache:
            cache = ServerCache(local_cache(*size, **limits), model_provider, options)
            if hasattr(generator, "insert_segments"):  # from mlx-lm 0.31.2 on
                server.BatchGenerator = lambda *a, **k: KeepingBatches(generator(*a, **k), cache)
            server.stream_generate = _stream_generate(stream_generate, cache)
            return cache

        server.LRUPromptCache = make_cache
        run(host, port, model_provider, *arguments, **more)

    server.run = run_with_ours


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m omlxd.engines.mlx_lm_server",
        description="mlx_lm.server with its prompt cache kept in omlxd. All flags of mlx_lm.server, and:",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--omlxd-socket", metavar="PATH", help="the daemon's socket (default: $OMLXD_SOCKET, or yours)")
    parser.add_argument(
        "--omlxd-block-tokens",
        type=int,
        default=BLOCK_TOKENS,
        metavar="N",
        help="tokens of a block (default: %(default)s)",
    )
    parser.add_argument(
        "--omlxd-snapshot-tokens",
        type=int,
        default=SNAPSHOT_TOKENS,
        metavar="N",
        help="distance of snapshots of recurrent state, in tokens (default: %(default)s)",
    )
    parser.add_argument("--omlxd-salt", metavar="TEXT", help="keeps this server's blocks apart from other servers'")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the server until it is stopped."""
    parser = _parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    ours, theirs = parser.parse_known_args(given)
    if "-h" in theirs or "--help" in theirs:
        parser.print_help()
        print()
    from mlx_lm import server

    options = Options(ours.omlxd_socket, ours.omlxd_block_tokens, ours.omlxd_snapshot_tokens, ours.omlxd_salt)
    install(server, options)
    sys.argv = ["mlx_lm.server", *theirs]
    server.main()


if __name__ == "__main__":
    main()
