"""What the configuration says of the SSD tier, end to end: shares, codecs, write modes, back-pressure, durability, wear."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import omlxd
from omlxd.client import Cache, Space
from omlxd.schema import SsdStats
from tests.e2e.blocks import chain, payload
from tests.omlxd.configured import ConfiguredDaemon, stats_of, wait_for

NBYTES = 200_000
BLOCKS = 5
MIB = 1 << 20


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[ConfiguredDaemon]:
    """Not started: the test sets it up first."""
    made = ConfiguredDaemon(tmp_path / "daemon")
    made.tables["ssd"]["codec"] = '"raw"'
    yield made
    made.kill()
    made.close()


def start(daemon: ConfiguredDaemon, extra: str = "", **ssd: str) -> None:
    daemon.tables["ssd"] |= {name: f'"{value}"' for name, value in ssd.items()}
    daemon.write(extra)
    daemon.start()


def space_of(cache: Cache, model: str = "org/model") -> Space:
    return cache.namespace(model=model, fingerprint="f")


def store(space: Space, number: int, blocks: int = BLOCKS) -> list[bytes]:
    keys = chain(number, blocks)
    space.store_keys(keys, [payload(key, NBYTES) for key in keys])
    return keys


def load(space: Space, keys: list[bytes]) -> int:
    with space.load_keys(keys, timeout=30) as lease:
        got = [bytes(block.view) for block in lease]
    assert got == [payload(key, NBYTES) for key in keys[: len(got)]]
    return len(got)


def ssd_of(cache: Cache) -> SsdStats:
    found = stats_of(cache)["ssd"]
    assert found is not None
    return found


def on_ssd(cache: Cache) -> dict[str, int]:
    """Payload bytes on the SSD by model."""
    return {one["model"]: one["ssd_bytes"] for one in stats_of(cache)["namespaces"]}


def flush(cache: Cache) -> None:
    cache.call("flush", timeout=60)


def test_a_share_bounds_one_model_and_costs_no_other(configured: ConfiguredDaemon) -> None:
    start(configured, '[namespace."org/greedy"]\nmax_share = "25%"', size="16MiB")
    with omlxd.connect(configured.socket) as cache:
        modest, greedy = space_of(cache, "org/modest"), space_of(cache, "org/greedy")
        kept = store(modest, 1)
        for number in range(20):
            store(greedy, 100 + number)
            flush(cache)
        held = on_ssd(cache)
        assert 2 * MIB < held["org/greedy"] <= 4 * MIB
        assert held["org/modest"] == BLOCKS * NBYTES
        cache.call("clear", tier="ram", timeout=60)
        assert load(modest, kept) == BLOCKS
        assert load(greedy, chain(119, BLOCKS)) == BLOCKS, "its newest are there"


def test_each_model_has_the_codec_that_it_is_given(configured: ConfiguredDaemon) -> None:
    start(configured, '[namespace."org/packed"]\ncodec = "zstd"')
    with omlxd.connect(configured.socket) as cache:
        stored = {}
        for model in ("org/plain", "org/packed"):
            before = ssd_of(cache)["stored_bytes"]
            space_of(cache, model).store_keys(chain(1, BLOCKS), [bytes(NBYTES)] * BLOCKS)
            flush(cache)
            stored[model] = ssd_of(cache)["stored_bytes"] - before
        assert stored["org/plain"] == BLOCKS * NBYTES
        assert stored["org/packed"] < BLOCKS * NBYTES // 10
        cache.call("clear", tier="ram", timeout=60)
        with space_of(cache, "org/packed").load_keys(chain(1, BLOCKS), timeout=30) as lease:
            assert [bytes(block.view) for block in lease] == [bytes(NBYTES)] * BLOCKS


def test_write_through_writes_without_being_asked(configured: ConfiguredDaemon) -> None:
    start(configured, mode="write_through")
    with omlxd.connect(configured.socket) as cache:
        store(space_of(cache), 1)
        wait_for(lambda: ssd_of(cache)["blocks"] == BLOCKS and ssd_of(cache)["dirty_bytes"] == 0)


def test_write_back_keeps_it_in_ram_until_it_has_to_be_written(configured: ConfiguredDaemon) -> None:
    start(configured, mode="write_back")
    with omlxd.connect(configured.socket) as cache:
        store(space_of(cache), 1)
        assert (ssd_of(cache)["dirty_bytes"], ssd_of(cache)["blocks"]) == (BLOCKS * NBYTES, 0)
        flush(cache)
        assert (ssd_of(cache)["dirty_bytes"], ssd_of(cache)["blocks"]) == (0, BLOCKS)


def test_second_touch_writes_what_was_asked_for_again_only(configured: ConfiguredDaemon) -> None:
    start(configured, mode="second_touch")
    with omlxd.connect(configured.socket) as cache:
        space = space_of(cache)
        wanted = store(space, 1)
        store(space, 2)
        flush(cache)
        assert ssd_of(cache)["blocks"] == 0
        assert load(space, wanted) == BLOCKS
        flush(cache)
        assert ssd_of(cache)["blocks"] == BLOCKS
        assert stats_of(cache)["counts"]["spill_not_admitted"] == 2 * BLOCKS


def test_second_touch_writes_what_had_left_and_was_stored_again(configured: ConfiguredDaemon) -> None:
    start(configured, mode="second_touch")
    with omlxd.connect(configured.socket) as cache:
        space = space_of(cache)
        keys = store(space, 1)
        cache.call("clear", tier="ram", timeout=60)
        assert load(space, keys) == 0
        assert store(space, 1) == keys
        flush(cache)
        assert ssd_of(cache)["blocks"] == BLOCKS


def test_what_is_clean_is_never_written_again_and_what_is_written_is_counted(configured: ConfiguredDaemon) -> None:
    start(configured)
    with omlxd.connect(configured.socket) as cache:
        space = space_of(cache)
        keys = store(space, 1)
        flush(cache)
        before = ssd_of(cache)
        assert before["written_bytes"] >= BLOCKS * NBYTES
        assert before["written_per_day"] > 0
        for _ in range(3):
            assert load(space, keys) == BLOCKS
            cache.call("clear", tier="ram", timeout=60)
            assert load(space, keys) == BLOCKS, "from the SSD"
            store(space, 1)
            flush(cache)
        after = ssd_of(cache)
        assert stats_of(cache)["counts"]["spill_spilled"] == BLOCKS
        assert after["written_bytes"] - before["written_bytes"] < NBYTES, "recency, no payload"
        assert after["read_bytes"] == 3 * BLOCKS * NBYTES


def test_more_than_a_crash_may_lose_is_declined_with_the_reason_after_a_bounded_time(
    configured: ConfiguredDaemon,
) -> None:
    """``max_dirty`` is less than one chain: the writer catches up where there is time, else the tail is declined."""
    start(configured, max_dirty="1MiB")
    with omlxd.connect(configured.socket) as cache:
        space = space_of(cache)
        keys = chain(1, 20)
        result = space.store_keys(keys, [payload(key, NBYTES) for key in keys], timeout=0)
        assert 0 < result.stored < 20
        assert sum(result.declined.values()) == 20 - result.stored
        assert set(result.declined) == {"ssd_behind", "after_a_declined_block"}
        assert ssd_of(cache)["dirty_bytes"] <= MIB
        patient = space.store_keys(chain(2, 20), [payload(key, NBYTES) for key in chain(2, 20)], timeout=60)
        assert patient.stored == 20
        assert ssd_of(cache)["dirty_bytes"] <= MIB


@pytest.mark.parametrize("durability", ["commit", "interval", "none"])
def test_every_durability_keeps_what_was_flushed_when_the_daemon_is_killed(
    configured: ConfiguredDaemon, durability: str
) -> None:
    start(configured, durability=durability)
    owner = configured.directory / "store" / "owner"
    assert owner.read_text().split()[2] == durability
    with omlxd.connect(configured.socket) as cache:
        keys = store(space_of(cache), 1)
        flush(cache)
    configured.kill()
    configured.start()
    with omlxd.connect(configured.socket) as cache:
        assert load(space_of(cache), keys) == BLOCKS
        assert stats_of(cache)["warnings"] == []
