"""The daemon as a process: from a configuration to a running server, and back down in good order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from omlxd.activation import extend_timeout, inherited_sockets, notify
from omlxd.config import Config
from omlxd.counting import counted
from omlxd.listening import Listening, SocketTaken, listen_at
from omlxd.live import Live, Volume
from omlxd.memory import memory
from omlxd.metrics import MetricsServer
from omlxd.models import ModelFolders
from omlxd.paths import PathError, config_path, socket_path
from omlxd.report import About
from omlxd.server import Server, ServerSettings
from omlxd.ssd_opening import NoSsd, announce_trimming, open_ssd
from omlxd.storage import pages, pressure
from omlxd.storage.arena import Arena
from omlxd.storage.ram import RamTier
from omlxd.storage.sizes import format_size
from omlxd.storage.spill import SpillSettings, WriteMode
from omlxd.storage.ssd import SsdLocked, SsdTier
from omlxd.storage.tier import load_tier
from omlxd.storage.tiers import Store, StoreSettings
from omlxd.volumes import KnownVolumes
from omlxd.watching import Watcher

log = logging.getLogger(__name__)

UPKEEP_SECONDS = 5.0
MEMORY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the configuration's sizes come to on this machine, in bytes."""

    ram: int
    segment: int
    max_dirty: int


def sizes_of(config: Config) -> Sizes:
    """Resolve sizes against this machine's memory."""
    ram = config.ram_bytes(memory()[0])
    return Sizes(ram, config.segment_bytes(), config.max_dirty_bytes(ram))


def store_settings(config: Config, sizes: Sizes) -> StoreSettings:
    """How the store is to behave, from the configuration."""
    return StoreSettings(
        spill=SpillSettings(
            mode=WriteMode(config.ssd.mode),
            max_dirty_bytes=sizes.max_dirty,
            group_bytes=max(1 << 20, min(32 << 20, sizes.max_dirty // 4)),
        ),
        # One engine that stops in the middle of its stores must leave room for those of others.
        max_reserved_bytes=max(1 << 20, min(1 << 30, sizes.ram // 4, sizes.max_dirty // 2)),
    )


class Daemon:
    """One run."""

    def __init__(
        self, config: Config, *, config_file: Path | None = None, flags: Mapping[str, object] | None = None
    ) -> None:
        """``config_file`` is watched, and what changes in it applied; ``flags`` are settings that it does not override."""
        self.config = config
        self._config_file = config_file
        self._flags = dict(flags or {})
        self.about = About(
            config_file=str(config_file or ""), log_level=config.daemon.log_level, codec=config.ssd.codec
        )
        self._volumes = KnownVolumes()
        self._stop = asyncio.Event()
        self._signals = 0
        self._listening: Listening | None = None
        """The socket, unless the service manager owns it."""
        self._cannot_listen = False

    async def run(self, ready: Callable[[str], None] | None = None) -> None:
        """Serve until told to stop; ``ready`` is told the socket once clients can connect.

        Raises:
            SocketTaken, PathError: the socket can't be had.
            SsdLocked: another daemon has the store.
        """
        loop = asyncio.get_running_loop()
        sizes = sizes_of(self.config)
        sockets = inherited_sockets()
        if sockets:
            self.about.socket = str(sockets[0].getsockname())
        else:
            chosen = self.config.daemon.socket
            path = Path(chosen).expanduser() if chosen else socket_path()
            self._listening = listen_at(path, group=self._group())
            sockets = [self._listening.sock]
            self.about.socket = str(path)
        try:
            store = self.open_store(sizes)
            server = Server(store, ServerSettings(group=self._group()), on_shutdown=self._stop.set, about=self.about)
            server.adopt_namespaces()
            self._announce(server)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._signalled)
            store.start()
            server.listen(sockets)
            gc.collect()
            gc.freeze()
            log.info(
                "serving at %s, pid %d: RAM %s, %s", self.about.socket, os.getpid(), format_size(sizes.ram), _ssd(store)
            )
            notify("READY=1", f"STATUS=serving at {self.about.socket}")
            if ready is not None:
                ready(self.about.socket)
            async with self._attended(server):
                await self._stop.wait()
            await self._shut_down(server)
        finally:
            if self._listening is not None:
                self._listening.close()

    def open_store(self, sizes: Sizes) -> Store:
        """Open all tiers as the configuration says. A store that is broken is moved aside, not an error."""
        config = self.config
        arena = Arena(sizes.ram, segment_bytes=min(sizes.segment, max(sizes.ram, pages.PAGE_BYTES)))
        ram = RamTier(arena, config.ram.policy)
        store = Store(ram, self._open_ssd(), store_settings(config, sizes), clock=time.monotonic)
        self._attach_remote(store)
        return store

    def _attach_remote(self, store: Store) -> None:
        """The tier that is shared with other machines, where one is configured; what keeps it out is said in ``status``."""
        options = self.config.remote.model_dump()
        if not options["url"]:
            return
        try:
            make = load_tier(self.config.remote.tier)
            store.attach(lambda host: make(options, host), keep=self.config.remote.keep)
        except ValueError as error:
            self._trouble(f"there is no remote tier: {error}")

    def _open_ssd(self) -> SsdTier | None:
        """The SSD tier; None when it is switched off, or when the disk does not let it be opened (then said in ``status``)."""
        try:
            opening = open_ssd(self.config, self._volumes)
        except NoSsd as error:
            self._no_ssd(str(error))
            return None
        if opening is None:
            return None
        self.about.volume = opening.volume
        return opening.tier

    def _trouble(self, text: str) -> None:
        log.error("%s", text)
        self.about.troubles = (*self.about.troubles, text)

    def _no_ssd(self, why: str) -> None:
        if why != self.about.no_ssd:
            log.error("%s; blocks are kept in RAM only until it can be, which is tried again and again", why)
        self.about.no_ssd = why

    async def _try_for_ssd(self, server: Server) -> None:
        """The disk that was not there, or was full, at the start may be well by now."""
        config = server.live.config if server.live is not None else self.config
        try:
            opening = await asyncio.to_thread(open_ssd, config, self._volumes)
        except (NoSsd, SsdLocked) as error:
            self._no_ssd(str(error))
            return
        if opening is None or server.store.closing:
            if opening is not None:
                await asyncio.to_thread(opening.tier.close, False)
            return
        self.about.volume, self.about.no_ssd = opening.volume, ""
        log.info("the SSD tier is there now: %s, %s", opening.tier.path, counted(len(opening.tier), "block"))
        server.attach_ssd(opening.tier)
        self._announce(server)

    def _announce(self, server: Server) -> None:
        if server.store.ssd is not None:
            announce_trimming(server.store.ssd, {info.id: info.model for info in server.namespaces})

    def _group(self) -> int | None:
        if not self.config.daemon.group:
            return None
        import grp

        return grp.getgrnam(self.config.daemon.group).gr_gid

    def _signalled(self) -> None:
        self._signals += 1
        if self._signals > 1:
            log.warning("asked to stop again: what is still dirty is given up")
            os._exit(1)
        self._stop.set()

    @contextlib.asynccontextmanager
    async def _attended(self, server: Server) -> AsyncIterator[None]:
        """What goes on beside the server: upkeep, metrics, a watch on the configuration and on models' folders."""
        watcher, metrics = Watcher(), MetricsServer(server.reporter.stats)
        models = server.models = ModelFolders(
            watcher, server.namespaces, retire=server.retire, write_down=server.write_down
        )
        live = server.live = Live(
            server,
            self.config,
            file=self._config_file or config_path(),
            env=os.environ,
            flags=self._flags,
            metrics=metrics,
            memory=lambda: memory()[0],
            volume=lambda path: Volume(*shutil.disk_usage(path)[::2]),
            on_models=lambda config: models.apply(watch=config.models.watch, grace=config.models.grace_seconds),
        )
        live.start(watcher)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, live.reload)
        tasks = [loop.create_task(work) for work in (self._upkeep(server), self._watch_memory(server), watcher.run())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await models.close()
            await metrics.close()

    async def _watch_memory(self, server: Server) -> None:
        """Give way when the system is short of memory."""
        while True:
            server.store.elastic.note(pressure.read(memory).level)
            await asyncio.sleep(MEMORY_SECONDS)

    async def _upkeep(self, server: Server) -> None:
        """What happens without anybody asking: samples for rates, a look at the disk."""
        while True:
            try:
                server.reporter.sample()
                server.pins.sweep()
                self._look_after_socket(server)
                server.store.withdraw_overdue()
                if server.store.spiller is not None:
                    await server.store.spiller.look_after_disk()
                elif self.about.no_ssd:
                    await self._try_for_ssd(server)
            except Exception:
                # What failed once may work the next time; the daemon must not go on unattended for it.
                server.counts["internal_errors"] += 1
                log.exception("upkeep failed")
            await asyncio.sleep(UPKEEP_SECONDS)

    def _look_after_socket(self, server: Server) -> None:
        """Its file may have been deleted, by hand or by what cleans /tmp: nobody would ever find the daemon again."""
        if self._listening is None or self._listening.is_found:
            return
        try:
            self._listening = self._listening.again()
        except (SocketTaken, PathError) as error:
            if not self._cannot_listen:
                log.error("the socket's file has gone, and can't be made again: %s", error)
            self._cannot_listen = True
            return
        self._cannot_listen = False
        server.stop_listening()
        server.listen([self._listening.sock])
        log.warning("the socket's file %s had gone: made again", self._listening.path)

    async def _shut_down(self, server: Server) -> None:
        store = server.store
        server.stop_listening()
        dirty = store.spiller.dirty_bytes if store.spiller is not None else 0
        log.info("stopping; %s have to reach the SSD", format_size(dirty))
        notify("STOPPING=1", extend_timeout(30 + dirty / 20e6))

        def progress(left: int) -> None:
            log.info("draining: %s to go", format_size(left))
            notify(f"STATUS=draining: {format_size(left)} to go", extend_timeout(30 + left / 20e6))

        await store.stop(progress)
        server.close_sessions("the daemon has ended")
        log.info("ended in good order")


def _ssd(store: Store) -> str:
    """For the log: the SSD tier's limit, contents and place."""
    tier = store.ssd
    if tier is None:
        return "no SSD tier"
    held = f"{counted(len(tier), 'block')} in {format_size(tier.used_bytes)}"
    return f"SSD {format_size(tier.limit)} at {tier.path} ({held})"


def run(
    config: Config,
    *,
    config_file: Path | None = None,
    flags: Mapping[str, object] | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Run a daemon in this process until it is stopped. Raises as :meth:`Daemon.run` does."""
    import uvloop

    async def serve() -> None:
        await Daemon(config, config_file=config_file, flags=flags).run(ready)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
