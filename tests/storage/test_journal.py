from __future__ import annotations

from omlxd.storage.blocks import BlockMeta
from omlxd.storage.journal import Journal, StoreChange

META = BlockMeta(b"k" * 36, b"n" * 32, 100, b"p" * 36, 3)


def test_change_carries_what_an_index_needs() -> None:
    told: list[StoreChange] = []
    journal = Journal(lambda key, tier: False)
    journal.listeners.append(told.append)
    journal.tell("stored", "ram", META)
    assert told == [StoreChange("stored", "ram", b"k" * 36, b"n" * 32, 100, b"p" * 36, 3, "", gone=False)]


def test_removal_says_whether_the_other_tier_still_has_it() -> None:
    told: list[bool] = []
    journal = Journal(lambda key, tier: tier == "ram")
    journal.listeners.append(lambda change: told.append(change.gone))
    journal.tell("removed", "ram", META, "evicted")
    journal.tell("removed", "ssd", META, "evicted")
    assert told == [False, True]


def test_nobody_is_asked_while_nobody_listens() -> None:
    def elsewhere(key: bytes, tier: str) -> bool:
        raise AssertionError("not needed")

    Journal(elsewhere).tell("removed", "ram", META)


def test_listener_may_leave_while_it_is_told() -> None:
    told: list[StoreChange] = []
    journal = Journal(lambda key, tier: False)

    def once(change: StoreChange) -> None:
        journal.listeners.remove(once)

    journal.listeners += [once, told.append]
    journal.tell("stored", "ram", META)
    assert len(told) == 1
