"""What no client should send: each gets a clear error, and the daemon and everybody else go on unharmed."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgpack
import pytest

import omlxd
from omlxd.protocol import MAX_FRAME_BYTES, encode
from scripts.daemon_process import DaemonProcess
from tests.e2e.blocks import chain, payload
from tests.e2e.conftest import StartDaemon

Raw = Callable[..., dict[str, object]]
KEY = bytes(range(32)) + bytes(4)
HELLO = {"i": 0, "v": "hello", "versions": [1, 1]}


def connect(daemon: DaemonProcess) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(20)
    sock.connect(str(daemon.socket))
    return sock


def read_frame(sock: socket.socket) -> dict[str, object] | None:
    """The next frame; None when the daemon has closed the connection."""
    header = b""
    while len(header) < 4:
        try:
            more = sock.recv(4 - len(header))
        except ConnectionResetError:
            return None
        if not more:
            return None
        header += more
    (length,) = struct.unpack("<I", header)
    body = b""
    while len(body) < length:
        body += sock.recv(length - len(body))
    found = msgpack.unpackb(body)
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One daemon for all of it: whatever one test did to it, the next one would see."""
    process = DaemonProcess(tmp_path_factory.mktemp("bad-input"), ram_size="64MiB", ssd_size="256MiB")
    process.start()
    yield process
    process.kill()
    process.close()


@pytest.fixture
def ask(daemon: DaemonProcess) -> Iterator[Raw]:
    """Asks one request on a greeted connection with one namespace (number 0); the whole answer frame."""
    from omlxd.storage.chain import Namespace

    sock = connect(daemon)
    number = 0

    def send(verb: str, **fields: object) -> dict[str, object]:
        nonlocal number
        number += 1
        sock.sendall(encode({"i": number, "v": verb, **fields}))
        answer = read_frame(sock)
        assert answer is not None
        assert answer["i"] == number
        return answer

    send("hello", versions=[1, 1])
    send("namespace", descriptor=Namespace("m", "f", 64, b"").descriptor())
    yield send
    sock.close()


def is_unharmed(daemon: DaemonProcess) -> bool:
    """Does it still store and load for somebody else, and hold nothing for anybody?"""
    hashes = [os.urandom(32)]
    with omlxd.connect(daemon.socket) as cache:
        space = cache.namespace(model="other", fingerprint="f", block_tokens=64)
        assert space.store_keys(hashes, [payload(hashes[0], 1000)]).stored == 1
        with space.load_keys(hashes) as lease:
            assert [bytes(block.view) for block in lease] == [payload(hashes[0], 1000)]
        stats = cache.stats()
        return stats["counts"].get("internal_errors", 0) == 0 and "Traceback" not in daemon.log.read_text()


@pytest.mark.parametrize(
    ("garbage", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4, "frame_too_large"),
        (struct.pack("<I", MAX_FRAME_BYTES + 1), "frame_too_large"),
        (struct.pack("<I", 0xFFFFFFFF), "frame_too_large"),
        (struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1", "bad_frame"),
        (struct.pack("<I", 1) + b"\x93", "bad_frame"),
        (struct.pack("<I", 0), "bad_frame"),
        (encode(HELLO)[:4] + b"\x01" * (len(encode(HELLO)) - 4), "bad_frame"),
        (struct.pack("<I", 3) + msgpack.packb({1: 2}), "bad_frame"),
        (struct.pack("<I", 2000) + b"\x91" * 2000, "bad_frame"),
        (encode({"v": "hello"}), "bad_frame"),
        (encode({"i": -1, "v": "hello"}), "bad_frame"),
        (encode({"i": "x", "v": "hello"}), "bad_frame"),
    ],
)
def test_garbage_ends_that_connection_with_the_reason(daemon: DaemonProcess, garbage: bytes, code: str) -> None:
    with connect(daemon) as sock:
        sock.sendall(garbage)
        answer = read_frame(sock)
        assert answer is not None
        assert answer["i"] is None
        error = answer["err"]
        assert isinstance(error, dict)
        assert error["code"] == code
        assert read_frame(sock) is None
    assert is_unharmed(daemon)


def test_half_frames_and_early_ends_hurt_nobody(daemon: DaemonProcess) -> None:
    frame = encode(HELLO)
    for length in range(1, len(frame)):
        with connect(daemon) as sock:
            sock.sendall(frame[:length])
    with connect(daemon) as sock:
        for byte in frame:
            sock.sendall(bytes([byte]))
        answer = read_frame(sock)
        assert answer is not None
        assert "ok" in answer
    assert is_unharmed(daemon)


def test_random_bytes_hurt_nobody(daemon: DaemonProcess) -> None:
    for size in (1, 3, 4, 5, 100, 10_000):
        with connect(daemon) as sock:
            sock.sendall(os.urandom(size))
    assert is_unharmed(daemon)


def test_before_hello_nothing_else_is_answered(daemon: DaemonProcess) -> None:
    with connect(daemon) as sock:
        sock.sendall(encode({"i": 0, "v": "stats"}))
        answer = read_frame(sock)
        assert answer is not None
        assert "hello_first" in str(answer["err"])


@pytest.mark.parametrize("versions", [[2, 9], [0, 0], [], [1], [1, 1, 1], "1", None, [-1, 1], [True, True]])
def test_other_versions_are_refused(daemon: DaemonProcess, versions: object) -> None:
    with connect(daemon) as sock:
        sock.sendall(encode({"i": 0, "v": "hello", "versions": versions}))
        answer = read_frame(sock)
        assert answer is not None
        error = answer["err"]
        assert isinstance(error, dict)
        assert error["code"] in ("bad_version", "bad_request")
        assert error["message"]


@pytest.mark.parametrize(
    ("verb", "fields", "code", "named"),
    [
        ("fly", {}, "unknown_verb", "'fly' is unknown; known: clear"),
        ("lookup", {"keys": KEY}, "bad_request", "ns is None"),
        ("lookup", {"ns": 1, "keys": KEY}, "bad_request", "ns is 1; allowed: a whole number from 0 to 0"),
        ("lookup", {"ns": -1, "keys": KEY}, "bad_request", "ns is -1"),
        ("lookup", {"ns": 0, "keys": KEY[:-1]}, "bad_request", "keys is '35 bytes'; allowed: bytes, 36 for each key"),
        ("lookup", {"ns": 0, "keys": "x" * 36}, "bad_request", "keys is"),
        ("lookup", {"ns": 0, "keys": KEY * 65_537}, "too_many", "keys holds 65537 keys; at most 65536"),
        ("lookup", {"ns": 0, "keys": KEY, "prefix": 1}, "bad_request", "prefix is 1; allowed: true or false"),
        ("load", {"ns": 0, "keys": KEY, "mode": "hope"}, "bad_request", "mode is 'hope'; allowed: wait, best_effort"),
        ("load", {"ns": 0, "keys": KEY, "timeout": -1}, "bad_request", "timeout is -1"),
        ("load", {"ns": 0, "keys": KEY, "timeout": float("nan")}, "bad_request", "timeout is nan"),
        ("load", {"ns": 0, "keys": KEY, "prefill_tokens_per_s": 0}, "bad_request", "prefill_tokens_per_s is 0"),
        ("release", {"lease": 99}, "unknown_lease", "lease 99"),
        ("release", {"lease": "99"}, "bad_request", "lease is '99'"),
        (
            "prepare_store",
            {"ns": 0, "keys": KEY, "sizes": -5},
            "too_large",
            "sizes is -5; allowed: payload bytes from 1",
        ),
        ("prepare_store", {"ns": 0, "keys": KEY, "sizes": 0}, "too_large", "sizes is 0"),
        ("prepare_store", {"ns": 0, "keys": KEY, "sizes": 1 << 62}, "too_large", "sizes is"),
        ("prepare_store", {"ns": 0, "keys": KEY, "sizes": [1, 2]}, "bad_request", "sizes is [1, 2]"),
        ("prepare_store", {"ns": 0, "keys": KEY, "sizes": 1.5}, "bad_request", "sizes is 1.5"),
        ("prepare_store", {"ns": 0, "keys": KEY, "first": 2, "sizes": 1}, "bad_request", "first is 2"),
        ("prepare_store", {"ns": 0, "keys": KEY * 2, "sizes": 1}, "bad_request", "keys holds a key twice"),
        ("prepare_store", {"ns": 0, "keys": KEY, "sizes": 1, "layouts": [1]}, "bad_request", "layouts"),
        ("complete_store", {"reservations": [5]}, "unknown_reservation", "reservation 5"),
        ("complete_store", {"reservations": [-5]}, "bad_request", "reservations is [-5]"),
        ("get", {"ns": 0, "keys": KEY * 2}, "too_many", "keys holds 2 keys"),
        ("get", {"ns": 0, "keys": b""}, "bad_request", "one key"),
        ("put", {"ns": 0, "keys": KEY, "payload": b""}, "bad_request", "at least one byte"),
        ("put", {"ns": 0, "keys": KEY, "payload": b"x", "position": 3}, "bad_request", "parent"),
        (
            "put",
            {"ns": 0, "keys": KEY, "payload": b"x", "position": 1, "parent": b"p"},
            "bad_request",
            "parent has 1 bytes",
        ),
        ("namespace", {"descriptor": {}}, "bad_request", "descriptor"),
        ("namespace", {"descriptor": "m"}, "bad_request", "descriptor is str; a map is needed"),
        ("clear", {"namespace": "nobody"}, "not_found", "'nobody'"),
        ("resize", {"ram_bytes": -1}, "bad_request", "ram_bytes is -1"),
        ("list", {"prefix": "xyz"}, "bad_request", "prefix is 'xyz'; hexadecimal"),
    ],
)
def test_a_bad_request_is_refused_by_name_and_the_connection_goes_on(
    daemon: DaemonProcess, ask: Raw, verb: str, fields: dict[str, object], code: str, named: str
) -> None:
    error = ask(verb, **fields)["err"]
    assert isinstance(error, dict)
    assert error["code"] == code
    assert named in error["message"]
    assert "ok" in ask("lookup", ns=0, keys=KEY)
    assert is_unharmed(daemon)


def test_empty_batches_are_fine(ask: Raw) -> None:
    assert ask("lookup", ns=0, keys=b"")["ok"] == {"where": b""}
    loaded = ask("load", ns=0, keys=b"")["ok"]
    assert isinstance(loaded, dict)
    assert loaded["slots"] == []
    assert ask("prepare_store", ns=0, keys=b"", sizes=5)["ok"] == {"slots": [], "present": 0, "declined": {}}
    assert ask("complete_store", reservations=[])["ok"] == {"stored": 0}


def test_a_store_completed_twice_and_a_lease_released_twice(ask: Raw) -> None:
    key = os.urandom(36)
    prepared = ask("prepare_store", ns=0, keys=key, sizes=100)["ok"]
    assert isinstance(prepared, dict)
    ((_, reservation, _, _),) = prepared["slots"]
    both = ask("complete_store", reservations=[reservation, reservation])
    assert "unknown_reservation" in str(both["err"])
    assert ask("complete_store", reservations=[reservation])["ok"] == {"stored": 1}
    assert "unknown_reservation" in str(ask("complete_store", reservations=[reservation])["err"])
    loaded = ask("load", ns=0, keys=key)["ok"]
    assert isinstance(loaded, dict)
    assert len(loaded["slots"]) == 1
    assert ask("release", lease=loaded["lease"])["ok"] == {}
    assert "unknown_lease" in str(ask("release", lease=loaded["lease"])["err"])


def test_other_connections_leases_and_reservations_are_not_ones_own(daemon: DaemonProcess, ask: Raw) -> None:
    prepared = ask("prepare_store", ns=0, keys=os.urandom(36), sizes=100)["ok"]
    assert isinstance(prepared, dict)
    ((_, reservation, _, _),) = prepared["slots"]
    with omlxd.connect(daemon.socket) as cache, pytest.raises(omlxd.Refused, match="reservation"):
        cache.call("complete_store", reservations=[reservation])
    assert ask("complete_store", reservations=[reservation])["ok"] == {"stored": 1}


def test_too_many_open_requests_are_refused_not_queued_for_ever(daemon: DaemonProcess) -> None:
    key = os.urandom(36)
    with connect(daemon) as sock:
        from omlxd.storage.chain import Namespace

        sock.sendall(encode(HELLO))
        read_frame(sock)
        sock.sendall(encode({"i": 1, "v": "namespace", "descriptor": Namespace("m", "f", 64, b"").descriptor()}))
        read_frame(sock)
        sock.sendall(encode({"i": 2, "v": "prepare_store", "ns": 0, "keys": key, "sizes": 10}))
        read_frame(sock)
        for number in range(3, 300):  # each waits for the block that is being written and never comes
            sock.sendall(encode({"i": number, "v": "load", "ns": 0, "keys": key, "timeout": 30}))
        answer = read_frame(sock)
        assert answer is not None
        assert "too_many" in str(answer["err"])
    assert is_unharmed(daemon)


def test_a_client_that_vanishes_between_prepare_and_complete_leaves_nothing(daemon: DaemonProcess) -> None:
    program = (
        "import os, omlxd; from omlxd.operations import pack_keys; from tests.e2e.blocks import chain\n"
        "cache = omlxd.connect(); space = cache.namespace(model='m', fingerprint='f', block_tokens=64)\n"
        "space.store_keys(chain(1, 3), [b'x' * 5000] * 3)\n"
        "lease = space.load_keys(chain(1, 3)); assert len(lease.wait()) == 3\n"
        "answer = cache.call('prepare_store', ns=0, keys=pack_keys(chain(2, 5)), sizes=1 << 20)\n"
        "assert len(answer['slots']) == 5\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=daemon.environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -9, done.stderr
    with omlxd.connect(daemon.socket) as cache:
        deadline = time.monotonic() + 20
        while (ram := cache.stats()["ram"])["leases"] or ram["reservations"]:
            assert time.monotonic() < deadline, ram
        space = cache.namespace(model="m", fingerprint="f", block_tokens=64)
        assert space.match_keys(chain(1, 3)).blocks == 3
        assert space.match_keys(chain(2, 5)).blocks == 0
        assert space.store_keys(chain(2, 5), [payload(h, 1 << 20) for h in chain(2, 5)]).stored == 5
    assert is_unharmed(daemon)


def test_a_client_that_never_reads_is_cut_off_and_costs_bounded_memory(daemon: DaemonProcess) -> None:
    with omlxd.connect(daemon.socket) as cache:
        space = cache.namespace(model="m", fingerprint="f", block_tokens=64)
        big = chain(3, 1)[0]
        space.put(big, bytes(8 << 20))
        with connect(daemon) as sock:
            sock.sendall(encode(HELLO))
            sock.sendall(encode({"i": 1, "v": "namespace", "descriptor": space.namespace.descriptor()}))
            number = 2
            while number < 200:
                try:
                    sock.sendall(encode({"i": number, "v": "get", "ns": 0, "keys": big + bytes(4)}))
                except (BrokenPipeError, ConnectionResetError):
                    break
                number += 1
            while cache.stats()["ram"]["leases"]:
                continue
            frames = 0
            try:
                while read_frame(sock) is not None:
                    frames += 1
            except OSError:
                pass
            assert frames < 60, "far more was kept for it than the limit"
    assert is_unharmed(daemon)


def test_a_second_daemon_on_the_same_socket_or_store_is_told_who_has_it(start_daemon: StartDaemon) -> None:
    first = start_daemon()
    again = subprocess.run(
        [sys.executable, "-m", "omlxd", "serve"],
        env=first.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert again.returncode == 1
    assert f"pid {first.pid}" in again.stderr
    other_socket = {
        **first.environment,
        "OMLXD_SOCKET": str(first.socket) + "2",
        "OMLXD_DAEMON_SOCKET": str(first.socket) + "2",
    }
    again = subprocess.run(
        [sys.executable, "-m", "omlxd", "serve"],
        env=other_socket,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert again.returncode == 1
    assert str(first.pid) in again.stderr
    assert is_unharmed(first)


def test_a_stale_socket_file_is_replaced(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    daemon.kill()
    assert daemon.socket.exists()
    daemon.start()
    assert is_unharmed(daemon)
