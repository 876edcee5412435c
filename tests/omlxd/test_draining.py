"""Writing what is dirty ends, also while engines go on storing and several operators ask for it at once."""

from __future__ import annotations

import threading

from omlxd.client import Cache
from tests.omlxd.configured import ConfiguredDaemon, fill, stats_of


def keep_storing(cache: Cache, stop: threading.Event) -> None:
    number = 0
    while not stop.is_set():
        number += 1
        fill(cache, model=f"org/{number % 50}", blocks=2, nbytes=64 << 10)


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
