"""What ``stats`` answers, gathered from the parts. Shape and meaning are in ``schema.py``."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import omlxd
from omlxd.counting import counted
from omlxd.rates import WINDOWS, Rates
from omlxd.schema import SCHEMA, ClientStats, NamespaceStats, RamStats, RateStats, RemoteStats, SsdStats, Stats
from omlxd.storage.sizes import format_size
from omlxd.wear import life_years

if TYPE_CHECKING:
    from omlxd.server import Server
    from omlxd.session import Session
    from omlxd.storage.tiers import Store

SHORT_SECONDS = {60: "1m", 300: "5m", 900: "15m"}


@dataclass(slots=True)
class About:
    """What the daemon knows of itself beside its parts."""

    socket: str = ""
    config_file: str = ""
    log_level: str = "info"
    config_problem: str | None = None
    needs_restart: tuple[str, ...] = ()
    codec: str = "auto"
    volume: int = 0
    """Bytes of the volume that the store is on."""
    troubles: tuple[str, ...] = ()
    """What went wrong at start, in plain words."""
    no_ssd: str = ""
    """Why there is no SSD tier although there is to be one; empty when all is as it should be."""


class Reporter:
    """Builds the answer to ``stats`` and keeps the samples that rates need."""

    def __init__(self, server: Server, about: About) -> None:
        self._server = server
        self.about = about
        self._rates = Rates()

    def sample(self) -> None:
        """Remember the counters for the rates; called every few seconds."""
        self._rates.note(self._server.store.now(), self._growing())

    def stats(self) -> Stats:
        """Everything that ``omlxd status`` shows."""
        server, store = self._server, self._server.store
        warnings = self._warnings()
        counts = Counter(server.counts)
        for (_, what), count in store.counts.items():
            counts[what] += count
        if store.spiller is not None:
            counts.update({f"spill_{what}": count for what, count in store.spiller.counts.items()})
        if store.restorer is not None:
            counts.update({f"restore_{what}": count for what, count in store.restorer.counts.items()})
        using = Counter(info.id for session in server.sessions.values() for info in session.namespaces)
        if (remote := _remote(store)) is not None:
            counts.update({f"remote_{what}": count for what, count in remote["counts"].items()})
        return {
            "schema": SCHEMA,
            "daemon": {
                "version": omlxd.__version__,
                "pid": server.pid,
                "boot": server.boot,
                "state": "draining" if store.closing else "serving",
                "uptime": time.time() - server.started,
                "socket": self.about.socket,
                "config_file": self.about.config_file,
                "log_level": self.about.log_level,
                "config_problem": self.about.config_problem,
                "needs_restart": list(self.about.needs_restart),
            },
            "health": "trouble" if warnings else "ok",
            "warnings": warnings,
            "ram": _ram(store),
            "ssd": self._ssd(store),
            "remote": _remote(store),
            "rates": {SHORT_SECONDS[window]: self._rate(window) for window in WINDOWS},
            "counts": dict(counts),
            "evictions": _evictions(store),
            "histograms": {
                name: {"bounds": list(one.bounds), "counts": one.cumulative(), "sum": one.sum}
                for name, one in store.histograms.items()
            },
            "namespaces": [self._namespace(info.id, using[info.id]) for info in server.namespaces],
            "clients": [_client(session, store) for session in server.sessions.values()],
            "pins": server.pins.rows(),
        }

    def _growing(self) -> dict[str, float]:
        totals: Counter[str] = Counter()
        for (_, what), count in self._server.store.counts.items():
            totals[what] += count
        store = self._server.store
        if store.spiller is not None:
            totals["spilled_bytes"] = store.spiller.counts["spilled_bytes"]
        if store.restorer is not None:
            totals["restored_bytes"] = store.restorer.counts["restored_bytes"]
        return dict(totals)

    def _rate(self, window: int) -> RateStats:
        totals = self._growing()
        for name in _RATED:
            totals.setdefault(name, 0.0)
        rate = self._rates.over(window, self._server.store.now(), totals)
        hits = rate["hits_ram"] + rate["hits_ssd"] + rate["hits_remote"]
        asked = hits + rate["misses"]
        return {
            "hits_ram": rate["hits_ram"],
            "hits_ssd": rate["hits_ssd"],
            "hits_remote": rate["hits_remote"],
            "misses": rate["misses"],
            "hit_percent": 100 * hits / asked if asked else None,
            "stored_bytes": rate["stored_bytes"],
            "spilled_bytes": rate["spilled_bytes"],
            "restored_bytes": rate["restored_bytes"],
            "loaded_bytes": rate["hit_bytes_ram"] + rate["hit_bytes_ssd"] + rate["hit_bytes_remote"],
        }

    def _ssd(self, store: Store) -> SsdStats | None:
        if store.ssd is None or store.spiller is None or store.restorer is None:
            return None
        tier, spiller = store.ssd, store.spiller
        days = (time.time() - self._server.started) / 86_400
        written = tier.counts["written_bytes"]
        per_day = written / max(days, 1 / 24)
        totals = tier.namespaces()
        return {
            "state": str(tier.state),
            "path": str(tier.path),
            "limit": tier.limit,
            "used": tier.used_bytes,
            "blocks": len(tier),
            "payload_bytes": sum(space.nbytes for space in totals),
            "stored_bytes": sum(space.stored_bytes for space in totals),
            "policy": tier.policy_name,
            "mode": str(store.settings.spill.mode),
            "codec": self.about.codec,
            "free": tier.free_bytes,
            "min_free": tier.min_free,
            "dirty_blocks": spiller.dirty_blocks,
            "dirty_bytes": spiller.dirty_bytes,
            "max_dirty": store.settings.spill.max_dirty_bytes,
            "queue": len(store.restorer),
            "quarantined": tier.counts["damaged"],
            "written_bytes": written,
            "written_per_day": per_day,
            "read_bytes": store.restorer.counts["restored_bytes"],
            "life_years": life_years(self.about.volume, per_day),
        }

    def _namespace(self, namespace_id: bytes, clients: int) -> NamespaceStats:
        store = self._server.store
        info = self._server.namespaces.get(namespace_id)
        assert info is not None
        ram_blocks, ram_bytes = store.ram.by_namespace.get(namespace_id, (0, 0))
        space = store.ssd.totals(namespace_id) if store.ssd is not None else None
        return {
            "id": namespace_id.hex(),
            "model": info.model,
            "fingerprint": info.namespace.fingerprint,
            "block_tokens": info.block_tokens,
            "retired": bool(info.retired),
            "watched": self._server.models is not None and self._server.models.watches(info),
            "ram_blocks": ram_blocks,
            "ram_bytes": ram_bytes,
            "ssd_blocks": space.blocks if space is not None else 0,
            "ssd_bytes": space.nbytes if space is not None else 0,
            "clients": clients,
            "counts": {what: count for (of, what), count in store.counts.items() if of == namespace_id},
        }

    def _warnings(self) -> list[str]:
        store = self._server.store
        found = list(self.about.troubles)
        if self.about.no_ssd:
            found.append(f"{self.about.no_ssd}; blocks are kept in RAM only, and it is tried again")
        if self.about.config_problem:
            found.append(f"the configuration file is not used as it is now: {self.about.config_problem}")
        if store.ssd is not None:
            tier = store.ssd
            if tier.aside:
                found.append(f"the former store was moved aside at the start: {tier.aside}")
            if tier.state != "ok":
                found.append(f"the SSD tier is {tier.state} ({tier.reason}): blocks are served from RAM and not kept")
            if damaged := tier.counts["damaged"]:
                found.append(f"{counted(damaged, 'damaged block')} found on the SSD: misses now, and not served")
        if store.spiller is not None and store.spiller.parked_blocks:
            found.append(
                f"{counted(store.spiller.parked_blocks, 'block')} could not be written to the SSD: in RAM only"
            )
        for outer in store.outer.tiers:
            found += outer.troubles()
        if store.elastic.gives_way:
            found.append(
                f"the system is short of memory: the RAM tier has {format_size(store.ram.arena.budget)} "
                "and takes the rest of its budget back when there is enough again"
            )
        for space, nbytes in store.too_large().items():
            info = self._server.namespaces.get(space)
            found.append(
                f"a block of {info.model if info is not None else space.hex()[:8]} has {format_size(nbytes)}, and the RAM tier "
                f"{format_size(store.ram.arena.budget)}: none of that size is kept; raise size under [ram]"
            )
        if seized := store.held()["seized_blocks"]:
            found.append(
                f"{counted(seized, 'block')} in RAM kept from others: a client that went or was cut off may still use "
                "them; they are free at the latest when its process has ended"
            )
        over = store.ram.arena.used - store.ram.arena.budget
        if over > 0:
            found.append(f"RAM is {format_size(over)} over its budget until blocks in use are released")
        return found


_RATED = (
    "hits_ram",
    "hits_ssd",
    "hits_remote",
    "misses",
    "stored_bytes",
    "spilled_bytes",
    "restored_bytes",
    "hit_bytes_ram",
    "hit_bytes_ssd",
    "hit_bytes_remote",
)


def _remote(store: Store) -> RemoteStats | None:
    """The first outer tier; one that is somebody else's may tell less of itself."""
    for lower in store.lower:
        for tier in store.outer.tiers:
            if lower.tier is not tier:
                continue
            told = tier.stats()
            counts = Counter({str(what): int(count) for what, count in _mapping(told.get("counts")).items()})
            counts.update(lower.restorer.counts)
            nodes = told.get("nodes")
            return {
                "state": str(told["state"]),
                "reason": str(told["reason"]),
                "url": str(told.get("url", "")),
                "sealed": bool(told.get("sealed")),
                "nodes": nodes if isinstance(nodes, list) else [],
                "known_blocks": _number(told.get("known_blocks")),
                "queue": _number(told.get("queue")),
                "restoring": len(lower.restorer),
                "link_bytes_per_second": lower.restorer.bytes_per_second,
                "fetched_bytes": lower.restorer.counts["restored_bytes"],
                "sent_bytes": counts["sent_bytes"],
                "counts": dict(counts),
            }
    return None


def _mapping(value: object) -> dict[str, int]:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _evictions(store: Store) -> dict[str, int]:
    found = {f"ram.{cause}": count for cause, count in store.removals.items()}
    if store.ssd is not None:
        for what, count in store.ssd.counts.items():
            if what.startswith(("evicted", "discarded_")):
                found[f"ssd.{what.removeprefix('discarded_')}"] = count
    return found


def _ram(store: Store) -> RamStats:
    arena = store.ram.arena
    held = store.held()
    return {
        "limit": arena.budget,
        "used": arena.used,
        "mapped": arena.reserved,
        "blocks": len(store.ram.blocks),
        "payload_bytes": sum(nbytes for _, nbytes in store.ram.by_namespace.values()),
        "pinned_bytes": arena.used - store.ram.evictable_bytes,
        "leases": held["leases"],
        "leased_bytes": held["leased_bytes"],
        "reservations": held["reservations"],
        "reserved_bytes": held["reserved_bytes"],
        "policy": store.ram.policy_name,
        "largest_free": arena.largest_free(),
    }


def _client(session: Session, store: Store) -> ClientStats:
    leases = store.leases_of(session)
    now = store.now()
    return {
        "id": session.number,
        "name": session.name,
        "pid": session.peer.pid,
        "uid": session.peer.uid,
        "connected": time.time() - session.since,
        "leases": len(leases),
        "leased_bytes": sum(load.nbytes for load in leases),
        "oldest_lease": max((now - load.since for load in leases), default=None),
        "reserved_bytes": store.reserved_bytes_of(session),
        "requests": session.requests,
    }
