"""A request of an engine, as policies see it: which keys it is about, and where they lie in the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from omlxd.policy.base import RequestContext


def request(
    name: str, keys: Sequence[bytes], block_tokens: int, running: RequestContext | None = None
) -> RequestContext:
    """The context of a request for ``keys``, the blocks of one chain from its head on; ``running``: the one to go on with."""
    ctx = RequestContext(name) if running is None else running
    if len(ctx.positions) >= len(keys):
        return ctx
    ctx.positions = dict(zip(keys, range(block_tokens, (len(keys) + 1) * block_tokens, block_tokens), strict=True))
    return ctx


def goes_on(ctx: RequestContext, keys: Sequence[bytes]) -> bool:
    """Whether ``keys`` are of the chain that the request of ``ctx`` is about: one is a prefix of the other.

    A key names all that is before it, so one comparison tells.
    """
    known = ctx.positions
    if not known or not keys:
        return False
    return keys[-1] in known if len(keys) <= len(known) else keys[len(known) - 1] == next(reversed(known))
