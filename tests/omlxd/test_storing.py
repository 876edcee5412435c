"""Long chains go to the daemon window by window, and each key once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

import omlxd
import omlxd.aio
from omlxd import storing
from omlxd.chains import Chain, Chains
from omlxd.errors import Refused
from omlxd.fields import MAX_KEYS, Fields
from omlxd.holding import Holding
from omlxd.operations import CHAINS, Ask, Limits, Operation, SpaceCore
from omlxd.protocol import Code, Message, RequestError, encode
from omlxd.results import StoreResult
from omlxd.storage.blocks import block_key
from omlxd.storage.chain import Namespace
from tests.e2e.blocks import chain, payload
from tests.omlxd.configured import ConfiguredDaemon

LIMITS = Limits("boot", 1, 64 << 20, 1 << 30, capabilities=frozenset([CHAINS]))
SPACE = SpaceCore(Namespace("m", "f", 64, b""), None)


def keys(count: int, salt: str = "k") -> list[bytes]:
    return [f"{salt}{index}".encode().ljust(32, b".") for index in range(count)]


class Client:
    """What an operation needs of a connection."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.chains: Iterator[int] = itertools.count()

    @property
    def holding(self) -> Holding:
        raise AssertionError("nothing is written here")


class Daemon:
    """Has every block already, checks what it is sent, and counts it."""

    def __init__(self, hashes: list[bytes], *, remembers: bool = True) -> None:
        self.chains = Chains()
        self.sent = 0
        self.requests = 0
        self._hashes = hashes
        self._remembers = remembers

    def run(self, operation: Operation[StoreResult]) -> StoreResult:
        try:
            step = next(operation)
            while True:
                assert isinstance(step, Ask)
                try:
                    answer = self.answer(step.fields)
                except RequestError as error:
                    step = operation.throw(Refused(error.code, str(error)))
                else:
                    step = operation.send(answer)
        except StopIteration as stop:
            result: StoreResult = stop.value
            return result

    def answer(self, fields: Message) -> Message:
        self.requests += 1
        self.sent += len(encode(fields))
        known, number = fields.get("known", 0), fields.get("chain")
        mine = self.chains.take(number, known) if known else Chain()
        mine.extend(Fields(fields).keys())
        if fields.get("goes_on") and self._remembers:
            self.chains.keep(number, mine)
        assert mine.keys == [block_key(one) for one in self._hashes[: len(mine.keys)]], "the chain from its head on"
        return {"slots": [], "present": len(mine.keys) - fields["first"], "declined": {}}


def offer(daemon: Daemon, client: Client, hashes: list[bytes], start: int = 0) -> StoreResult:
    payloads = [b"x"] * (len(hashes) - start)
    return daemon.run(storing.store(client, SPACE, hashes, payloads, start, 0.0, lambda: 0.0))


@pytest.mark.parametrize("start", [0, 3000])
def test_what_is_sent_grows_with_the_chain_and_not_with_its_square(start: int) -> None:
    hashes = keys(32_768)
    daemon = Daemon(hashes)
    assert offer(daemon, Client(), hashes, start).present == len(hashes) - start
    assert daemon.requests == -(-(len(hashes) - start) // storing.WINDOW_BLOCKS)
    assert daemon.sent < 1.1 * 36 * len(hashes)
    assert not len(daemon.chains), "nothing of it is remembered when all is sent"


def test_a_daemon_that_cannot_remember_is_sent_all_from_the_head_on() -> None:
    hashes = keys(5000)
    daemon = Daemon(hashes)
    client = Client(replace(LIMITS, capabilities=frozenset()))
    assert offer(daemon, client, hashes).present == 5000
    assert daemon.requests == 3
    assert daemon.sent > 36 * (2048 + 4096 + 5000)


def test_a_daemon_that_has_forgotten_is_told_again() -> None:
    hashes = keys(5000)
    daemon = Daemon(hashes, remembers=False)
    assert offer(daemon, Client(), hashes).present == 5000
    assert daemon.requests == 5


def test_another_refusal_is_the_callers() -> None:
    hashes = keys(2048 + MAX_KEYS)
    with pytest.raises(Refused, match="at most"):
        offer(Daemon(hashes), Client(), hashes)


def test_what_is_remembered_is_bounded_and_exact() -> None:
    chains = Chains()
    for number in range(5):
        one = Chain()
        one.extend(keys(MAX_KEYS // 3, f"{number}-"))
        chains.keep(number, one)
    chains.keep(5, Chain())
    assert len(chains) == 3
    with pytest.raises(RequestError, match="send all"):
        chains.take(0, MAX_KEYS // 3)
    with pytest.raises(RequestError, match="send all"):
        chains.take(4, 7)
    mine = chains.take(3, MAX_KEYS // 3)
    with pytest.raises(RequestError, match="twice"):
        mine.extend([mine.keys[5]])
    with pytest.raises(RequestError, match="twice"):
        mine.extend([b"new", b"new"])
    with pytest.raises(RequestError) as refused:
        mine.extend(keys(MAX_KEYS, "more"))
    assert refused.value.code == Code.TOO_MANY
    assert len(mine.keys) == MAX_KEYS // 3


def test_long_chains_arrive_whole(daemon: ConfiguredDaemon) -> None:
    """With a real daemon, through both clients; what one stores the other loads."""
    first, second = chain(1, 4500), chain(2, 4500)
    parts = {one: payload(one, 50) for one in first + second}

    async def store_second() -> StoreResult:
        async with await omlxd.aio.connect(str(daemon.socket)) as cache:
            space = await cache.namespace(model="m", fingerprint="f")
            return await space.store_keys(second, [parts[one] for one in second])

    with omlxd.connect(daemon.socket) as cache:
        space = cache.namespace(model="m", fingerprint="f")
        assert space.store_keys(first, [parts[one] for one in first]).stored == len(first)
        assert asyncio.run(store_second()).stored == len(second)
        for hashes in (first, second):
            with space.load_keys(hashes) as lease:
                assert [bytes(block.view) for block in lease] == [parts[one] for one in hashes]
        (row,) = cache.call("list", prefix=first[4321].hex())["blocks"]
        assert (row["position"], row["parent"]) == (4321, block_key(first[4320]))


@pytest.mark.parametrize("wrong", [{"known": 3}, {"chain": 1, "known": 3}, {"chain": -1}, {"chain": 1, "known": -1}])
def test_a_chain_that_nobody_has_begun_is_refused(daemon: ConfiguredDaemon, wrong: Message) -> None:
    with omlxd.connect(daemon.socket) as cache:
        handle = cache.call("namespace", descriptor=SPACE.namespace.descriptor())["ns"]
        with pytest.raises(omlxd.Refused):
            cache.call("prepare_store", ns=handle, keys=block_key(bytes(32)), sizes=1, first=0, **wrong)
        assert cache.stats()


def test_a_block_that_the_tier_can_never_hold_is_declined_and_told_of(daemon: ConfiguredDaemon) -> None:
    with omlxd.connect(daemon.socket) as cache:
        space = cache.namespace(model="org/large", fingerprint="f")
        block = bytes(65 << 20)
        assert space.store_keys(chain(3, 1), [block]).declined == {"too_large": 1}
        assert space.store_keys(chain(4, 1), [b"x"]).stored == 1, "others are kept"
        stats = cache.stats()
        (warning,) = stats["warnings"]
        assert "org/large has 65.0 MiB" in warning
        assert "raise size under [ram]" in warning
        cache.call("resize", ram_bytes=128 << 20)
        assert cache.stats()["warnings"] == []
        assert space.store_keys(chain(3, 1), [block]).stored == 1
