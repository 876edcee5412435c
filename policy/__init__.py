"""What leaves a tier when room is needed. Pure Python, no I/O; imports nothing else of this project."""

from omlxd.policy.arc import ARCCachePolicy
from omlxd.policy.base import CachePolicy, ChunkStatus, RequestContext, Victims, order_request_keys
from omlxd.policy.lru import LRUCachePolicy
from omlxd.policy.registry import get_policy, policy_names, register_policy

__all__ = [
    "ARCCachePolicy",
    "CachePolicy",
    "ChunkStatus",
    "LRUCachePolicy",
    "RequestContext",
    "Victims",
    "get_policy",
    "order_request_keys",
    "policy_names",
    "register_policy",
]
