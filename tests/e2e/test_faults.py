"""An engine whose daemon is stopped, killed, frozen or replaced goes on computing, and uses the cache again afterwards.

``OMLXD_LONG=1`` runs 50 faults of each kind, at random moments; otherwise a few.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import omlxd
from scripts.daemon_process import DaemonProcess
from tests.e2e.blocks import chain, payload

FAULTS = 50 if os.environ.get("OMLXD_LONG") else 3
NBYTES = 300_000
BLOCKS = 6
CHAINS = 40
PATIENCE = 0.5


class Engine:
    """A thread that works on one prompt after the other, with the cache where there is one."""

    def __init__(self, socket: Path, seed: int) -> None:
        self.steps = 0
        """Prompts that were worked on, with the cache or without."""
        self.hits = 0
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.failure: BaseException | None = None
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._cache = omlxd.connect(socket, name=f"engine-{seed}", timeout=PATIENCE)
        self._space = self._cache.namespace(model="faults", fingerprint="f")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the engine hangs"
        self._cache.close()
        if self.failure is not None:
            raise self.failure
        assert not self.wrong

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._work_on(chain(self._rng.randrange(CHAINS), BLOCKS))
                self.steps += 1
        except BaseException as error:
            self.failure = error

    def _work_on(self, keys: list[bytes]) -> None:
        have = 0
        try:
            with self._space.load_keys(keys, timeout=PATIENCE) as lease:
                for block in lease:
                    copy = bytes(block.view)
                    lease.check()
                    have += 1
                    self.hits += 1
                    if copy != payload(block.key, NBYTES):
                        self.wrong.append(block.key.hex())
        except omlxd.LeaseEnded:
            self.outcomes["lease ended"] += 1
        except (omlxd.Unavailable, omlxd.Refused, ValueError) as error:
            if isinstance(error, ValueError) and "released" not in str(error):
                raise
            self.outcomes[type(error).__name__] += 1
        computed = [payload(key, NBYTES) for key in keys[have:]]
        try:
            self._space.store_keys(keys, computed, start=have, timeout=PATIENCE)
        except (omlxd.Unavailable, omlxd.Refused) as error:
            self.outcomes[type(error).__name__] += 1


def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path, ram_size="64MiB", ssd_size="256MiB") as one:
        yield one
        if one.pid:
            os.kill(one.pid, signal.SIGCONT)


@pytest.fixture
def engines(daemon: DaemonProcess) -> Iterator[list[Engine]]:
    working = [Engine(daemon.socket, seed) for seed in range(2)]
    yield working
    for engine in working:
        engine.end()


def go_on(engines: list[Engine], what: str, by: int = 3) -> None:
    """Each engine works on some more prompts."""
    before = [engine.steps for engine in engines]
    until(
        lambda: all(
            engine.steps >= old + by or engine.failure is not None for engine, old in zip(engines, before, strict=True)
        ),
        f"the engines do not go on {what}",
    )
    assert not any(engine.failure for engine in engines)


def hit_again(engines: list[Engine], what: str) -> None:
    """Each engine gets blocks from the cache."""
    before = [engine.hits for engine in engines]
    until(
        lambda: all(
            engine.hits > old or engine.failure is not None for engine, old in zip(engines, before, strict=True)
        ),
        f"the engines do not use the cache {what}",
    )


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["frozen", "killed", "stopped", "replaced"])
@pytest.mark.timeout(1800)
def test_engines_go_on_and_come_back(daemon: DaemonProcess, engines: list[Engine], fault: str) -> None:
    rng = random.Random(fault)
    hit_again(engines, "before the fault")
    for number in range(FAULTS):
        time.sleep(rng.random() * 0.3)  # the random moment itself: the one thing here that is no condition
        if fault == "frozen":
            os.kill(daemon.pid, signal.SIGSTOP)
            go_on(engines, f"while the daemon is frozen ({number})", by=rng.randint(1, 20))
            os.kill(daemon.pid, signal.SIGCONT)
        elif fault == "replaced":
            daemon.kill() if rng.random() < 0.5 else daemon.stop()
            daemon.start()
        else:
            daemon.kill() if fault == "killed" else daemon.stop()
            go_on(engines, f"while there is no daemon ({number})", by=rng.randint(1, 20))
            daemon.start()
        hit_again(engines, f"after fault {number} ({fault})")


def test_a_frozen_daemon_costs_the_patience_once(daemon: DaemonProcess) -> None:
    """Whoever asks again meanwhile is told at once; when the daemon goes on, so does the same client."""
    with omlxd.connect(daemon.socket, timeout=PATIENCE) as cache:
        space = cache.namespace(model="frozen", fingerprint="f")
        keys = chain(1, 3)
        space.store_keys(keys, [payload(key, NBYTES) for key in keys])
        lease = space.load_keys(keys)
        os.kill(daemon.pid, signal.SIGSTOP)
        with pytest.raises(omlxd.Unavailable, match="did not answer"):
            space.match_keys(keys)
        begun = time.monotonic()
        for _ in range(200):
            with pytest.raises(omlxd.Unavailable):
                space.match_keys(keys)
        # 200 times the patience would be 100 s; this is no timing but the difference between waiting and not waiting.
        assert time.monotonic() - begun < 20
        lease.check()
        assert bytes(lease.blocks[2].view) == payload(keys[2], NBYTES), "a frozen daemon gives its memory to nobody"
        os.kill(daemon.pid, signal.SIGCONT)

        def is_back() -> bool:
            try:
                return space.match_keys(keys).blocks == 3
            except omlxd.Unavailable:
                return False

        until(is_back, "the client does not come back")
        lease.check()
        until(lambda: len(cache.stats()["clients"]) == 2, "the lease keeps its old connection, nothing else does")
        lease.release()
        until(lambda: len(cache.stats()["clients"]) == 1, "the old connection ends with its last lease")
