from __future__ import annotations

import pytest

from omlxd.policy.base import ChunkStatus
from omlxd.policy.lru import LRUCachePolicy
from omlxd.policy.switching import switched


class Forgetful(LRUCachePolicy):
    """Loses every other chunk."""

    def insert(self, key: bytes, chunk: ChunkStatus) -> None:
        if key[0] % 2:
            super().insert(key, chunk)


class Broken(LRUCachePolicy):
    """Fails when it is given a chunk."""

    def insert(self, key: bytes, chunk: ChunkStatus) -> None:
        raise RuntimeError("no")


def filled(readers: dict[int, int]) -> LRUCachePolicy:
    policy = LRUCachePolicy(10)
    for number in range(5):
        chunk = ChunkStatus(number)
        chunk.ref_cnt = readers.get(number, 0)
        policy.insert(bytes([number]), chunk)
        if chunk.ref_cnt:
            policy.mark_non_evictable(bytes([number]))
    return policy


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_contents_order_and_readers_come_along(name: str) -> None:
    old = filled({0: 1})
    new = switched(old, name)
    assert [key for key, _ in new.chunks()] == [key for key, _ in old.chunks()]
    assert all(new.get(key) is chunk for key, chunk in old.chunks())
    victims = new.evict(2, ())
    assert victims is not None
    assert [key for key, _ in victims] == [b"\x01", b"\x02"]  # b"\x00" is being read


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nobody", "nobody"),
        (f"{__name__}:Forgetful", "lost 3 of 5 chunks"),
        (f"{__name__}:Broken", "RuntimeError"),
    ],
)
def test_refusal_leaves_the_old_policy_as_it_was(name: str, why: str) -> None:
    old = filled({})
    with pytest.raises(ValueError, match=why):
        switched(old, name)
    assert len(list(old.chunks())) == 5
