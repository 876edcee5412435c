"""`omlxd record` against a real daemon: what is in the file, and that a replay of it does what the daemon did."""

from __future__ import annotations

import asyncio
import json
import random
import re
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from omlxd.cli.context import Exit
from omlxd.cli.recording import Full, RecordingFile
from omlxd.client import Cache
from omlxd.followers import MAX_FOLLOWERS, MAX_PENDING, MAX_PENDING_BYTES, Followers
from omlxd.keeping_verbs import MAX_RECORDERS
from omlxd.lab.recording import Scribe
from omlxd.lab.traces import Trace, parse_trace, read_trace
from tests.omlxd.configured import ConfiguredDaemon, stats_of, wait_for

MIB = 1 << 20
FIRST_TOKEN = 700_001


class Recorder:
    """`omlxd record` as a process."""

    def __init__(self, daemon: ConfiguredDaemon, file: Path, *options: str) -> None:
        self.file = file
        command = [sys.executable, "-m", "omlxd", "record", str(file), "--json", *options]
        self.process = subprocess.Popen(
            command, env=daemon.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        wait_for(lambda: file.exists() or self.process.poll() is not None)

    def end(self, *, with_signal: int | None = signal.SIGINT) -> tuple[int, Any, str]:
        """Exit code, the JSON document, standard error."""
        if with_signal is not None:
            self.process.send_signal(with_signal)
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, json.loads(out) if out else None, err


@contextmanager
def recording(daemon: ConfiguredDaemon, file: Path, *options: str) -> Iterator[Recorder]:
    made = Recorder(daemon, file, *options)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
            made.process.communicate(timeout=30)


def started(tmp_path: Path, **settings: str) -> ConfiguredDaemon:
    daemon = ConfiguredDaemon(tmp_path / "daemon")
    for key, value in settings.items():
        daemon.set(key.replace("__", "."), value)
    daemon.start()
    return daemon


@contextmanager
def running(tmp_path: Path, **settings: str) -> Iterator[ConfiguredDaemon]:
    daemon = started(tmp_path, **settings)
    try:
        yield daemon
    finally:
        daemon.kill()
        daemon.close()


def work(cache: Cache, rounds: int, *, seed: int, looks_first: bool = False) -> None:
    """Chains of users that come back, of 1 MiB blocks; every third one only says that it has its own copy."""
    rng = random.Random(seed)
    space = cache.namespace(model="org/secret-model", fingerprint="f", block_tokens=16)
    for at in range(rounds):
        user, blocks = rng.randrange(12), rng.randrange(1, 15)
        tokens = [FIRST_TOKEN + 1000 * user + index for index in range(16 * blocks)]
        if at % 3 == 2:
            space.touch(tokens)
            continue
        if looks_first and not space.match(tokens).blocks:
            had = 0
        else:
            with space.load(tokens) as lease:
                had = len(lease.wait().blocks)
        if had < blocks:
            space.store(tokens, [bytes([user]) * MIB] * (blocks - had), start=16 * had)


def counts(cache: Cache) -> tuple[int, int]:
    """Hits and misses that the daemon has counted."""
    found = stats_of(cache)["counts"]
    hits = sum(found.get(f"hits_{tier}", 0) for tier in ("ram", "ssd", "remote"))
    return int(hits), int(found.get("misses", 0))


def replayed(daemon: ConfiguredDaemon, file: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "omlxd", "replay", str(file), "--json", *options]
    done = subprocess.run(command, env=daemon.environment, capture_output=True, text=True, timeout=60, check=True)
    return cast("dict[str, Any]", json.loads(done.stdout))


@pytest.mark.parametrize(("policy", "looks_first"), [("lru", False), ("arc", True), ("prefix", False)])
def test_replay_of_a_recording_makes_the_hits_that_the_daemon_counted(
    tmp_path: Path, policy: str, looks_first: bool
) -> None:
    file = tmp_path / "work.jsonl"
    with running(tmp_path, ram__policy=f'"{policy}"', ssd__size='"0"') as daemon, daemon.connect() as cache:
        with recording(daemon, file) as recorder:
            work(cache, 150, seed=3, looks_first=looks_first)
            hits, misses = counts(cache)
            wait_for(lambda: asked_so_far(file) >= hits + misses > 0)
            code, told, _ = recorder.end()
        assert code == Exit.INTERRUPTED
        assert told["lost"] == 0
        document = replayed(daemon, file, "--policy", policy, "--size", "64MiB")
        (result,) = document["results"]
        assert result["size_blocks"] == 64
        assert result["reused_tokens"] == 16 * hits
        assert document["tokens"] == 16 * (hits + misses)
        assert document["requests"] == told["requests"]
        assert result["evicted_blocks"] > 0, "or every size would do"
        (other,) = replayed(daemon, file, "--policy", policy, "--size", "32MiB")["results"]
        assert other["reused_tokens"] < result["reused_tokens"]


def requests_so_far(file: Path) -> list[Any]:
    return [item for line in file.read_text().splitlines() if isinstance(item := json.loads(line), list)]


def asked_so_far(file: Path) -> int:
    return sum(int(item[2]) for item in requests_so_far(file)) // 16


def test_with_an_ssd_that_keeps_all_a_replay_makes_all_the_hits_too(tmp_path: Path) -> None:
    file = tmp_path / "work.jsonl"
    with running(tmp_path) as daemon, daemon.connect() as cache:
        with recording(daemon, file) as recorder:
            work(cache, 60, seed=4)
            hits, misses = counts(cache)
            wait_for(lambda: asked_so_far(file) >= hits + misses)
            recorder.end()
        (result,) = replayed(daemon, file, "--policy", "lru", "--size", "64MiB", "--ssd", "256MiB")["results"]
        assert result["reused_tokens"] == 16 * hits
        assert result["ssd_evicted_blocks"] == 0
        header = read_trace(file).header
        assert (header["ram_bytes"], header["ssd_mode"]) == (64 * MIB, "write_back")


def test_file_is_its_owners_and_has_no_names_hashes_or_tokens(daemon: ConfiguredDaemon, tmp_path: Path) -> None:
    file = tmp_path / "work.jsonl"
    with daemon.connect() as cache:
        with recording(daemon, file) as recorder:
            space = cache.namespace(model="org/secret-model", fingerprint="f", block_tokens=16, salt="secret salt")
            tokens = list(range(FIRST_TOKEN, FIRST_TOKEN + 64))
            space.store(tokens, [bytes(5000)] * 4)
            with space.load(tokens, prefill_tokens_per_s=321.5) as lease:
                lease.wait()
            space.put(space.hashes(tokens)[0], bytes(5000), parent=None, position=0)
            wait_for(lambda: len(requests_so_far(file)) == 3)
            recorder.end()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        text = file.read_text()
        header, *lines = map(json.loads, text.splitlines())
        assert set(header) == {
            "kvtrace", "kind", "block_tokens", "name", "omlxd", "began",
            "ram_bytes", "ram_policy", "ssd_bytes", "ssd_policy", "ssd_mode",
        }  # fmt: skip
        assert "secret" not in text
        assert str(FIRST_TOKEN) not in text
        for chain_hash in space.hashes(tokens):
            assert chain_hash.hex()[:8] not in text
        assert not re.search(r'"[0-9a-f]{8,}"', json.dumps(lines))
        assert [line[4] for line in lines if isinstance(line, list)] == [[0, 4], [0, 4], [0, 1]]
        trace = read_trace(file)
        assert (trace.block_bytes, trace.space(0).prefill_tokens_per_s) == (5000, 321.5)


def test_recorder_that_is_killed_leaves_a_trace_and_the_daemon_serving(
    daemon: ConfiguredDaemon, tmp_path: Path
) -> None:
    file = tmp_path / "work.jsonl"
    with daemon.connect() as cache:
        with recording(daemon, file) as recorder:
            work(cache, 10, seed=1)
            wait_for(lambda: len(requests_so_far(file)) >= 5)
            code, _, _ = recorder.end(with_signal=signal.SIGKILL)
            assert code == -signal.SIGKILL
        work(cache, 10, seed=2)
        assert stats_of(cache)["health"] == "ok"
        wait_for(lambda: not [c for c in stats_of(cache)["clients"] if c["name"] == "omlxd record"])
        whole = read_trace(file)
        assert whole.end is None
        with file.open("a") as out:
            out.write("[99999,0,16")
        assert read_trace(file).requests == whole.requests
        assert replayed(daemon, file, "--policy", "lru", "--size", "50%")["requests"] > 0


def test_recording_ends_with_its_time_and_with_its_size(daemon: ConfiguredDaemon, tmp_path: Path) -> None:
    with daemon.connect() as cache:
        with recording(daemon, tmp_path / "nothing", "--seconds", "0.2") as idle:
            code, told, _ = idle.end(with_signal=None)
        assert (code, told["requests"]) == (Exit.NOT_FOUND, 0)
        assert not (tmp_path / "nothing").exists(), "an empty recording is no trace"
        with recording(daemon, tmp_path / "full", "--max-size", "64KiB") as full:
            space = cache.namespace(model="org/model", fingerprint="f", block_tokens=16)
            hashes = [bytes([at % 251]) * 32 for at in range(2000)]
            while full.process.poll() is None:
                space.match_keys(random.sample(hashes, 200))
            code, told, _ = full.end(with_signal=None)
        assert code == Exit.OK
        assert "as large as it may be" in told["ended"]
        assert (tmp_path / "full").stat().st_size <= 65_536
        assert read_trace(tmp_path / "full").end is not None


def test_daemon_that_goes_ends_the_recording_and_what_is_there_is_kept(
    daemon: ConfiguredDaemon, tmp_path: Path
) -> None:
    file = tmp_path / "work.jsonl"
    with recording(daemon, file) as recorder:
        with daemon.connect() as cache:
            work(cache, 6, seed=1)
        wait_for(lambda: len(requests_so_far(file)) >= 5)
        daemon.kill()
        code, told, _ = recorder.end(with_signal=None)
    assert code == Exit.NO_DAEMON
    assert "the daemon has gone" in told["ended"]
    assert read_trace(file).end is not None


def test_what_cannot_be_recorded_is_refused(daemon: ConfiguredDaemon, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("precious")
    for options, code, said in (
        ([str(there)], Exit.FAILED, "--force replaces it"),
        (["/dev/null", "--force"], Exit.FAILED, "no regular file"),
        ([str(tmp_path / "no" / "folder")], Exit.FAILED, "No such file or directory"),
        ([str(tmp_path / "x"), "--namespace", "nobody"], Exit.NOT_FOUND, "nobody"),
        ([str(tmp_path / "x"), "--seconds", "soon"], Exit.USAGE, "soon"),
        ([str(tmp_path / "x"), "--max-size", "10"], Exit.USAGE, "64.0 KiB is the least"),
    ):
        command = [sys.executable, "-m", "omlxd", "record", *options]
        done = subprocess.run(command, env=daemon.environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
        assert said in done.stderr
    assert there.read_text() == "precious"
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("verb", "most"), [("record", MAX_RECORDERS), ("subscribe", MAX_FOLLOWERS)])
def test_who_has_gone_follows_no_more_although_nothing_happens(daemon: ConfiguredDaemon, verb: str, most: int) -> None:
    for _ in range(most + 1):
        with Cache(str(daemon.socket)) as cache:
            assert next(cache.stream(verb, timeout=30))["events"] == []


# -- the parts


def test_disk_that_is_full_leaves_whole_lines(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: a write takes what fits, the next one fails."""
    out = RecordingFile(tmp_path / "r", 1 << 20, replace=False)
    out.write(["[1]\n"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handled = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        with pytest.raises(OSError, match="File too large"):
            out.write(["[2]\n", "[3333]\n"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handled)
    out.close()
    assert (tmp_path / "r").read_text() == "[1]\n"


def test_file_takes_whole_lines_up_to_its_size_and_keeps_room_for_the_end(tmp_path: Path) -> None:
    out = RecordingFile(tmp_path / "r", 5000, replace=False)
    line = "[" + "1" * 298 + "]\n"
    with pytest.raises(Full):
        out.write([line] * 10)
    out.write(["end\n"], last=True)
    out.close()
    assert (tmp_path / "r").read_text() == 3 * line + "end\n"
    with pytest.raises(FileExistsError):
        RecordingFile(tmp_path / "r", 5000, replace=False)
    RecordingFile(tmp_path / "r", 5000, replace=True).close()
    assert not (tmp_path / "r").exists()


def key(number: int) -> bytes:
    return number.to_bytes(36, "big")


def event(
    kind: str, chain: range, *, at: float = 0.0, session: int = 7, space: int = 1, **more: object
) -> dict[str, Any]:
    return {
        "event": kind, "at": 100.0 + at, "session": session, "namespace": bytes([space]) * 32, "block_tokens": 16,
        "keys": b"".join(map(key, chain)), **more,
    }  # fmt: skip


def written(*events: dict[str, Any]) -> Trace:
    scribe = Scribe({"name": "t"})
    return parse_trace([*scribe.lines(events), *scribe.end("over")], "t")


def test_lookup_is_part_of_the_load_that_follows_it() -> None:
    trace = written(event("lookup", range(10, 20), found=6), event("load", range(10, 16), blocks=6, block_bytes=9))
    (request,) = trace.requests
    assert (request.input_tokens, request.blocks, request.end) == (160, list(range(10)), 6)


def test_lookup_that_no_load_follows_asks_and_keeps_nothing() -> None:
    alone = event("lookup", range(5), found=0)
    for following in (
        event("store", range(5), first=0, block_bytes=9),
        event("load", range(50, 55), blocks=5),
        event("lookup", range(60, 61), at=1.0, found=1),
        event("touch", range(70, 71), session=8, at=9.0),
    ):
        first, *_ = written(alone, following).requests
        assert (first.input_tokens, first.end) == (80, 0), following["event"]


def test_lookup_that_found_all_and_was_not_followed_is_nothing() -> None:
    trace = written(event("lookup", range(5), found=5), event("store", range(3), first=1, block_bytes=9))
    assert [(request.input_tokens, request.first, request.end) for request in trace.requests] == [(0, 1, 3)]


def test_namespaces_and_connections_are_numbered_and_keys_are_told_apart() -> None:
    trace = written(
        event("store", range(4), first=0, block_bytes=100, session=901),
        event("store", range(100, 102), first=0, block_bytes=700, session=905, space=2, at=0.5),
        event("load", range(4), blocks=4, block_bytes=100, session=905, at=0.75),
    )
    assert [(request.session, request.space, request.blocks) for request in trace.requests] == [
        (0, 0, [0, 1, 2, 3]),
        (1, 1, [4, 5]),
        (1, 0, [0, 1, 2, 3]),
    ]
    assert [request.t_ms for request in trace.requests] == [0, 500, 750]
    assert trace.block_bytes == (4 * 100 + 2 * 700) // 6


def test_mean_size_of_a_block_is_told_at_the_end() -> None:
    trace = written(
        event("store", range(1), first=0, block_bytes=100), event("store", range(4), first=1, block_bytes=500)
    )
    assert trace.space(0).block_bytes == 400


class SlowSession:
    """A client that does not read."""

    closed = False

    def __init__(self) -> None:
        self.queued = 0
        self.parts: list[dict[str, Any]] = []

    def more(self, request_id: int, part: dict[str, Any]) -> None:
        self.parts.append(part)


def test_slow_reader_loses_events_and_is_told_how_many() -> None:
    async def follow() -> SlowSession:
        session = SlowSession()
        followers = Followers()
        followers.add(cast("Any", session), 1, None, greeting={})
        for _ in range(MAX_PENDING + 5):
            followers.publish({"event": "x"}, b"n")
        followers.publish({"event": "large"}, b"n", MAX_PENDING_BYTES + 1)
        while len(session.parts) < 2:
            await asyncio.sleep(0.01)
        session.queued = 1 << 30
        followers.publish({"event": "unread"}, b"n")
        await asyncio.sleep(0.1)
        session.queued = 0
        followers.publish({"event": "y"}, b"n")
        while len(session.parts) < 3:
            await asyncio.sleep(0.01)
        return session

    session = asyncio.run(asyncio.wait_for(follow(), 20))
    assert len(session.parts[1]["events"]) == MAX_PENDING
    assert session.parts[1]["lost"] == 6
    assert session.parts[2] == {"events": [{"event": "y"}], "lost": 1}
