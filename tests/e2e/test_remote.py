"""Two daemons with stores of their own, and a real server between them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import omlxd
from omlxd.operations import pack_keys
from omlxd.schema import RemoteStats, Stats
from scripts.daemon_process import DaemonProcess
from tests.e2e.blocks import chain, payload
from tests.e2e.conftest import StartDaemon
from tests.storage.valkey_server import ValkeyServer, cluster, running, wait_until

BLOCK = 300_000
SIZES = {"ram_size": "64MiB", "ssd_size": "256MiB"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with running(tmp_path / "valkey") as found:
        yield found


def space_of(cache: omlxd.Cache) -> omlxd.Space:
    return cache.namespace(model="org/raw", fingerprint="f", block_tokens=64)


def stats_of(cache: omlxd.Cache) -> Stats:
    return cache.stats()  # type: ignore[return-value]


def remote_of(cache: omlxd.Cache) -> RemoteStats:
    remote = stats_of(cache).get("remote")
    assert remote is not None
    return remote


def wait_for_state(cache: omlxd.Cache, state: str) -> None:
    wait_until(lambda: remote_of(cache)["state"] == state, f"state {state}: {remote_of(cache)}")


def command(daemon: DaemonProcess, *words: str) -> str:
    """What ``omlxd`` says to somebody at a terminal; exit codes other than 0 and 1 (warnings) are failures."""
    done = subprocess.run(
        [sys.executable, "-m", "omlxd", *words],
        env=daemon.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout + done.stderr


def store_and_send(cache: omlxd.Cache, hashes: Sequence[bytes], nbytes: int = BLOCK) -> None:
    """Store blocks, and wait until the server has them."""
    wait_for_state(cache, "ok")
    before = remote_of(cache)["counts"].get("written", 0)
    stored = space_of(cache).store_keys(hashes, [payload(h, nbytes) for h in hashes]).stored
    assert stored == len(hashes)
    wait_until(lambda: remote_of(cache)["counts"].get("written", 0) == before + stored, f"{remote_of(cache)}")


def load_exactly(cache: omlxd.Cache, hashes: Sequence[bytes], nbytes: int = BLOCK, **options: float) -> str | None:
    """Load as far as can be had, all of it right; returns why it ended."""
    with space_of(cache).load_keys(hashes, **options) as lease:
        for block in lease:
            assert bytes(block.view) == payload(block.key, nbytes)
        assert [block.key for block in lease] == list(hashes[: len(lease)])
        if lease.stopped is None:
            assert len(lease) == len(hashes)
        return lease.stopped


@pytest.mark.parametrize("sealed", [False, True])
def test_what_one_daemon_stored_is_a_hit_for_another(
    start_daemon: StartDaemon, server: ValkeyServer, tmp_path: Path, sealed: bool
) -> None:
    settings = {"remote_url": server.url, **SIZES}
    if sealed:
        key_file = tmp_path / "key"
        key_file.write_text(os.urandom(32).hex())
        key_file.chmod(0o600)
        settings["remote_key_file"] = str(key_file)
    a, b = start_daemon("a", **settings), start_daemon("b", **settings)
    hashes = chain(1, 30)
    with omlxd.connect(a.socket) as cache:
        store_and_send(cache, hashes)
    a.stop()
    with omlxd.connect(b.socket) as cache:
        wait_for_state(cache, "ok")
        hit = space_of(cache).match_keys([*hashes, *chain(2, 3)])
        assert (hit.blocks, hit.ram, hit.ssd, hit.remote) == (30, 0, 0, 30)
        fates = cache.call("fates", keys=pack_keys([*hashes, *chain(2, 1)]))["fates"]
        assert [state for state, _, _ in fates] == [*["remote"] * 30, "never"], "what omlxd explain says"
        assert load_exactly(cache, hashes) is None
        hit = space_of(cache).match_keys(hashes)
        assert (hit.ram, hit.remote) == (30, 0)
        counts = stats_of(cache)["counts"]
        assert counts["hits_remote"] == 30
        assert remote_of(cache)["fetched_bytes"] == 30 * BLOCK
        assert remote_of(cache)["sealed"] is sealed
    server.kill()
    b.stop()
    b.start()
    with omlxd.connect(b.socket) as cache:
        assert space_of(cache).match_keys(hashes).ssd == 30, "what was fetched is kept"
        assert load_exactly(cache, hashes) is None


def test_a_load_asks_by_itself_and_takes_head_middle_and_tail_from_wherever_they_are(
    start_daemon: StartDaemon, server: ValkeyServer
) -> None:
    a = start_daemon("a", remote_url=server.url, **SIZES)
    b = start_daemon("b", remote_url=server.url, **SIZES)
    hashes = chain(1, 40)
    with omlxd.connect(a.socket) as cache:
        store_and_send(cache, hashes)
    with omlxd.connect(b.socket) as cache:
        wait_for_state(cache, "ok")
        space_of(cache).store_keys(hashes[:10], [payload(h, BLOCK) for h in hashes[:10]])
        assert load_exactly(cache, [*hashes, *chain(3, 2)], timeout=20) == "miss"
        assert stats_of(cache)["counts"]["hits_remote"] == 30
        assert load_exactly(cache, hashes) is None


def test_what_is_not_to_be_kept_stays_in_ram_only(start_daemon: StartDaemon, server: ValkeyServer) -> None:
    a = start_daemon("a", remote_url=server.url, **SIZES)
    b = start_daemon("b", remote_url=server.url, remote_keep="false", ssd_mode="write_through", **SIZES)
    hashes = chain(1, 10)
    with omlxd.connect(a.socket) as cache:
        store_and_send(cache, hashes)
    with omlxd.connect(b.socket) as cache:
        wait_for_state(cache, "ok")
        for _ in range(3):
            assert load_exactly(cache, hashes) is None
        assert space_of(cache).match_keys(hashes).ram == 10
        ssd = stats_of(cache)["ssd"]
        assert ssd is not None
        assert (ssd["blocks"], ssd["dirty_blocks"]) == (0, 0)


def test_a_tier_of_somebody_else_serves_in_its_place(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """Named by module and class; here one that keeps blocks in files."""
    shared = tmp_path / "shared"
    shared.mkdir()
    settings = {
        "remote_url": "valkey://unused",
        "remote_ca_file": str(shared),
        "remote_tier": "tests.e2e.file_tier:FileTier",
    }
    a, b = start_daemon("a", **settings, **SIZES), start_daemon("b", **settings, **SIZES)
    hashes = chain(1, 10)
    with omlxd.connect(a.socket) as cache:
        assert space_of(cache).store_keys(hashes, [payload(h, BLOCK) for h in hashes]).stored == 10
    with omlxd.connect(b.socket) as cache:
        assert space_of(cache).match_keys(hashes).remote == 10
        assert load_exactly(cache, hashes) is None
        assert remote_of(cache)["url"] == str(shared)


def test_small_ram_streams_a_chain_from_the_server(start_daemon: StartDaemon, server: ValkeyServer) -> None:
    a = start_daemon("a", remote_url=server.url, ram_size="64MiB", ssd_size="256MiB")
    b = start_daemon("b", remote_url=server.url, ram_size="16MiB", ssd_size="0")
    hashes = chain(1, 30)
    with omlxd.connect(a.socket) as cache:
        store_and_send(cache, hashes, 2_000_000)
    with omlxd.connect(b.socket) as cache:
        wait_for_state(cache, "ok")
        for start in range(0, 30, 5):
            assert load_exactly(cache, hashes[start : start + 5], 2_000_000, timeout=20) is None


def test_a_prefetch_brings_blocks_from_the_server(start_daemon: StartDaemon, server: ValkeyServer) -> None:
    a = start_daemon("a", remote_url=server.url, **SIZES)
    b = start_daemon("b", remote_url=server.url, **SIZES)
    hashes = chain(1, 10)
    with omlxd.connect(a.socket) as cache:
        store_and_send(cache, hashes)
    with omlxd.connect(b.socket) as cache:
        wait_for_state(cache, "ok")
        assert space_of(cache).match_keys(hashes, prefetch=True).remote == 10
        wait_until(lambda: space_of(cache).match_keys(hashes).ram == 10, "the prefetch")


def test_a_server_that_hangs_or_goes_does_not_hold_up_anybody(start_daemon: StartDaemon, server: ValkeyServer) -> None:
    b = start_daemon("b", remote_url=server.url, **SIZES)
    with omlxd.connect(b.socket) as cache:
        mine = chain(1, 10)
        store_and_send(cache, mine)
        server.pause()
        try:
            for seed in range(10, 40):
                assert space_of(cache).match_keys(chain(seed, 20)).blocks == 0
                assert load_exactly(cache, mine) is None
            assert load_exactly(cache, chain(50, 5), timeout=20) == "miss"
            assert remote_of(cache)["state"] == "slow"
            assert any("not used for now" in warning for warning in stats_of(cache)["warnings"])
        finally:
            server.go_on()
        wait_for_state(cache, "ok")
        server.kill()
        wait_for_state(cache, "gone")
        assert load_exactly(cache, mine) is None
        assert space_of(cache).store_keys(chain(60, 3), [payload(h, BLOCK) for h in chain(60, 3)]).stored == 3
        server.start()
        wait_until(lambda: remote_of(cache)["counts"]["written"] == 13, f"{remote_of(cache)}")
        assert stats_of(cache)["warnings"] == []


def test_restores_that_are_slower_than_computing_are_left(start_daemon: StartDaemon, server: ValkeyServer) -> None:
    a = start_daemon("a", remote_url=server.url, **SIZES)
    b = start_daemon("b", remote_url=server.url, **SIZES)
    hashes = chain(1, 20)
    with omlxd.connect(a.socket) as cache:
        store_and_send(cache, hashes)
    with omlxd.connect(b.socket) as cache:
        wait_for_state(cache, "ok")
        assert load_exactly(cache, hashes[:10]) is None, "nothing is measured yet"
        with space_of(cache).load_keys(hashes, prefill_tokens_per_s=1e12) as lease:
            assert len(list(lease)) == 10
            assert lease.stopped == "restore_slower_than_prefill"


def test_the_messages_that_a_user_sees(start_daemon: StartDaemon, tmp_path: Path) -> None:
    def status(daemon: DaemonProcess) -> str:
        return " ".join(command(daemon, "status").split())

    with running(tmp_path / "valkey", requirepass="right") as server:
        host = f"127.0.0.1:{server.port}"
        right = start_daemon("right", remote_url=f"valkey://:right@{host}", **SIZES)
        wrong = start_daemon("wrong", remote_url=f"valkey://:wr0ng-secret@{host}", **SIZES)
        open_key = tmp_path / "key"
        open_key.write_text("x" * 64)
        open_key.chmod(0o644)
        unsafe = start_daemon("unsafe", remote_url=f"valkey://:right@{host}", remote_key_file=str(open_key), **SIZES)
        with omlxd.connect(right.socket) as cache:
            wait_for_state(cache, "ok")
        assert f"remote: ok, valkey://{host}" in status(right)
        with omlxd.connect(wrong.socket) as cache:
            wait_for_state(cache, "refused")
        said = status(wrong)
        assert "check user and password in [remote] url" in said
        assert "wr0ng-secret" not in said + wrong.log.read_text()
        said = status(unsafe)
        assert f"there is no remote tier: remote.key_file: the key file {open_key} can be read by others" in said
        assert f"chmod 600 {open_key}" in said
        assert "remote: " not in said.replace("tier: remote", "")


def test_an_operator_removes_a_block_everywhere(start_daemon: StartDaemon, server: ValkeyServer) -> None:
    a = start_daemon("a", remote_url=server.url, **SIZES)
    hashes = chain(1, 3)
    with omlxd.connect(a.socket) as cache:
        store_and_send(cache, hashes)
        key = hashes[1].hex()
    with server.client() as client:
        assert client.dbsize() == 6
        command(a, "rm", "--yes", key + "00000000")
        wait_until(lambda: client.dbsize() == 4, "the removal on the server")


def test_a_cluster_between_two_daemons_and_one_node_less(start_daemon: StartDaemon, tmp_path: Path) -> None:
    with cluster(tmp_path / "cluster") as servers:
        url = f"valkey+cluster://127.0.0.1:{servers[1].port}"
        a, b = start_daemon("a", remote_url=url, **SIZES), start_daemon("b", remote_url=url, **SIZES)
        hashes = chain(1, 60)
        with omlxd.connect(a.socket) as cache:
            wait_until(lambda: len(remote_of(cache)["nodes"]) == 3, "the map")
            store_and_send(cache, hashes, 50_000)
        with omlxd.connect(b.socket) as cache:
            wait_until(lambda: len(remote_of(cache)["nodes"]) == 3, "the map")
            wait_for_state(cache, "ok")
            assert space_of(cache).match_keys(hashes).remote == 60
            assert load_exactly(cache, hashes[:20], 50_000) is None
            servers[0].kill()
            started = time.monotonic()
            while remote_of(cache)["state"] == "ok":
                load_exactly(cache, hashes, 50_000, timeout=20)
                space_of(cache).match_keys(chain(int(time.monotonic() - started) + 100, 50))
            load_exactly(cache, hashes, 50_000, timeout=20)
