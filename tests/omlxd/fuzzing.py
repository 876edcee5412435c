"""Generated connections against a real daemon: `python -m tests.omlxd.fuzzing --seconds 3600`, or `scripts/fuzz`.

A connection is a list of what is sent on it: noise, messages whose verb, fields and values are made up, messages that
are nearly right, frames cut off. Afterwards the daemon has to answer the next client, with nothing held and no error
of its own counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import tempfile
import time
from pathlib import Path

import msgpack
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import omlxd
from omlxd import server
from omlxd.protocol import Message, encode
from omlxd.storage.chain import Namespace
from omlxd.verbs import VERBS
from scripts.daemon_process import DaemonProcess

assert server  # it registers the verbs

PATIENCE_SECONDS = 10.0
SPARED = {"shutdown"}  # ends the daemon, as it should
DESCRIPTOR = Namespace(model="org/fuzz", fingerprint="f", block_tokens=16, layout=b"").descriptor()
FIELDS = [
    "keys", "ns", "descriptor", "prefix", "prefetch", "timeout", "mode", "lease", "first", "sizes", "layouts",
    "reservations", "ok", "payload", "parent", "position", "layout", "tier", "namespace", "limit", "ttl", "older_than",
    "retired", "ram_bytes", "versions", "client", "path", "prefill_tokens_per_s", "i", "v", "",
]  # fmt: skip

keys = st.lists(st.integers(0, 5).map(lambda n: bytes([n]) * 36), min_size=1, max_size=6).map(b"".join)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.sampled_from([0, 1, -1, 36, 1 << 31, 1 << 40, (1 << 63) - 1]),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=80),
    keys,
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ids = st.integers(0, 3) | values
verbs = st.sampled_from(sorted(set(VERBS) - SPARED)) | st.text(max_size=8).filter(lambda verb: verb not in SPARED)
made_up = st.builds(
    lambda i, verb, fields: {**fields, "i": i, "v": verb},
    ids,
    verbs,
    st.dictionaries(st.sampled_from(FIELDS), values, max_size=5),
)
nearly_right: st.SearchStrategy[Message] = st.one_of(
    st.builds(lambda k, t: {"v": "load", "ns": 0, "keys": k, "timeout": t}, keys, st.floats(0, 0.2)),
    st.builds(lambda k, p: {"v": "lookup", "ns": 0, "keys": k, "prefix": p, "prefetch": True}, keys, st.booleans()),
    st.builds(
        lambda n, size, first: {
            "v": "prepare_store", "ns": 0, "keys": b"".join(bytes([i]) * 36 for i in range(n)), "first": first,
            "sizes": [size] * (n - first), "timeout": 0.05,
        },
        st.integers(1, 6), st.sampled_from([1, 5000, 1 << 20, 1 << 40]), st.integers(0, 2),
    ),
    st.builds(lambda r, ok: {"v": "complete_store", "reservations": r, "ok": ok},
              st.lists(st.integers(0, 50), max_size=4), st.booleans()),
    st.builds(lambda lease: {"v": "release", "lease": lease}, st.integers(0, 50)),
    st.builds(lambda k, p: {"v": "put", "ns": 0, "keys": k, "payload": p}, keys, st.binary(max_size=200)),
    st.sampled_from([{"v": verb} for verb in ("subscribe", "record", "stats", "list")]),
    st.just({"v": "namespace", "descriptor": DESCRIPTOR}),
)  # fmt: skip
sent = st.one_of(
    st.binary(max_size=64),
    st.integers(0, (1 << 32) - 1).map(lambda length: length.to_bytes(4, "little")),
    made_up.map(lambda message: _frame(message)),
    st.tuples(ids, nearly_right).map(lambda pair: _frame({"i": pair[0], **pair[1]})),
    st.tuples(nearly_right, st.integers(1, 60)).map(lambda pair: _frame({"i": 9, **pair[0]})[: -pair[1]]),
)
connections = st.tuples(st.booleans(), st.booleans(), st.lists(sent, max_size=12))


def _frame(message: Message) -> bytes:
    try:
        return encode(message)
    except (OverflowError, ValueError, TypeError):
        return bytes(msgpack.packb(str(message)))


def assault(path: Path, greet: bool, read: bool, frames: list[bytes]) -> None:
    """One connection; with ``greet`` it begins as it should, with ``read`` it looks at the answers."""
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(ConnectionError):
        sock.settimeout(10)
        sock.connect(str(path))
        if greet:
            sock.sendall(encode({"i": 1000, "v": "hello", "versions": [1, 1]}))
            sock.sendall(encode({"i": 1001, "v": "namespace", "descriptor": DESCRIPTOR}))
        for frame in frames:
            sock.sendall(frame)
        if read:
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass


def assert_unharmed(path: Path, errors: int = 0) -> None:
    """It answers, holds nothing for who has gone, and has counted no more than ``errors`` errors of its own."""
    with omlxd.connect(path, timeout=30) as cache:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            stats = cache.call("stats")
            left = {name: stats["ram"][name] for name in ("leases", "reservations")}
            if not any(left.values()) and len(stats["clients"]) == 1:
                break
            assert time.monotonic() < deadline, f"still held: {left}, {len(stats['clients'])} clients"
            time.sleep(0.01)
        assert stats["counts"].get("internal_errors", 0) <= errors, "an error of the daemon's own: see its log"


def main() -> int:
    """Go on until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    began = time.monotonic()
    count = 0
    with (
        tempfile.TemporaryDirectory(prefix="omlxd-fuzz-") as folder,
        DaemonProcess(Path(folder), ram_size="32MiB", ssd_size="64MiB") as daemon,
    ):

        @settings(
            max_examples=500,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(connections)
        def some(connection: tuple[bool, bool, list[bytes]]) -> None:
            nonlocal count
            if time.monotonic() - began < options.seconds:
                count += 1
                assault(daemon.socket, *connection)
                assert_unharmed(daemon.socket)

        while time.monotonic() - began < options.seconds:
            some()
        log = daemon.log.read_text(errors="replace")
    troubles = [line for line in log.splitlines() if "Traceback" in line or "never retrieved" in line]
    print(json.dumps({"seconds": round(time.monotonic() - began), "connections": count, "tracebacks": len(troubles)}))
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
