"""Noticing that files change: watchdog tells soon, a slow look tells surely.

What is compared is a *signature* (names, sizes, times), not events: editors that write, rename or replace a file,
bursts of events, folders that vanish and come back, links whose target is elsewhere, and file systems without events
all come out the same. A signature has to stay as it is for a moment before it counts: a half-written file is not read.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from pathlib import Path

from watchdog.events import EVENT_TYPE_CLOSED_NO_WRITE, EVENT_TYPE_OPENED, FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import ObservedWatch

log = logging.getLogger(__name__)

SETTLE_SECONDS = 0.25
LOOK_SECONDS = 5.0

WEIGHTS = (".safetensors", ".gguf", ".npz", ".bin", ".pt")
DESCRIPTIONS = ("config.json", "adapter_config.json")


def file_signature(path: Path) -> Hashable:
    """What changes when a file's content does; None when it cannot be read."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def model_signature(folder: Path) -> Hashable:
    """What changes when a model's weights or their description do; None when the folder is gone."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return None
    telling = [name for name in names if name.endswith(WEIGHTS) or name in DESCRIPTIONS]
    found: list[tuple[str, int, int]] = []
    for name in telling:
        try:
            state = os.stat(folder / name)
        except OSError:
            continue  # a link whose target is gone: as if it were not there
        found.append((name, state.st_size, state.st_mtime_ns))
    return tuple(found) if found else None


class Watched:
    """One thing that is watched; ``Watcher.watch`` makes it."""

    def __init__(
        self, folders: Sequence[Path], signature: Callable[[], Hashable], changed: Callable[[], object], now: Hashable
    ) -> None:
        self.folders = tuple(folders)
        self.signature = signature
        self.changed = changed
        self.last = now
        self.candidate = now
        self.armed: dict[Path, tuple[int, ObservedWatch]] = {}


class Watcher:
    """Watches any number of things; ``run`` is its task.

    Files are looked at on a thread: a folder on a disk that does not answer holds up this task, not the event loop.
    ``changed`` callbacks run on the loop.
    """

    def __init__(self, *, settle: float = SETTLE_SECONDS, look: float = LOOK_SECONDS) -> None:
        self._settle = settle
        self._look = look
        self._watched: list[Watched] = []
        self._poked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._observer = Observer()
        self._told_of_limit = False

    def watch(
        self,
        folders: Sequence[Path],
        signature: Callable[[], Hashable],
        changed: Callable[[], object],
        *,
        now: Hashable,
    ) -> Watched:
        """Call ``changed`` whenever ``signature`` gives something else than it last did, ``now`` to begin with.

        ``folders``: where events that may concern it happen. They need not exist.
        """
        watched = Watched(folders, signature, changed, now)
        self._watched.append(watched)
        self._poked.set()
        return watched

    def forget(self, watched: Watched) -> None:
        """Watch it no longer."""
        if watched in self._watched:
            self._watched.remove(watched)
            self._disarm_all(watched)

    async def run(self) -> None:
        """Watch until cancelled."""
        self._observer.start()
        try:
            while True:
                try:
                    await asyncio.wait_for(self._poked.wait(), self._look)
                    self._poked.clear()
                    await asyncio.sleep(self._settle)
                except TimeoutError:
                    pass
                for watched in list(self._watched):
                    await self._check(watched)
        finally:
            self._observer.stop()

    async def _check(self, watched: Watched) -> None:
        signature = await asyncio.to_thread(self._look_at, watched)
        if watched not in self._watched:
            self._disarm_all(watched)  # it was forgotten while the thread looked, and may have been armed again
            return
        if signature == watched.last:
            watched.candidate = signature
        elif signature != watched.candidate:
            watched.candidate = signature
            self._poked.set()
        else:
            watched.last = signature
            try:
                watched.changed()
            except Exception:
                log.exception("what a change of %s asked for failed", watched.folders[0])

    def _look_at(self, watched: Watched) -> Hashable:
        for folder in watched.folders:
            try:
                inode = os.stat(folder).st_ino
            except OSError:
                inode = None
            armed = watched.armed.get(folder)
            if armed is not None and armed[0] != inode:
                self._disarm(watched, folder)
                armed = None
            if armed is None and inode is not None:
                self._arm(watched, folder, inode)
        return watched.signature()

    def _arm(self, watched: Watched, folder: Path, inode: int) -> None:
        try:
            watch = self._observer.schedule(_Poke(self._poke), str(folder))
        except OSError as error:
            if not self._told_of_limit:
                self._told_of_limit = True
                log.warning("no events for %s (%s): it is looked at every %.0f s instead", folder, error, self._look)
            return
        watched.armed[folder] = (inode, watch)

    def _disarm_all(self, watched: Watched) -> None:
        for folder in list(watched.armed):
            self._disarm(watched, folder)

    def _disarm(self, watched: Watched, folder: Path) -> None:
        _, watch = watched.armed.pop(folder)
        if any(watch == other for one in self._watched for _, other in one.armed.values()):
            return  # another one watches the same folder
        with suppress(KeyError, OSError):  # it may have ended by itself when the folder went
            self._observer.unschedule(watch)

    def _poke(self) -> None:
        with suppress(RuntimeError):  # the loop may have been closed
            self._loop.call_soon_threadsafe(self._poked.set)


class _Poke(FileSystemEventHandler):
    def __init__(self, poke: Callable[[], None]) -> None:
        self._poke = poke

    def on_any_event(self, event: FileSystemEvent) -> None:
        """Called on watchdog's thread."""
        if event.event_type not in (EVENT_TYPE_OPENED, EVENT_TYPE_CLOSED_NO_WRITE):  # that is our own reading
            self._poke()
