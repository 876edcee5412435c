"""The remote tier against a real server: what one machine stored, another has byte-exact, or does not have."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from omlxd.storage.remote_known import Memory
from omlxd.storage.remote_seal import Plain
from omlxd.storage.tier import Damaged, Missing, OuterTier, TierHost, load_tier
from tests.storage.remote_machine import Machine, machine, until
from tests.storage.ssd_store import NAMESPACE, OTHER, chain_of, payload_of
from tests.storage.valkey_server import ValkeyServer, cluster, running

KIB = 1024
BRIEF = Memory(present_seconds=30.0, absent_seconds=0.0, unanswered_seconds=0.0)
"""Whoever looks again asks again."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with running(tmp_path_factory.mktemp("valkey")) as found:
        yield found


@pytest.fixture(autouse=True)
def _empty(request: pytest.FixtureRequest) -> None:
    if "server" in request.fixturenames:
        found: ValkeyServer = request.getfixturevalue("server")
        with found.client() as client:
            client.flushall()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(os.urandom(32).hex().encode())
    path.chmod(0o600)
    return path


def test_what_one_machine_stored_another_has_byte_exact(server: ValkeyServer) -> None:
    sizes = [1, 100, 4096, 512 * KIB, 512 * KIB + 1, 3 * 512 * KIB + 77, 9 << 20]

    async def run() -> None:
        async with machine(server.url) as a, machine(server.url) as b:
            await a.well()
            await b.well()
            metas = chain_of("shared", sizes)
            a.offer(metas)
            await a.sent(len(metas))
            assert await b.find(meta.key for meta in metas) == [meta.key for meta in metas]
            for meta in metas:
                header = b.tier.meta(meta.key)
                assert header is not None
                assert header.meta == meta
                assert await b.fetch(meta.key) == payload_of(meta.key, meta.nbytes)

    asyncio.run(run())


@pytest.mark.parametrize("codec", ["raw", "zstd", "zstd-planes2", "zstd-planes4"])
def test_every_codec_travels(server: ValkeyServer, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    floats = np.random.default_rng(1).normal(size=700_000).astype(np.float32)
    payload = floats.tobytes() + b"odd"

    async def run() -> None:
        async with machine(server.url) as a, machine(server.url) as b:
            await a.well()
            await b.well()
            a.tier._codecs.set(NAMESPACE, codec if "planes" not in codec else "zstd-planes")
            (meta,) = chain_of(codec, [len(payload)])
            a.blocks[meta.key] = (meta, payload)
            a.tier.offer(meta)
            await a.sent(1)
            assert await b.find([meta.key]) == [meta.key]
            assert await b.fetch(meta.key) == payload

    asyncio.run(run())


def test_a_block_that_is_there_is_not_sent_again(server: ValkeyServer) -> None:
    async def run() -> None:
        async with machine(server.url) as a, machine(server.url) as b:
            await a.well()
            await b.well()
            metas = chain_of("twice", [1000] * 20)
            a.offer(metas)
            a.offer(metas)
            await a.sent(20)
            b.offer(metas)
            await until(lambda: b.tier.counts["present"] == 20, "b to see them")
            assert a.tier.counts["written"] == 20
            assert b.tier.counts["written"] == 0

    asyncio.run(run())


def test_a_prefix_is_one_round_trip(server: ValkeyServer) -> None:
    async def run() -> None:
        async with machine(server.url) as a, machine(server.url, memory=BRIEF) as b:
            await a.well()
            await b.well()
            metas = chain_of("long", [50] * 2048)
            a.offer(metas[:700])
            await a.sent(700)
            with server.client() as client:
                before = client.info("commandstats").get("cmdstat_mget", {"calls": 0})["calls"]
                found = await b.find(meta.key for meta in metas)
                calls = client.info("commandstats")["cmdstat_mget"]["calls"] - before
            assert found == [meta.key for meta in metas[:700]]
            assert calls == 1

    asyncio.run(run())


def test_answers_are_remembered_for_a_while_and_within_bounds(server: ValkeyServer) -> None:
    async def run() -> None:
        async with machine(server.url, memory=Memory(most=100, absent_seconds=60)) as a:
            await a.well()
            keys = [meta.key for meta in chain_of("absent", [1] * 250)]
            assert await a.find(keys) == []
            assert a.tier.unasked(keys[150:]) == []
            assert len(a.tier.unasked(keys)) == 150
            assert a.tier.stats()["known_blocks"] == 100

    asyncio.run(run())


def test_sealed_blocks_are_read_with_the_key_only(server: ValkeyServer, key_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(os.urandom(32).hex().encode())
    other.chmod(0o600)

    async def run() -> None:
        async with machine(server.url, key_file=str(key_file)) as a, machine(server.url, key_file=str(key_file)) as b:
            await a.well()
            await b.well()
            metas = chain_of("secret", [600 * KIB] * 3)
            a.offer(metas)
            await a.sent(3)
            keys = [meta.key for meta in metas]
            assert await b.find(keys) == keys
            assert await b.fetch(keys[1]) == payload_of(keys[1], 600 * KIB)
            for options in ({}, {"key_file": str(other)}):
                async with machine(server.url, **options) as stranger:
                    await stranger.well()
                    assert await stranger.find(keys) == []

    asyncio.run(run())
    with server.client() as client:
        names = client.keys("*")
        everything = b"".join([*names, *client.mget(names)])
    for meta in chain_of("secret", [600 * KIB] * 3):
        assert meta.key[:32] not in everything, "not even the names tell which prompts are there"
        assert payload_of(meta.key, 64) not in everything


def test_what_does_not_belong_to_the_block_is_never_served(server: ValkeyServer, key_file: Path) -> None:
    """A header or a piece moved, changed, cut or of another kind: a miss, and nothing worse."""

    async def run(options: dict[str, str]) -> None:
        async with machine(server.url, **options) as a:
            await a.well()
            metas = chain_of(f"many{len(options)}", [600 * KIB] * 8)
            a.offer(metas)
            await a.sent(8)
            seal = a.tier._seal
            names = [seal.name(meta.key) for meta in metas]
            headers = [a.tier.meta(meta.key) for meta in metas]
            with server.client() as client:
                first = [b"%b:%b:0" % (name, header.write_id) for name, header in zip(names, headers, strict=True)]  # type: ignore[union-attr]
                flipped = bytearray(client.get(first[0]))
                flipped[1000] ^= 1
                client.set(first[0], bytes(flipped))
                client.set(first[1], client.get(first[2]))  # another block's
                client.delete(first[3])
                client.set(first[4], client.get(first[4])[:-1])
                client.set(names[5], client.get(names[6]))  # another block's header
                client.delete(names[6])
                client.rpush(names[6], b"not", b"bytes")
                changed = bytearray(client.get(names[7]))
                changed[len(changed) // 2] ^= 255
                client.set(names[7], bytes(changed))
            async with machine(server.url, memory=BRIEF, **options) as b:
                await b.well()
                keys = [meta.key for meta in metas]
                assert await b.find(keys) == keys[:5]
                for at, error in ((0, Damaged), (1, Damaged), (3, Missing), (4, Damaged)):
                    with pytest.raises(error):
                        await b.fetch(keys[at])
                assert await b.fetch(keys[2]) == payload_of(keys[2], 600 * KIB)
                assert b.tier.stats()["state"] == "ok"

    asyncio.run(run({}))
    asyncio.run(run({"key_file": str(key_file)}))


def test_a_header_of_a_namespace_that_no_engine_has_named_is_a_miss(server: ValkeyServer) -> None:
    async def run() -> None:
        async with machine(server.url) as a, machine(server.url) as b:
            await a.well()
            await b.well()
            a.tier.register_namespace(OTHER, {"block_tokens": 16})
            metas = chain_of("other", [1000], namespace=OTHER)
            a.offer(metas)
            await a.sent(1)
            assert await b.find([metas[0].key]) == []
            assert b.tier.counts["strangers"] == 1

    asyncio.run(run())


def test_blocks_live_as_long_as_their_namespace_says(server: ValkeyServer) -> None:
    async def run() -> None:
        async with machine(server.url, ttl="1h") as a:
            await a.well()
            a.tier.register_namespace(OTHER, {"block_tokens": 16})
            a.tier.set_ttl(OTHER, 60.0)
            a.offer([*chain_of("long", [1000]), *chain_of("short", [1000], namespace=OTHER)])
            await a.sent(2)

    asyncio.run(run())
    with server.client() as client:
        lives = sorted(client.ttl(name) for name in client.keys("*"))
    assert len(lives) == 4
    assert all(0 < life <= 60 for life in lives[:2])
    assert all(3000 < life <= 3600 for life in lives[2:])


def test_a_block_that_is_fetched_late_in_its_life_gets_a_new_one(server: ValkeyServer) -> None:
    async def run() -> None:
        async with machine(server.url, ttl="1h") as a, machine(server.url, ttl="1h") as b:
            await a.well()
            await b.well()
            (meta,) = chain_of("old", [1000])
            a.offer([meta])
            await a.sent(1)
            assert await b.find([meta.key]) == [meta.key]
            with server.client() as client:
                for name in client.keys("*"):
                    client.expire(name, 5)
                b.tier._wall = lambda: header.stored_at + 100  # type: ignore[union-attr]
                header = b.tier.meta(meta.key)
                await b.fetch(meta.key)
                assert all(client.ttl(name) <= 5 for name in client.keys("*"))
                b.tier._wall = lambda: header.stored_at + 3000  # type: ignore[union-attr]
                await b.fetch(meta.key)
                assert all(client.ttl(name) > 3000 for name in client.keys("*"))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("admission", "first", "again"),
    [("everything", 10, 10), ("second_touch", 0, 10), ("prefix:64", 4, 4)],
)
def test_admission_decides_what_is_sent(server: ValkeyServer, admission: str, first: int, again: int) -> None:
    async def run() -> None:
        async with machine(server.url, admission=admission) as a:
            await a.well()
            metas = chain_of("admitted", [100] * 10)  # of 16 tokens each
            a.offer(metas)
            await a.sent(first)
            await until(lambda: not a.tier.stats()["queue"], "the queue to be empty")
            assert a.tier.counts["written"] == first
            a.offer(metas, asked_again=True)
            await a.sent(again)
            await until(lambda: not a.tier.stats()["queue"], "the queue to be empty")
            assert a.tier.counts["written"] == again

    asyncio.run(run())


def test_a_block_that_has_left_before_its_turn_is_dropped_and_counted(server: ValkeyServer) -> None:
    async def run() -> None:
        async with machine(server.url) as a:
            await a.well()
            metas = chain_of("gone", [100] * 3)
            a.offer(metas)
            del a.blocks[metas[1].key]
            await a.sent(2)
            assert a.tier.counts["dropped_gone"] == 1

    asyncio.run(run())


def test_what_an_operator_removes_leaves_the_server(server: ValkeyServer) -> None:
    async def run() -> None:
        async with machine(server.url) as a:
            await a.well()
            metas = chain_of("removed", [600 * KIB] * 2)
            a.offer(metas)
            await a.sent(2)
            a.tier.forget([metas[0].key])
            await until(lambda: a.tier.counts["removed"] == 1, "the removal")
            assert metas[0].key not in a.tier
            with server.client() as client:
                assert len(client.keys("*")) == 3
                assert all(Plain().name(metas[1].key) in name for name in client.keys("*"))

    asyncio.run(run())


def test_what_waits_is_sent_before_the_end(server: ValkeyServer) -> None:
    async def run() -> Machine:
        async with machine(server.url) as a:
            await a.well()
            a.offer(chain_of("late", [1000] * 50))
        return a

    assert asyncio.run(run()).tier.counts["written"] == 50


def test_three_nodes_share_the_blocks_and_are_asked_once_each(tmp_path: Path) -> None:
    with cluster(tmp_path) as servers:

        async def run() -> None:
            url = f"valkey+cluster://127.0.0.1:{servers[0].port}"
            async with machine(url) as a, machine(url) as b:
                for one in (a, b):
                    await until(lambda one=one: len(one.tier.stats()["nodes"]) == 3, "the map")  # type: ignore[misc, arg-type]
                    await one.well()
                metas = chain_of("spread", [3000] * 300)
                a.offer(metas)
                await a.sent(300)
                keys = [meta.key for meta in metas]
                asks = b.tier.counts["asks"]
                assert await b.find(keys) == keys
                assert b.tier.counts["asks"] == asks + 3
                for key in keys[::10]:
                    assert await b.fetch(key) == payload_of(key, 3000)
            for server in servers:
                with server.client() as client:
                    assert client.dbsize() > 20, "a third of them, about"

        asyncio.run(run())


def test_a_tier_is_named_by_module_and_class() -> None:
    made = load_tier("omlxd.storage.remote:RemoteTier")(
        {"url": "valkey://127.0.0.1:1"}, TierHost(lambda key: None, float)
    )
    assert isinstance(made, OuterTier)
    for name, message in [
        ("omlxd.storage.remote", "write module:Class"),
        ("no.such.module:Tier", "no.such|No module named"),
        ("omlxd.storage.remote:Nothing", "has no Nothing"),
        ("omlxd.storage.blocks:BlockMeta", "no tier: it lacks"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_tier(name)
