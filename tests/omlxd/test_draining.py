"""Writing what is dirty ends, while engines go on storing, several operators ask for it, and askers vanish."""

from __future__ import annotations

import socket
import threading

from omlxd.client import Cache
from omlxd.protocol import encode
from tests.omlxd.configured import ConfiguredDaemon, fill, stats_of, wait_for


def keep_storing(cache: Cache, stop: threading.Event) -> None:
    number = 0
    while not stop.is_set():
        number += 1
        space = cache.namespace(model=f"org/{number % 50}", fingerprint="f", block_tokens=16)
        result = space.store(list(range(32)), [bytes(64 << 10)] * 2)
        # Cleared while it was written is a reason too: nothing is left out.
        assert result.stored + result.present + sum(result.declined.values()) == 2, result


def test_flush_and_clear_of_ram_end_under_load(daemon: ConfiguredDaemon) -> None:
    stop = threading.Event()
    with daemon.connect() as engine, daemon.connect() as operator:
        storing = threading.Thread(target=keep_storing, args=(engine, stop))
        storing.start()
        try:
            for _ in range(3):
                list(operator.stream("flush", timeout=60))
                operator.call("clear", timeout=60, tier="ram")
        finally:
            stop.set()
            storing.join()


def test_flushes_at_the_same_time_all_end(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        fill(cache, blocks=12)
        ended: list[int] = []

        def flush() -> None:
            with daemon.connect() as operator:
                ended.append(list(operator.stream("flush", timeout=60))[-1]["dirty_bytes"])

        flushes = [threading.Thread(target=flush) for _ in range(5)]
        for one in flushes:
            one.start()
        for one in flushes:
            one.join(90)
        assert len(ended) == 5
        ssd = stats_of(cache)["ssd"]
        assert ssd is not None
        assert ssd["blocks"] == 12


def test_operator_who_leaves_while_the_disk_works_does_not_stop_it(daemon: ConfiguredDaemon) -> None:
    """A commit whose asker has gone is booked all the same: the next one can follow."""
    for number in range(30):
        with daemon.connect() as cache:
            fill(cache, model=f"org/{number}", blocks=1, nbytes=4096)
            cache.call("flush", timeout=60)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(daemon.socket))
            sock.sendall(encode({"i": 0, "v": "hello", "versions": [1, 1]}) + encode({"i": 1, "v": "clear"}))
    with daemon.connect() as cache:
        fill(cache, blocks=3)
        cache.call("flush", timeout=60)
        cache.call("clear", timeout=60)
        assert stats_of(cache)["counts"].get("internal_errors", 0) == 0


def test_client_that_goes_with_answers_unread_is_noticed(daemon: ConfiguredDaemon) -> None:
    """libuv stops watching such a socket after one call, with data still to be read."""
    for _ in range(100):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(daemon.socket))
            sock.sendall(encode({"i": 0, "v": "hello", "versions": [1, 1]}))
            sock.recv(1, socket.MSG_PEEK)  # an answer is there, and stays
            sock.sendall(b"\xff\xff\x00\x00 the beginning of a frame")
    with daemon.connect() as cache:
        wait_for(lambda: len(stats_of(cache)["clients"]) == 1)
