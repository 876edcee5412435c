from __future__ import annotations

import sys

import pytest

from omlxd.policy import ARCCachePolicy, LRUCachePolicy, get_policy, policy_names, register_policy, registry
from tests.policy.test_base import Plain


@pytest.fixture(autouse=True)
def registered_names_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_PLACES", dict(registry._PLACES))


def test_the_exact_policies_have_names() -> None:
    assert get_policy("lru") is LRUCachePolicy
    assert get_policy("arc") is ARCCachePolicy
    assert {"lru", "arc"} <= set(policy_names())


def test_every_registered_name_leads_to_a_policy() -> None:
    for name in policy_names():
        assert get_policy(name)(4).cache_capacity == 4


def test_a_policy_from_outside_is_named_by_its_place_or_registered() -> None:
    place = "tests.policy.test_base:Plain"
    assert get_policy(place) is Plain
    register_policy("plain", "tests.policy.test_base", "Plain")
    assert get_policy("plain") is Plain
    assert "plain" in policy_names()


def test_a_registered_module_is_imported_only_when_asked_for() -> None:
    register_policy("later", "no_such_module_anywhere", "Policy")
    assert "no_such_module_anywhere" not in sys.modules
    with pytest.raises(ValueError, match=r"'later'.*no_such_module_anywhere.*known: .*lru"):
        get_policy("later")


@pytest.mark.parametrize("name", ["lru", "", "a:b"])
def test_a_name_that_is_taken_or_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=repr(name)):
        register_policy(name, "m", "C")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lruu", r"unknown policy 'lruu'; known: .*arc.*lru"),
        ("", "unknown policy ''"),
        (":X", "unknown policy ':X'"),
        ("pkg:", "unknown policy 'pkg:'"),
        ("no_such_pkg.mod:X", "cannot import 'no_such_pkg.mod'"),
        ("omlxd.policy.lru:Nope", "has no 'Nope'"),
        ("omlxd.policy.base:ChunkStatus", "'ChunkStatus' is no subclass of omlxd.policy.CachePolicy"),
        ("omlxd.policy.base:order_request_keys", "no subclass"),
    ],
)
def test_what_is_wrong_and_what_exists_is_said(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        get_policy(name)
    assert "lru" in str(caught.value)
