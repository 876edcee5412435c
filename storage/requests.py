"""A request of an engine, as policies see it: which keys it is about, and where they lie in the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from omlxd.policy.base import RequestContext


def request(name: str, keys: Sequence[bytes], block_tokens: int) -> RequestContext:
    """The context of a request for ``keys``, the blocks of one chain from its head on."""
    ctx = RequestContext(name)
    ctx.positions = dict(zip(keys, range(block_tokens, (len(keys) + 1) * block_tokens, block_tokens), strict=True))
    return ctx
