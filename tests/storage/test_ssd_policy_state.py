"""What a policy has learnt survives a stop in good order."""

from __future__ import annotations

from pathlib import Path

import pytest

from omlxd.policy.registry import policy_names
from omlxd.storage.ssd import SsdTier
from tests.storage.ssd_store import chain_of, open_tier, spill_in_groups


def _use(tier: SsdTier) -> None:
    """Three chains, one of them used twice more, one in part."""
    chains = [chain_of(name, [1000] * 5) for name in ("a", "b", "c")]
    for chain in chains:
        spill_in_groups(tier, chain)
    for chain, depth in ((chains[0], 5), (chains[1], 2), (chains[0], 5)):
        tier.touch([meta.key for meta in chain[:depth]])


@pytest.mark.parametrize("name", policy_names())
def test_the_state_of_every_policy_is_the_same_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    tier = open_tier(tmp_path, policy=name)
    _use(tier)
    before = tier._ledger.policy.state()
    assert before
    tier.close()
    tier = open_tier(tmp_path, policy=name)
    after = tier._ledger.policy.state()
    tier.close()
    assert after == before
    assert [record.getMessage() for record in caplog.records if "state" in record.getMessage()] == []
