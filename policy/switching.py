"""Going on with another policy and the same contents."""

from __future__ import annotations

from omlxd.policy.base import CachePolicy
from omlxd.policy.registry import get_policy


def switched(old: CachePolicy, name: str) -> CachePolicy:
    """A policy of the kind ``name`` that holds what ``old`` holds, in the same order.

    Raises ``ValueError`` when there is no such policy, or when it does not take all of it; ``old`` is as it was.
    """
    try:
        chunks = list(old.chunks())
        policy = get_policy(name)(old.cache_capacity)
        for key, chunk in chunks:
            policy.insert(key, chunk)
            if chunk.ref_cnt > 0:
                policy.mark_non_evictable(key)
        lost = sum(policy.get(key) is not chunk for key, chunk in chunks)
    except ValueError:
        raise
    except Exception as error:  # a policy from outside may raise anything
        raise ValueError(f"cannot switch to policy {name!r}: {error!r}; the old one goes on") from error
    if lost:
        raise ValueError(
            f"cannot switch to policy {name!r}: it lost {lost} of {len(chunks)} chunks; the old one goes on"
        )
    return policy
