"""The folders of models that engines use: when the weights change or go, what was computed with them is retired.

A retired namespace is still served to an engine that has the old weights in memory, and leaves first when room is
needed. It is an ordinary one again when an engine registers it again: then the weights are back.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Hashable
from pathlib import Path

from omlxd.namespaces import NamespaceInfo, Namespaces
from omlxd.watching import Watched, Watcher, model_signature

log = logging.getLogger(__name__)


CHANGED = "its weights have changed"
GONE = "its weights are gone"


def digest(signature: Hashable) -> str:
    """A short text for a signature; another one for another signature, in every process."""
    return hashlib.blake2b(repr(signature).encode(), digest_size=16).hexdigest()


class ModelFolders:
    """Watches the folders that engines have named. On the event loop's thread."""

    def __init__(
        self,
        watcher: Watcher,
        namespaces: Namespaces,
        *,
        retire: Callable[[NamespaceInfo, str], None],
        write_down: Callable[[NamespaceInfo], None],
    ) -> None:
        """``retire(info, why)``: its weights are gone; ``write_down(info)``: more is known of it."""
        self._watcher = watcher
        self._namespaces = namespaces
        self._retire = retire
        self._write_down = write_down
        self._watch = True
        self._grace = 60.0
        self._watched: dict[str, Watched] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def apply(self, *, watch: bool, grace: float) -> None:
        """Watch or don't; a change counts once it has lasted ``grace`` seconds."""
        self._watch, self._grace = watch, grace
        if not watch:
            for path in list(self._watched):
                self._forget(path)
        else:
            for path in {info.model_path for info in self._namespaces if info.model_path}:
                self._follow(path)

    def registered(self, info: NamespaceInfo) -> None:
        """An engine has registered ``info``: its weights are what its folder holds now."""
        if info.model_path:
            info.weights = None
            self._follow(info.model_path)

    def _follow(self, path: str) -> None:
        if self._watch and path not in self._tasks:
            self._start(path, self._begin(path))

    def watches(self, info: NamespaceInfo) -> bool:
        """Is the folder of its weights watched at this moment?"""
        return info.model_path in self._watched

    async def close(self) -> None:
        """Stop watching."""
        for path in list(self._watched):
            self._forget(path)
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _start(self, path: str, work: object) -> None:
        assert asyncio.iscoroutine(work)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[path] = task
        task.add_done_callback(lambda done: self._tasks.pop(path) if self._tasks.get(path) is done else None)

    async def _begin(self, path: str) -> None:
        """Look at a folder; watch it from now on. What an earlier run knew of it may be out of date."""
        folder = Path(path)
        now = await asyncio.to_thread(model_signature, folder)
        weights = digest(now)
        changed = [info for info in self._of(path) if info.weights not in (None, weights)]
        if changed:
            await asyncio.sleep(self._grace)
            if digest(await asyncio.to_thread(model_signature, folder)) == weights:
                for info in changed:
                    self._retire(info, CHANGED if now is not None else GONE)
        for info in self._of(path):
            if info.weights is None and now is not None:
                info.weights = weights
                self._write_down(info)
        if now is None:
            log.info("%s holds no weights: it is not watched", path)
        if now is None or path in self._watched:
            return
        self._watched[path] = self._watcher.watch(
            [folder, folder.parent],
            lambda: model_signature(folder),
            lambda: self._changed(path, now),
            now=now,
        )

    def _changed(self, path: str, before: Hashable) -> None:
        running = self._tasks.get(path)
        if running is not None:
            running.cancel()
        self._start(path, self._after_grace(path, before, time.time()))

    async def _after_grace(self, path: str, before: Hashable, since: float) -> None:
        """The folder is not what it was: wait whether that lasts, then retire what was there before."""
        await asyncio.sleep(self._grace)
        now = await asyncio.to_thread(model_signature, Path(path))
        if now == before:
            log.info("%s is as it was before", path)
            return
        for info in self._of(path):
            if info.seen <= since:
                self._retire(info, CHANGED if now is not None else GONE)
        self._forget(path)
        if now is not None:
            await self._begin(path)

    def _of(self, path: str) -> list[NamespaceInfo]:
        return [info for info in self._namespaces if info.model_path == path and not info.retired]

    def _forget(self, path: str) -> None:
        watched = self._watched.pop(path, None)
        if watched is not None:
            self._watcher.forget(watched)
