"""Prompt caches of an mlx-lm model, kept in omlxd: restore, prefill, save.

**Exactness.** How a model rounds depends on how many tokens it is given at once. So that a hit and
a miss compute alike, a prompt is always prefilled in whole blocks, and what is left of it (1 to
``block_tokens`` tokens) is a piece of its own. That is what ``mlx_lm.generate`` with
``prefill_step_size=block_tokens`` does, and with or without a hit the logits are bit for bit those.
Of a prompt of exactly ``k`` blocks, therefore, ``k - 1`` are reused and the last is computed again:
reusing all but its last token would compute that token in another shape than a miss does.

**Failures.** Nothing here raises into a generation loop because of the cache, unless
``raise_errors=True``: without a daemon, with one that goes away, or with a cache class that is not
known, prompts are computed as usual. What happened is counted in :attr:`PromptCache.stats` and
logged once.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from omlxd.engines import caches
from omlxd.engines.caches import PromptCacheList
from omlxd.engines.daemon import Daemon
from omlxd.engines.fingerprint import fingerprint, model_id
from omlxd.engines.forms import Form, Model, form_of
from omlxd.engines.groups import Chain, Identity, KeptCaches, Saved
from omlxd.errors import OmlxdError, Unavailable

if TYPE_CHECKING:
    from omlxd.client import Cache, Space

T = TypeVar("T")

Progress = Callable[[int, int], object]

logger = logging.getLogger(__name__)

BLOCK_TOKENS: Final = 64
SNAPSHOT_TOKENS: Final = 512
LOAD_SECONDS: Final = 30.0


@dataclass(slots=True)
class Stats:
    """Counters since the prompt cache was made."""

    restored_tokens: int = 0
    prefilled_tokens: int = 0
    """Computed by :meth:`PromptCache.prefill`."""
    hits: int = 0
    misses: int = 0
    saved: Saved = field(default_factory=Saved)
    unavailable: int = 0
    """Calls that found no daemon."""
    refused: Counter[str] = field(default_factory=Counter)
    """Calls that could not be served for another reason, by reason."""


@dataclass(slots=True)
class _Storing:
    """How far a prompt is stored in one form while it is being prefilled."""

    chain: Chain
    blocks: int


class PromptCache:
    """The prompt caches of one loaded model, kept in a daemon.

    Use it in the thread that the model runs in.
    """

    def __init__(
        self,
        client: Cache | str | os.PathLike[str] | None,
        model: Model,
        model_path: str | os.PathLike[str],
        *,
        block_tokens: int = BLOCK_TOKENS,
        snapshot_tokens: int = SNAPSHOT_TOKENS,
        prefill_blocks: int = 1,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        quantized_kv_start: int = 0,
        max_kv_size: int | None = None,
        adapter_path: str | os.PathLike[str] | None = None,
        salt: str | bytes | None = None,
        load_seconds: float = LOAD_SECONDS,
        raise_errors: bool = False,
    ) -> None:
        """Prepare; computes nothing and needs no daemon yet.

        Args:
            client: what ``omlxd.connect()`` returned; or a socket's path, or None for the default one: connected
                when needed.
            model: the loaded model.
            model_path: the folder or hub name that it was loaded from, for the fingerprint of its weights.
            block_tokens: tokens of a block. A prefix is reused in whole blocks.
            snapshot_tokens: distance of the snapshots of state that can't be cut (recurrent layers); a multiple
                of ``block_tokens``. The last whole block of each prompt gets one too.
            prefill_blocks: blocks given to the model at once. More than 1 is faster on some GPUs; a hit that ends
                inside such a piece is then followed by pieces of another shape, which round differently.
            kv_bits, kv_group_size, quantized_kv_start: as in ``mlx_lm.generate``.
            max_kv_size: as in ``mlx_lm.generate``.
            adapter_path: LoRA folder that was loaded with the model.
            salt: keeps users or tenants apart, or marks an adapter that has no folder.
            load_seconds: how long a restore may wait for blocks.
            raise_errors: raise instead of computing on without the cache.

        Raises:
            ValueError: a size that makes no sense.
            UnsupportedCacheError: with ``raise_errors`` only.
        """
        if block_tokens < 1 or prefill_blocks < 1:
            raise ValueError(f"block_tokens={block_tokens}, prefill_blocks={prefill_blocks}: both must be at least 1")
        if snapshot_tokens < 1 or snapshot_tokens % block_tokens:
            raise ValueError(f"snapshot_tokens={snapshot_tokens} must be a multiple of block_tokens ({block_tokens})")
        self.model = model
        self.block_tokens = block_tokens
        self.stats = Stats()
        self._snapshot_tokens = snapshot_tokens
        self._piece = prefill_blocks * block_tokens
        self._daemon = Daemon(client)
        self._load_seconds = load_seconds
        self._raise = raise_errors
        self._logged: set[str] = set()
        self._kv_bits, self._kv_group_size, self._kv_start = kv_bits, kv_group_size, quantized_kv_start
        self._max_kv_size = max_kv_size
        self._identity: Identity | None = None
        self._forms: list[Form] = []
        self._unusable: str | None = self._attempt(partial(self._prepare, model_path, adapter_path, salt), str)

    def _prepare(
        self, model_path: str | os.PathLike[str], adapter_path: str | os.PathLike[str] | None, salt: str | bytes | None
    ) -> str | None:
        folder = _folder(model_path)
        self._identity = Identity(
            model_id(folder), fingerprint(folder, adapter_path=adapter_path), salt, folder.resolve()
        )
        quantized = self._kv_bits is not None
        forms = []
        if quantized:
            forms.append(Form.of(self.model, self.block_tokens, self._fresh_quantized, self._kv_start, None))
        if not quantized or self._kv_start > 0:
            forms.append(Form.of(self.model, self.block_tokens, self.fresh, 0, self._kv_start if quantized else None))
        self._forms = forms
        return None

    def fresh(self) -> PromptCacheList:
        """A new, empty prompt cache of the model."""
        from mlx_lm.models.cache import make_prompt_cache

        made: PromptCacheList = make_prompt_cache(self.model, self._max_kv_size)
        return made

    def _fresh_quantized(self) -> PromptCacheList:
        return [
            layer.to_quantized(group_size=self._kv_group_size, bits=self._kv_bits)
            if hasattr(layer, "to_quantized")
            else layer
            for layer in self.fresh()
        ]

    @property
    def generation_options(self) -> dict[str, int]:
        """What ``mlx_lm.generate`` must be told to make the same caches."""
        options = {"max_kv_size": self._max_kv_size, "kv_bits": self._kv_bits}
        if self._kv_bits is not None:
            options |= {"kv_group_size": self._kv_group_size, "quantized_kv_start": self._kv_start}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def has_state(self) -> bool:
        """Does the model have state that can only be kept where the prefill stops?"""
        return any(caches.Group.STATE in form.schema.layouts for form in self._forms)

    def snapshots(self, tokens: int) -> list[int]:
        """Where the prefill of a prompt of so many tokens stops for a snapshot of the state, in tokens."""
        last = (tokens - 1) // self.block_tokens * self.block_tokens
        regular = range(self._snapshot_tokens, last + 1, self._snapshot_tokens)
        return sorted({*regular, last} - {0})

    def spaces(self, tokens: int = 0) -> dict[caches.Group, Space]:
        """The namespaces in which a cache of so many tokens is kept, by KV group; none for a model that can't be kept.

        Raises what the client raises.
        """
        form = next((form for form in self._forms if form.covers(tokens)), None)
        return dict(self._kept(form).spaces) if form is not None else {}

    # -- restore, prefill, save

    def restore(self, tokens: Sequence[int]) -> tuple[PromptCacheList, int]:
        """A prompt cache holding the longest prefix of ``tokens`` that is kept, and that prefix's length in tokens.

        The length is a multiple of ``block_tokens`` and smaller than ``len(tokens)``: the last token is always left
        to be computed. On a miss the cache is empty and the length 0. The cache is the caller's own; nothing done to
        it reaches the kept blocks.
        """
        for form in self._forms:
            cache = form.make()
            blocks = self._attempt(partial(self._restore, form, cache, tokens), lambda _: 0)
            if blocks:
                self.stats.hits += 1
                self.stats.restored_tokens += blocks * self.block_tokens
                return cache, blocks * self.block_tokens
        self.stats.misses += 1
        return self.fresh(), 0

    def _restore(self, form: Form, cache: PromptCacheList, tokens: Sequence[int]) -> int:
        least, most = form.bounds(len(tokens))
        if most < least:
            return 0
        kept = self._kept(form)
        return kept.fill(cache, kept.chain(tokens[: most * self.block_tokens]), most, least=least)

    def match(self, tokens: Sequence[int]) -> int:
        """How many tokens :meth:`restore` would bring, as far as can be told without loading them."""
        for form in self._forms:
            blocks = self._attempt(partial(self._match, form, tokens), lambda _: 0)
            if blocks:
                return blocks * self.block_tokens
        return 0

    def _match(self, form: Form, tokens: Sequence[int]) -> int:
        least, most = form.bounds(len(tokens))
        if most < least:
            return 0
        kept = self._kept(form)
        blocks = kept.longest(form.make(), kept.chain(tokens[: most * self.block_tokens]), most)
        return blocks if blocks >= least else 0

    def touch(self, tokens: Sequence[int]) -> None:
        """Say that the engine used its own copy of a prefix, so that the daemon keeps its blocks young."""
        for space in self._attempt(partial(self.spaces, len(tokens)), lambda _: {}).values():
            self._attempt(partial(space.touch, tokens), lambda _: None)

    def prefill(
        self,
        tokens: Sequence[int],
        cache: PromptCacheList,
        start: int | None = None,
        *,
        progress: Progress | None = None,
        stream: Any = None,
    ) -> int:
        """Compute the whole blocks of ``tokens`` that ``cache`` does not hold yet, storing each as it is done.

        ``start`` is how many tokens the cache holds (what :meth:`restore` returned); by default the cache is asked.
        Returns how many it holds afterwards: at least one token is left for the caller. ``progress(done, total)`` is
        called after each piece; it may raise to stop, and what was computed is kept. ``stream`` is MLX's, by default
        the one that mlx-lm generates in.

        Raises:
            ValueError: ``start`` is not given and the cache can't tell, or it is more than there are tokens.
        """
        import mlx.core as mx

        done = self._start(tokens, cache, start)
        last = (len(tokens) - 1) // self.block_tokens * self.block_tokens
        whole = tokens[:last]
        storing: dict[Form, _Storing] = {}
        with mx.stream(stream or _stream()):
            while done < last:
                stop = min(last, self._next_stop(done))
                self.model(mx.array(list(tokens[done:stop]))[None], cache=cache)
                self._quantize(cache)
                mx.eval([layer.state for layer in cache])
                self.stats.prefilled_tokens += stop - done
                begun, done = done, stop
                self._attempt(partial(self._store_piece, cache, whole, begun, done, storing), lambda _: None)
                mx.clear_cache()
                if progress is not None:
                    progress(done, len(tokens))
        return done

    def _start(self, tokens: Sequence[int], cache: PromptCacheList, start: int | None) -> int:
        if start is None:
            start = caches.position(cache)
        if start is None:
            raise ValueError("this cache does not know how many tokens it holds: give start=")
        if start > len(tokens):
            raise ValueError(f"the cache holds {start} tokens, more than the prompt's {len(tokens)}")
        return start

    def _next_stop(self, done: int) -> int:
        """Pieces end at multiples of their size, and where a snapshot is due."""
        return min(done - done % step + step for step in (self._piece, self._snapshot_tokens))

    def _store_piece(
        self, cache: PromptCacheList, whole: Sequence[int], begun: int, done: int, storing: dict[Form, _Storing]
    ) -> None:
        """Store what the piece from ``begun`` to ``done`` has completed; of a form that begins here, everything."""
        form = self._form_of(cache)
        if form is None:
            return
        kept = self._kept(form)
        here = storing.get(form)
        if here is None:
            first = begun // self.block_tokens if begun >= form.first else 0
            here = storing[form] = _Storing(kept.chain(whole), first)
        snapshot = done == len(whole) or done % self._snapshot_tokens == 0
        blocks = done // self.block_tokens
        self.stats.saved.add(kept.store(cache, here.chain, here.blocks, blocks, snapshot=snapshot))
        here.blocks = blocks

    def save(self, tokens: Sequence[int], cache: PromptCacheList, *, row: int | None = None) -> Saved:
        """Store the whole blocks that ``cache`` holds of ``tokens`` (prompt and answer) and that are not kept yet.

        ``row`` picks one sequence of a batched cache. A cache that holds more than ``tokens`` is saved as far as they
        go, one that holds fewer as far as it goes. State is kept when both end on the same block's boundary.
        """
        return self._attempt(partial(self._save, tokens, cache, row), lambda reason: Saved(failed=reason))

    def _save(self, tokens: Sequence[int], cache: PromptCacheList, row: int | None) -> Saved:
        if row is not None:
            cache = caches.row(cache, row)
        form = self._form_of(cache)
        if form is None:
            return Saved(failed=self._unusable)
        held = caches.position(cache)
        count = len(tokens) if held is None else min(held, len(tokens))
        blocks = count // self.block_tokens
        if blocks == 0:
            return Saved()
        kept = self._kept(form)
        chain = kept.chain(tokens[: blocks * self.block_tokens])
        exactly = held in (None, count) and count == blocks * self.block_tokens
        saved = kept.store(cache, chain, 0, blocks, snapshot=exactly)
        self.stats.saved.add(saved)
        return saved

    def _form_of(self, cache: PromptCacheList) -> Form | None:
        """The form that a cache is in; None when this model's caches can't be kept at all."""
        return form_of(cache, self._forms) if self._forms else None

    def _kept(self, form: Form) -> KeptCaches:
        client = self._daemon.client()
        if form.kept is None:
            assert self._identity is not None
            form.kept = KeptCaches(client, form.schema, self._identity, patience=self._load_seconds)
        return form.kept

    def _quantize(self, cache: PromptCacheList) -> None:
        if self._kv_bits is not None:
            from mlx_lm.generate import maybe_quantize_kv_cache

            maybe_quantize_kv_cache(
                cache,
                quantized_kv_start=self._kv_start,
                kv_group_size=self._kv_group_size,
                kv_bits=self._kv_bits,
            )

    def _attempt(self, action: Callable[[], T], otherwise: Callable[[str], T]) -> T:
        """Do something that needs the cache; on any trouble count it, log its first time, and go on without.

        ``otherwise`` makes the answer then, of the trouble in words.
        """
        try:
            return action()
        except Exception as error:
            if self._raise:
                raise
            reason = type(error).__name__
            if isinstance(error, Unavailable):
                self.stats.unavailable += 1
            else:
                self.stats.refused[reason] += 1
            if reason not in self._logged:
                self._logged.add(reason)
                expected = isinstance(error, OmlxdError | caches.UnsupportedCacheError | OSError)
                logger.warning("computing without omlxd: %s", error, exc_info=not expected)
            return otherwise(f"{reason}: {error}")


def _folder(model_path: str | os.PathLike[str]) -> Path:
    """The folder of a model that was given by folder or by its name on the hub (it is loaded, so it is there)."""
    path = Path(model_path).expanduser()
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(model_path), local_files_only=True, allow_patterns=["*.json", "*.safetensors"]))


def _stream() -> Any:
    """The stream that mlx-lm generates in."""
    from mlx_lm.generate import generation_stream

    return generation_stream
