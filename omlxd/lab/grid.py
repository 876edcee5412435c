"""Many replays of one trace: over several processes, where that pays."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty

from omlxd.lab.outcomes import Outcome, Setup, replay
from omlxd.lab.traces import Trace, read_trace

PAYS_FROM = 400_000
"""Blocks, over all replays, from which on processes of their own pay: each reads the trace anew."""
LOOK_SECONDS = 0.1

Tell = Callable[[int, int], None]
"""Told the number of a replay, and how many of its requests are done."""


def replay_all(trace: Trace, path: Path, setups: Sequence[Setup], tell: Tell) -> list[Outcome]:
    """Replay `trace`, which `path` has, with each of `setups`; what came of each, in their order.

    Raises BrokenProcessPool when a process was ended from outside.
    """
    workers = min(len(setups), os.cpu_count() or 1)
    if workers < 2 or trace.references * len(setups) < PAYS_FROM or not path.is_file():  # a pipe is read once only
        outcomes = []
        for number, setup in enumerate(setups):
            outcomes.append(replay(trace, setup, partial(tell, number)))
            tell(number, len(trace.requests))
        return outcomes
    return _in_processes(path, setups, workers, tell)


def _in_processes(path: Path, setups: Sequence[Setup], workers: int, tell: Tell) -> list[Outcome]:
    context = multiprocessing.get_context("spawn")
    reports: Queue[tuple[int, int]] = context.Queue()
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, context, _begin, (path, reports))
    try:
        # The long ones first, so that none is left over at the end.
        order = sorted(range(len(setups)), key=lambda number: -setups[number].blocks)
        futures: dict[int, Future[Outcome]] = {number: pool.submit(_one, number, setups[number]) for number in order}
        left = set(futures.values())
        while left:
            done, left = wait(left, LOOK_SECONDS, FIRST_EXCEPTION)
            for future in done:
                future.result()
            while True:
                try:
                    tell(*reports.get_nowait())
                except Empty:
                    break
        return [futures[number].result() for number in range(len(setups))]
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        reports.close()


class _Worker:
    """What a process of the pool has been given."""

    trace: Trace
    reports: Queue[tuple[int, int]]


def _begin(path: Path, reports: Queue[tuple[int, int]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word: the command says what is to be said
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Worker.trace = read_trace(path)
    _Worker.reports = reports


def _end_with_parent() -> None:
    """A command that was killed leaves no process that computes on for nobody."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _one(number: int, setup: Setup) -> Outcome:
    def progress(done: int) -> None:
        _Worker.reports.put((number, done))

    outcome = replay(_Worker.trace, setup, progress)
    progress(len(_Worker.trace.requests))
    return outcome
