"""The server on another host (a network namespace), and the link to it cut and healed under load."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import omlxd
from tests.e2e.blocks import chain, payload
from tests.e2e.conftest import StartDaemon
from tests.e2e.test_remote import SIZES, load_exactly, remote_of, space_of, stats_of, store_and_send, wait_for_state
from tests.storage.far_host import NEEDS, available, far_host
from tests.storage.valkey_server import running, wait_until

pytestmark = [pytest.mark.root, pytest.mark.slow]

ROUNDS = 20
BLOCK = 300_000


@pytest.mark.skipif(not available(), reason=NEEDS)
def test_twenty_partitions_under_load_make_no_error_and_no_wrong_byte(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    with far_host() as host, running(tmp_path / "valkey", host=host) as server:
        a = start_daemon("a", remote_url=server.url, **SIZES)
        # No SSD and little RAM: most of what B loads comes over the link.
        b = start_daemon("b", remote_url=server.url, ram_size="6MiB", ssd_size="0")
        shared = [chain(seed, 12) for seed in range(2)]
        fresh = itertools.count(1000)
        with omlxd.connect(a.socket) as at_a, omlxd.connect(b.socket) as at_b:
            for hashes in shared:
                store_and_send(at_a, hashes)
            wait_for_state(at_b, "ok")
            for number in range(ROUNDS):
                for hashes in shared:
                    wait_until(lambda hashes=hashes: load_exactly(at_b, hashes, timeout=20) is None, "all of it")  # type: ignore[misc]
                cut = host.swallow if number % 2 else host.pull
                with space_of(at_b).load_keys(shared[number % 2], timeout=20) as lease:
                    cut()  # in the middle of values
                    for block in lease:
                        assert bytes(block.view) == payload(block.key, BLOCK)
                while remote_of(at_b)["state"] == "ok":
                    new = chain(next(fresh), 2)
                    assert space_of(at_b).match_keys(new).blocks == 0
                    assert space_of(at_b).store_keys(new, [payload(h, BLOCK) for h in new]).stored == 2
                    assert load_exactly(at_b, new) is None
                    load_exactly(at_b, shared[next(fresh) % 2], timeout=20)
                host.heal()
                wait_for_state(at_b, "ok")
            assert remote_of(at_b)["counts"].get("strangers", 0) == 0
            assert stats_of(at_b)["counts"].get("internal_errors", 0) == 0
            assert stats_of(at_b)["counts"]["hits_remote"] > 10 * ROUNDS
