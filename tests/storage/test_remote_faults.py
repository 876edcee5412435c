"""The remote tier when its server is slow, gone, full, read-only, strange, or cut off: local work goes on, and it recovers."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from omlxd.storage.remote import ASKS_PER_NODE
from omlxd.storage.remote_breaker import FAILURES
from omlxd.storage.remote_cluster import slots_of_tags
from omlxd.storage.remote_known import Memory
from omlxd.storage.tier import Missing, Trouble
from tests.storage.remote_machine import PATIENCE, Machine, machine, until
from tests.storage.ssd_store import chain_of, payload_of
from tests.storage.valkey_server import ValkeyServer, cluster, free_port, replica_of, running, wait_until

KIB = 1024
BRIEF = Memory(present_seconds=60.0, absent_seconds=0.0, unanswered_seconds=0.0)


async def in_state(one: Machine, state: str) -> None:
    await until(lambda: one.tier.stats()["state"] == state, f"state {state}: {one.tier.stats()}")


def told(one: Machine) -> str:
    return "\n".join(one.tier.troubles())


def test_a_server_that_hangs_is_left_alone_and_used_again_when_it_goes_on(tmp_path: Path) -> None:
    with running(tmp_path) as server:

        async def run() -> None:
            async with machine(server.url, memory=BRIEF, deadline="30ms") as a:
                await a.well()
                metas = chain_of("kept", [100 * KIB] * 4)
                a.offer(metas)
                await a.sent(4)
                keys = [meta.key for meta in chain_of("new", [1] * 50)]
                server.pause()
                asked = 0
                while a.tier.unasked(keys):
                    await a.tier.ask(keys, 5.0)
                    asked += 1
                assert asked <= 4, "a few lookups wait for the deadline, then nobody does"
                assert a.tier.stats()["state"] == "slow"
                assert "does not answer in time" in told(a) or "answers late" in told(a)
                assert metas[0].key not in a.tier
                assert not a.tier.pin(metas[0].key)
                a.offer(chain_of("offered meanwhile", [100]))
                server.go_on()
                await a.well()
                assert metas[0].key in a.tier
                await a.sent(5)

        try:
            asyncio.run(run())
        finally:
            server.go_on()


def test_a_server_that_is_killed_is_used_again_when_it_is_back(tmp_path: Path) -> None:
    with running(tmp_path) as server:

        async def run() -> None:
            async with machine(server.url, memory=BRIEF) as a:
                await a.well()
                metas = chain_of("before", [100 * KIB] * 4)
                a.offer(metas)
                await a.sent(4)
                server.kill()
                with pytest.raises(Trouble):
                    await a.fetch(metas[0].key)
                await in_state(a, "gone")
                assert "cannot be reached" in told(a)
                a.offer(chain_of("while it was gone", [1000] * 3))
                server.start()
                await a.sent(7)
                assert not told(a)
                with pytest.raises(Missing):
                    await a.fetch(metas[0].key)  # it was in the server's memory, and that is gone
                assert metas[0].key not in a.tier

        asyncio.run(run())


def test_a_server_that_is_not_there_at_the_start_is_used_when_it_comes(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path)

    async def run() -> None:
        async with machine(server.url) as a:
            await in_state(a, "gone")
            assert a.tier.unasked([chain_of("x", [1])[0].key]) == []
            a.offer(chain_of("early", [1000] * 3))
            server.start()
            await a.sent(3)

    try:
        asyncio.run(run())
    finally:
        server.kill()


def test_a_replica_is_read_and_written_again_when_it_is_promoted(tmp_path: Path) -> None:
    with running(tmp_path / "one", repl_diskless_sync_delay="0") as primary, running(tmp_path / "two") as server:

        async def run() -> None:
            async with machine(primary.url) as first:
                await first.well()
                there = chain_of("there", [1000] * 2)
                first.offer(there)
                await first.sent(2)
            with server.client() as client:
                client.replicaof("127.0.0.1", primary.port)
                wait_until(lambda: client.dbsize() == 4, "the replica to have all")
                async with machine(server.url, memory=BRIEF) as a:
                    await a.well()
                    a.offer(chain_of("new", [1000] * 2))
                    await in_state(a, "read-only")
                    assert "is a replica" in told(a)
                    keys = [meta.key for meta in there]
                    assert await a.find(keys) == keys
                    assert await a.fetch(keys[0]) == payload_of(keys[0], 1000)
                    client.replicaof("NO", "ONE")
                    await a.sent(2)
                    assert a.tier.stats()["state"] == "ok"

        asyncio.run(run())


def test_a_server_without_memory_says_so_and_is_written_again_when_it_has_some(tmp_path: Path) -> None:
    with running(tmp_path, maxmemory="4mb", maxmemory_policy="noeviction") as server:

        async def run() -> None:
            async with machine(server.url, memory=BRIEF) as a:
                await a.well()
                metas = chain_of("much", [600 * KIB] * 10)
                a.offer(metas)
                await in_state(a, "full")
                assert "out of memory" in told(a)
                assert "allkeys-lru" in told(a)
                written = a.tier.counts["written"]
                assert 0 < written < 10
                keys = [meta.key for meta in metas]
                async with machine(server.url) as b:
                    await b.well()
                    assert await b.find(keys) == keys[:written], "no header without its pieces"
                    assert await b.fetch(keys[0]) == payload_of(keys[0], 600 * KIB)
                with server.client() as client:
                    client.config_set("maxmemory", "100mb")
                await a.sent(10)
                assert not told(a)

        asyncio.run(run())


def test_a_server_that_evicts_makes_misses_and_no_wrong_bytes(tmp_path: Path) -> None:
    with running(tmp_path, maxmemory="6mb", maxmemory_policy="allkeys-random") as server:

        async def run() -> None:
            async with machine(server.url) as a, machine(server.url) as b:
                await a.well()
                await b.well()
                metas = chain_of("more than fits", [600 * KIB] * 20)
                a.offer(metas)
                await a.sent(20)
                found = await b.find(meta.key for meta in metas)
                assert len(found) < 20
                served = 0
                for key in found:
                    with contextlib.suppress(Missing):
                        assert await b.fetch(key) == payload_of(key, 600 * KIB)
                        served += 1
                assert served + b.tier.counts["strangers"] <= len(found)
                assert b.tier.stats()["state"] == "ok"

        asyncio.run(run())


def test_a_wrong_password_is_named_and_never_shown(tmp_path: Path) -> None:
    with running(tmp_path, requirepass="the right one") as server:

        async def run() -> None:
            host = f"127.0.0.1:{server.port}"
            async with machine(f"valkey://:the%20right%20one@{host}") as good:
                await good.well()
                assert good.tier.stats()["url"] == f"valkey://{host}"
            for url in (f"valkey://:s3cret-but-wrong@{host}", f"valkey://{host}"):
                async with machine(url) as bad:
                    await in_state(bad, "refused")
                    assert "check user and password" in told(bad)
                    assert "s3cret" not in str(bad.tier.stats()) + told(bad)

        asyncio.run(run())


def test_access_rules_of_the_documentation_suffice_and_fewer_are_named(tmp_path: Path) -> None:
    """As docs/remote.md has them."""
    text = (Path(__file__).parents[2] / "docs" / "remote.md").read_text()
    (rule,) = [line for line in text.splitlines() if line.startswith("ACL SETUSER omlxd ")]
    (cluster_rule,) = [line for line in text.splitlines() if line.startswith("ACL SETUSER omlxd-cluster ")]
    assert "+cluster|slots" in cluster_rule
    with running(tmp_path) as server, server.client() as client:
        client.execute_command(*rule.replace("A-LONG-PASSWORD", "secret").split())
        client.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "~omlxd:*", "+mget", "+client|setname")
        client.execute_command("ACL", "SETUSER", "nobody", "on", ">secret", "~other:*", "+@all")
        client.execute_command("ACL", "SETUSER", "default", "off")

        async def run() -> None:
            host = f"127.0.0.1:{server.port}"
            async with machine(f"valkey://omlxd:secret@{host}", ttl="1h") as a:
                await a.well()
                metas = chain_of("allowed", [1000] * 2)
                a.offer(metas)
                await a.sent(2)
                assert await a.find([metas[0].key]) == [metas[0].key]
                a.tier._wall = lambda: 4e9
                assert await a.fetch(metas[0].key) == payload_of(metas[0].key, 1000)
                a.tier.forget([metas[0].key])
                await until(lambda: a.tier.counts["removed"] == 1, "the removal")
                assert not told(a)
            async with machine(f"valkey://reader:secret@{host}") as reader:
                await reader.well()
                keys = [meta.key for meta in metas]
                assert await reader.find(keys) == keys[1:]
                reader.offer(chain_of("forbidden", [1000]))
                await in_state(reader, "refused")
                assert "read but not written" in told(reader)
                assert "access rules forbid" in told(reader)
                assert await reader.fetch(keys[1]) == payload_of(keys[1], 1000)
            async with machine(f"valkey://nobody:secret@{host}") as nobody:
                await in_state(nobody, "refused")
                assert "access rules forbid" in told(nobody)

        asyncio.run(run())


def certificates(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for ``name`` and loopback, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    alternatives: list[x509.GeneralName] = [x509.DNSName(name)]
    if name == "localhost":
        alternatives.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / f"{name}.crt", folder / f"{name}.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


def test_tls_with_the_right_certificate_and_with_wrong_ones(tmp_path: Path) -> None:
    good, good_key = certificates(tmp_path, "localhost")
    other, other_key = certificates(tmp_path, "elsewhere.example")
    tls = {"tls_auth_clients": "no", "tls_replication": "no"}
    with (
        running(
            tmp_path / "good", tls_port=(port := str(free_port())),
            tls_cert_file=str(good), tls_key_file=str(good_key), **tls,
        ),
        running(
            tmp_path / "wrong", tls_port=(wrong_port := str(free_port())),
            tls_cert_file=str(other), tls_key_file=str(other_key), **tls,
        ),
        running(tmp_path / "plain") as plain,
    ):  # fmt: skip

        async def run() -> None:
            async with machine(f"valkeys://127.0.0.1:{port}", ca_file=str(good)) as a:
                await a.well()
                metas = chain_of("enciphered", [3 << 20])
                a.offer(metas)
                await a.sent(1)
                assert await a.fetch(metas[0].key) == payload_of(metas[0].key, 3 << 20)
            for url, ca_file, message in [
                (f"valkeys://127.0.0.1:{port}", "", "ca_file"),
                (f"valkeys://127.0.0.1:{port}", str(other), "ca_file"),
                (f"valkeys://127.0.0.1:{wrong_port}", str(other), "the name that it is issued for"),
                (f"valkeys://127.0.0.1:{plain.port}", str(good), "no TLS connection|does not answer in time"),
            ]:
                async with machine(url, ca_file=ca_file) as bad:
                    await until(lambda bad=bad: bool(bad.tier.troubles()), "a message")  # type: ignore[misc]
                    assert any(part in told(bad) for part in message.split("|")), told(bad)

        asyncio.run(run())


class Link:
    """Bytes to a server and back, until the link is cut."""

    def __init__(self, port: int) -> None:
        self.server_port = port
        self.port = free_port()
        self.cut_after: int | None = None
        """Bytes from the server that still pass; None: all."""
        self.delay = 0.0
        """Seconds that all bytes from the server take longer."""
        self._writers: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        listening = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        try:
            yield
        finally:
            listening.close()
            for writer in self._writers:
                writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.server_port)
        self._writers |= {writer, far_writer}
        await asyncio.gather(
            self._pass(reader, far_writer, back=False),
            self._pass(far_reader, writer, back=True),
            return_exceptions=True,
        )

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool) -> None:
        while data := await reader.read(64 * KIB):
            if back and self.delay:
                await asyncio.sleep(self.delay)
            if back and self.cut_after is not None:
                data = data[: self.cut_after]
                self.cut_after -= len(data)
            writer.write(data)
            await writer.drain()
            if self.cut_after == 0:
                for one in self._writers:
                    one.transport.abort()
                self._writers.clear()
        writer.close()


def test_a_link_that_is_cut_in_the_middle_of_a_value_is_a_miss_and_then_used_again(tmp_path: Path) -> None:
    with running(tmp_path) as server:

        async def run() -> None:
            link = Link(server.port)
            async with link.up(), machine(f"valkey://127.0.0.1:{link.port}", memory=BRIEF) as a:
                await a.well()
                metas = chain_of("cut", [2 << 20] * 2)
                a.offer(metas)
                await a.sent(2)
                for passing in (1, 100, 700 * KIB, (2 << 20) - 5):
                    await a.well()
                    link.cut_after = passing
                    with pytest.raises(Trouble):
                        await a.fetch(metas[0].key)
                    link.cut_after = None
                await a.well()
                assert await a.fetch(metas[0].key) == payload_of(metas[0].key, 2 << 20)
                assert a.tier.counts["strangers"] == 0

        asyncio.run(run())


def test_writes_into_a_link_that_is_cut_leave_no_header_without_pieces(tmp_path: Path) -> None:
    with running(tmp_path) as server:

        async def run() -> None:
            link = Link(server.port)
            async with link.up(), machine(f"valkey://127.0.0.1:{link.port}", memory=BRIEF) as a:
                await a.well()
                metas = chain_of("cut", [2 << 20] * 6)
                a.offer(metas)
                for _ in range(3):
                    link.cut_after = 3
                    await until(lambda: link.cut_after == 0, "the cut")
                    link.cut_after = None
                await a.sent(6)
                async with machine(server.url) as b:
                    await b.well()
                    keys = [meta.key for meta in metas]
                    assert await b.find(keys) == keys
                    for key in keys:
                        assert await b.fetch(key) == payload_of(key, 2 << 20)

        asyncio.run(run())


def test_a_killed_primary_of_a_cluster_costs_its_blocks_and_no_others(tmp_path: Path) -> None:
    with cluster(tmp_path) as servers:

        async def run() -> None:
            async with machine(f"valkey+cluster://127.0.0.1:{servers[0].port}", memory=BRIEF) as a:
                await until(lambda: len(a.tier.stats()["nodes"]) == 3, "the map")  # type: ignore[arg-type]
                await a.well()
                metas = chain_of("spread", [3000] * 60)
                a.offer(metas)
                await a.sent(60)
                servers[0].kill()
                keys = [meta.key for meta in metas]
                lost = next(
                    key
                    for key in keys
                    if (node := a.tier._node_of(key)) and node.server.address.port == servers[0].port
                )
                with pytest.raises(Trouble):
                    await a.fetch(lost)
                assert a.tier.stats()["state"] == "gone"
                found = await a.find(keys)
                assert 20 < len(found) < 60
                for key in found:
                    assert await a.fetch(key) == payload_of(key, 3000)

        asyncio.run(run())


def test_a_replica_that_takes_over_is_used_instead_of_its_primary(tmp_path: Path) -> None:
    with cluster(tmp_path) as servers, replica_of(servers[0], tmp_path / "replica") as replica:

        async def run() -> None:
            async with machine(f"valkey+cluster://127.0.0.1:{servers[1].port}", memory=BRIEF) as a:
                await until(lambda: len(a.tier.stats()["nodes"]) == 3, "the map")  # type: ignore[arg-type]
                await a.well()
                metas = chain_of("survives", [3000] * 60)
                a.offer(metas)
                await a.sent(60)
                with servers[0].client() as one, replica.client() as two:
                    await until(lambda: one.dbsize() == two.dbsize() > 0, "the replica to have all")
                for server in servers[1:]:
                    with server.client() as voter:
                        rows = lambda voter=voter: voter.execute_command("CLUSTER SLOTS")  # noqa: E731
                        await until(lambda rows=rows: any(len(row) == 4 for row in rows()), "its voters to know it")  # type: ignore[misc]
                servers[0].kill()
                keys = [meta.key for meta in metas]
                served: set[bytes] = set()
                deadline = time.monotonic() + PATIENCE
                while len(served) < 60:
                    assert time.monotonic() < deadline, f"{len(served)} of 60: {a.tier.stats()}"
                    for key in await a.find([key for key in keys if key not in served]):
                        if key not in a.tier:
                            break  # its node has just been found to be gone
                        with contextlib.suppress(Trouble):
                            assert await a.fetch(key) == payload_of(key, 3000)
                            served.add(key)
                    await asyncio.sleep(0.05)
                assert f"127.0.0.1:{replica.port}" in str(a.tier.stats()["nodes"])

        asyncio.run(run())


def test_slots_that_move_are_followed(tmp_path: Path) -> None:
    with cluster(tmp_path, nodes=2) as servers:

        async def run() -> None:
            async with machine(f"valkey+cluster://127.0.0.1:{servers[0].port}", memory=BRIEF) as a:
                await until(lambda: len(a.tier.stats()["nodes"]) == 2, "the map")  # type: ignore[arg-type]
                await a.well()
                with servers[0].client() as one, servers[1].client() as two:
                    ids = [client.execute_command("CLUSTER MYID") for client in (one, two)]
                    for slot in sorted(slot for slot in slots_of_tags() if slot < 8192):  # none of them has a key
                        two.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
                        one.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
                        two.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])
                        one.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])
                metas = chain_of("moved", [3000] * 40)
                a.offer(metas)
                await a.sent(40)
                keys = [meta.key for meta in metas]
                assert await a.find(keys) == keys
                for key in keys:
                    assert await a.fetch(key) == payload_of(key, 3000)
            with servers[1].client() as client:
                assert client.dbsize() == 80

        asyncio.run(run())


def test_a_server_that_always_answers_late_is_left_alone_until_it_is_faster(tmp_path: Path) -> None:
    with running(tmp_path) as server:

        async def run() -> None:
            link = Link(server.port)
            async with link.up(), machine(f"valkey://127.0.0.1:{link.port}", memory=BRIEF, deadline="100ms") as a:
                await a.well()
                keys = [meta.key for meta in chain_of("new", [1] * 5)]
                link.delay = 0.3
                for _ in range(FAILURES):
                    await a.tier.ask(keys, 5.0)
                await in_state(a, "slow")
                waited = a.tier.counts["asks"]
                opened = a.tier.stats()["nodes"]
                await until(lambda: a.tier.counts["trouble_slow"] >= FAILURES + 2, "two probes")
                assert a.tier.unasked(keys) == [], "a probe that answers late does not bring it back"
                assert (a.tier.counts["asks"], a.tier.stats()["nodes"]) == (waited, opened)
                link.delay = 0.0
                await a.well()
                assert a.tier.unasked(keys) == keys

        asyncio.run(run())


def test_many_lookups_at_once_do_not_pile_up_behind_a_server_that_hangs(tmp_path: Path) -> None:
    with running(tmp_path) as server:

        async def run() -> None:
            async with machine(server.url, memory=BRIEF, deadline="100ms") as a:
                await a.well()
                server.pause()
                chains = [[meta.key for meta in chain_of(at, [1] * 20)] for at in range(200)]
                await asyncio.gather(*(a.tier.ask(chain, 5.0) for chain in chains))
                assert a.tier.counts["asks"] <= ASKS_PER_NODE, "so many workers wait, all others go on"
                assert a.tier.counts["not_asked_busy"] >= (200 - ASKS_PER_NODE) * 20

        try:
            asyncio.run(run())
        finally:
            server.go_on()
