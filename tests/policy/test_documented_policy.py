"""The policy that docs/policies.md shows, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

from omlxd.policy import CachePolicy, RequestContext
from omlxd.storage.chunks import ChunkManager, Lookup
from tests.policy.models import key_of

DOC = Path(__file__).parents[2] / "docs" / "policies.md"
K = [key_of(number) for number in range(6)]


def documented_policy() -> type[CachePolicy]:
    (source,) = re.findall(r"```python\n(from omlxd.policy import CachePolicy.*?)```", DOC.read_text(), flags=re.DOTALL)
    scope: dict[str, object] = {}
    exec(compile(source, str(DOC), "exec"), scope)
    found = scope["Newest"]
    assert isinstance(found, type)
    assert issubclass(found, CachePolicy)
    return found


def test_it_drives_a_tier_and_can_be_left_for_another() -> None:
    manager = ChunkManager(3, documented_policy())
    ctx = RequestContext("r")
    manager.prepare_store(K[:3], ctx)
    manager.complete_store(K[:3], True, ctx)
    manager.prepare_load([K[2]], ctx)
    prepared = manager.prepare_store([K[3]], ctx)
    assert prepared is not None
    assert prepared.evicted_keys == [K[1]]
    assert manager.prepare_store([K[4], K[5]]) is None
    assert manager.lookup(K[0]) is Lookup.HIT
    manager.on_request_finished(ctx)
    manager.switch_policy("lru")
    assert manager.lookup_many(K[:4]) == [Lookup.HIT, Lookup.MISS, Lookup.HIT, Lookup.PENDING]
