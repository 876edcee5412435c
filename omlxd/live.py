"""The configuration of a running daemon: a changed file is applied, or refused with the reason.

A file that is not valid changes nothing; the daemon goes on with what it has, and ``status`` says why. Of a valid one,
each setting that differs is applied by its own function below. One that cannot be applied now keeps its old value, and
one that only a restart can apply is named as such.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from omlxd.config import Config
from omlxd.config_problems import ConfigError
from omlxd.config_sources import load_config
from omlxd.logs import set_level, start_logging
from omlxd.metrics import host_and_port
from omlxd.storage.durations import parse_duration
from omlxd.watching import Watcher, file_signature

if TYPE_CHECKING:
    from omlxd.metrics import MetricsServer
    from omlxd.namespaces import NamespaceInfo
    from omlxd.server import Server

log = logging.getLogger(__name__)


class Volume(NamedTuple):
    """A disk: its size and what is free on it, in bytes."""

    total: int
    free: int


class Refusal(Exception):
    """A setting cannot be applied while the daemon runs as it does; the text says why."""


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that differs."""

    key: str
    old: object
    new: object


@dataclass(slots=True)
class Outcome:
    """What became of a changed configuration."""

    applied: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    needs_restart: list[str] = field(default_factory=list)
    problem: str | None = None
    """Why the file as a whole is not used."""

    def as_dict(self) -> dict[str, object]:
        """For the protocol."""
        return {
            "applied": self.applied,
            "refused": self.refused,
            "needs_restart": self.needs_restart,
            "problem": self.problem,
        }


def changes(old: Config, new: Config) -> list[Change]:
    """What differs, in the order of the file; settings that only one of them has count as None in the other."""
    before, after = dict(old.values()), dict(new.values())
    return [
        Change(key, before.get(key), after.get(key)) for key in {**after, **before} if before.get(key) != after.get(key)
    ]


class Applier(Protocol):
    """Applies one setting of ``config`` to the running daemon. Raises Refusal."""

    def __call__(self, live: Live, config: Config) -> None:
        """Do it."""


def _ram_size(live: Live, config: Config) -> None:
    budget = config.ram_bytes(live.memory())
    if budget == 0:
        raise Refusal("the RAM tier can only be switched off by a restart")
    over = live.server.store.resize_ram(budget)
    _store_settings(live, config)
    if over:
        log.info("RAM is still %d bytes over its new budget: they leave as engines release them", over)


def _ram_policy(live: Live, config: Config) -> None:
    try:
        live.server.store.ram.switch_policy(config.ram.policy)
    except ValueError as error:
        raise Refusal(str(error)) from None


def _ssd_is_awaited(live: Live) -> bool:
    """Is there no SSD tier, but to be one? The next attempt to open it goes by the configuration as it is then."""
    return live.server.store.ssd is None and bool(live.server.reporter.about.no_ssd)


def _ssd_policy(live: Live, config: Config) -> None:
    ssd = live.server.store.ssd
    if _ssd_is_awaited(live):
        return
    if ssd is None:
        raise Refusal("there is no SSD tier now")
    try:
        ssd.switch_policy(config.ssd.policy)
    except ValueError as error:
        raise Refusal(str(error)) from None


def _ssd_room(live: Live, config: Config) -> None:
    ssd = live.server.store.ssd
    if _ssd_is_awaited(live) and not config.ssd_is_off:
        return
    if ssd is None or config.ssd_is_off:
        raise Refusal("the SSD tier can only be switched on or off by a restart")
    try:
        volume = live.volume(ssd.path)
    except OSError as error:
        raise Refusal(f"the disk does not say how large it is: {error.strerror or error}") from None
    limit = config.ssd_bytes(volume.total, volume.free + ssd.used_bytes)
    try:
        ssd.min_free = config.min_free_bytes(volume.total)
        ssd.limit = limit
    except ValueError as error:
        raise Refusal(str(error)) from None
    if live.server.store.spiller is not None:
        live.server.store.spiller.press()


def _store_settings(live: Live, config: Config) -> None:
    from omlxd.daemon import sizes_of, store_settings  # the daemon imports this module

    live.server.store.apply(store_settings(config, sizes_of(config)))


def _shares(live: Live, config: Config) -> None:
    for info in live.server.namespaces:
        apply_rules(live.server, config, info)
    live.server.reporter.about.codec = config.ssd.codec


def _remote(live: Live, config: Config) -> None:
    for tier in live.server.store.outer.tiers:
        try:
            tier.configure(config.remote.model_dump())
        except ValueError as error:
            raise Refusal(str(error)) from None


def _log(live: Live, config: Config) -> None:
    if config.daemon.log_format != live.config.daemon.log_format:
        start_logging(config.daemon.log_level, config.daemon.log_format)
    set_level(config.daemon.log_level)
    live.server.reporter.about.log_level = config.daemon.log_level


def _models(live: Live, config: Config) -> None:
    live.on_models(config)


def _metrics(live: Live, config: Config) -> None:
    address = config.metrics.listen
    try:
        if address:
            _try_to_bind(address)
    except OSError as error:
        raise Refusal(f"{address}: {error.strerror or error}") from None
    live.listen_for_metrics(address)


def _try_to_bind(address: str) -> None:
    """OSError where nobody could listen at ``host:port`` now."""
    for family, kind, protocol, _, place in socket.getaddrinfo(*host_and_port(address), type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(place)


def apply_rules(server: Server, config: Config, info: NamespaceInfo) -> None:
    """Share and codec of one namespace, as ``[namespace."..."]`` says."""
    ssd = server.store.ssd
    if ssd is not None:
        ssd.set_share(info.id, config.share_bytes(info.model, ssd.limit))
        ssd.set_codec(info.id, config.rules(info.model).codec or config.ssd.codec)
    ttl = config.rules(info.model).remote_ttl
    for tier in server.store.outer.tiers:
        tier.set_ttl(info.id, parse_duration(ttl) if ttl is not None else None)


APPLIERS: Mapping[str, Applier] = {
    "daemon.log_level": _log,
    "daemon.log_format": _log,
    "ram.size": _ram_size,
    "ram.policy": _ram_policy,
    "ssd.size": _ssd_room,
    "ssd.min_free": _ssd_room,
    "ssd.policy": _ssd_policy,
    "ssd.codec": _shares,
    "ssd.mode": _store_settings,
    "ssd.max_dirty": _store_settings,
    "remote.ttl": _remote,
    "remote.admission": _remote,
    "remote.max_rate": _remote,
    "remote.deadline": _remote,
    "metrics.listen": _metrics,
    "models.watch": _models,
    "models.grace_seconds": _models,
}
"""How each setting is applied; what is not here needs a restart. Settings under ``[namespace]`` are shares and codecs."""


def applier_of(key: str) -> Applier | None:
    """How ``key`` is applied; None: by a restart."""
    return _shares if key.startswith("namespace.") else APPLIERS.get(key)


class Live:
    """Keeps a running daemon as its configuration file says."""

    def __init__(
        self,
        server: Server,
        config: Config,
        *,
        file: Path,
        env: Mapping[str, str],
        flags: Mapping[str, object],
        metrics: MetricsServer,
        memory: Callable[[], int],
        volume: Callable[[Path], Volume],
        on_models: Callable[[Config], None] = lambda config: None,
    ) -> None:
        """``memory``: bytes of RAM of this machine; ``volume``: the disk under a path."""
        self.server = server
        self.config = config
        """What is in effect now."""
        self.memory = memory
        self.volume = volume
        self.on_models = on_models
        self._file = file
        self._env = dict(env)
        self._flags = dict(flags)
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, watcher: Watcher) -> None:
        """Apply what is not applied by starting (metrics, rules), and watch the file from now on."""
        _shares(self, self.config)
        _models(self, self.config)
        self.listen_for_metrics(self.config.metrics.listen)
        watcher.watch(
            [self._file.parent], lambda: file_signature(self._file), self.reload, now=file_signature(self._file)
        )

    def reload(self) -> Outcome:
        """Read the configuration again and apply what differs."""
        about = self.server.reporter.about
        try:
            wanted = load_config(self._file, self._env, self._flags)
        except ConfigError as error:
            about.config_problem = "; ".join(str(error).splitlines())
            log.error("the configuration is not used as it is now: %s", about.config_problem)
            return Outcome(problem=about.config_problem)
        outcome = Outcome()
        done: set[Applier] = set()
        for change in changes(self.config, wanted):
            applier = applier_of(change.key)
            if applier is None:
                outcome.needs_restart.append(change.key)
                log.warning("%s = %r needs a restart; %r is in effect", change.key, change.new, change.old)
                continue
            try:
                if applier not in done:  # one that serves several settings applies all of them at once
                    applier(self, wanted)
                    done.add(applier)
            except Refusal as refusal:
                outcome.refused[change.key] = str(refusal)
                log.error("%s = %r is refused: %s; %r stays", change.key, change.new, refusal, change.old)
            else:
                outcome.applied.append(change.key)
                log.info("%s = %r from now on (was %r)", change.key, change.new, change.old)
        self.config = wanted.keeping(self.config, [*outcome.refused, *outcome.needs_restart])
        about.needs_restart = tuple(outcome.needs_restart)
        about.config_problem = "; ".join(f"{key}: {why}" for key, why in outcome.refused.items()) or None
        return outcome

    def apply_rules_to(self, info: NamespaceInfo) -> None:
        """A namespace has been registered: its rules hold from now on."""
        apply_rules(self.server, self.config, info)

    def listen_for_metrics(self, address: str) -> None:
        """Serve metrics at ``address`` from now on; that it failed is a warning of ``status``."""
        task = asyncio.get_running_loop().create_task(self._listen(address))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, address: str) -> None:
        about = self.server.reporter.about
        try:
            await self._metrics.listen(address)
        except OSError as error:
            about.config_problem = f"metrics.listen = {address!r}: {error.strerror or error}"
            log.error("metrics are not served: %s", about.config_problem)
