"""Figures for Prometheus: the answer of ``stats`` as its text format, served over HTTP on loopback.

Everything is made from one ``Stats``, so that what a dashboard shows and what ``omlxd status`` shows cannot differ.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from omlxd.schema import NamespaceStats, RamStats, SsdStats, Stats

log = logging.getLogger(__name__)

REQUEST_SECONDS = 5.0
MAX_REQUEST_BYTES = 16_384

SIMPLE_COUNTERS = {
    "misses": ("misses", "Blocks that engines asked for and did not get"),
    "stored": ("stored_blocks", "Blocks that engines stored"),
    "stored_bytes": ("stored_bytes", "Payload bytes that engines stored"),
    "store_present": ("store_present", "Blocks offered that were there already"),
    "restores_skipped": ("restores_skipped", "Restores left because computing is faster"),
}
"""Counts of a namespace that become a counter of their own: name, help."""

RAM_GAUGES = ("mapped", "pinned_bytes", "leases", "leased_bytes", "reservations", "reserved_bytes", "largest_free")
SSD_GAUGES = ("stored_bytes", "free", "min_free", "dirty_blocks", "dirty_bytes", "max_dirty", "queue", "quarantined")


def prometheus_text(stats: Stats) -> bytes:
    """``stats`` in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(stats))
    return generate_latest(registry)


class _Once(Collector):
    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        yield from families(self._stats)


def families(stats: Stats) -> Iterable[Metric]:
    """All metric families of ``stats``."""
    daemon = stats["daemon"]
    yield InfoMetricFamily("omlxd_build", "The daemon", value={"version": daemon["version"], "boot": daemon["boot"]})
    yield GaugeMetricFamily("omlxd_uptime_seconds", "Since the daemon started", value=daemon["uptime"])
    yield GaugeMetricFamily("omlxd_warnings", "Warnings that omlxd status shows", value=len(stats["warnings"]))
    yield GaugeMetricFamily("omlxd_clients", "Connections", value=len(stats["clients"]))
    ram, ssd = stats["ram"], stats["ssd"]
    yield from _by_tier(ram, ssd)
    yield from _gauges("omlxd_ram", ram, RAM_GAUGES)
    if ssd is not None:
        yield from _gauges("omlxd_ssd", ssd, SSD_GAUGES)
        up = ssd["state"] == "ok"
        yield GaugeMetricFamily("omlxd_ssd_ok", "1 while the SSD tier reads and writes", value=float(up))
        yield CounterMetricFamily("omlxd_ssd_written_bytes", "Bytes written to the SSD", value=ssd["written_bytes"])
        yield CounterMetricFamily("omlxd_ssd_read_bytes", "Bytes read from the SSD", value=ssd["read_bytes"])
        yield GaugeMetricFamily(
            "omlxd_ssd_written_bytes_per_day", "Bytes written to the SSD in a day", value=ssd["written_per_day"]
        )
        if ssd["life_years"] is not None:
            yield GaugeMetricFamily("omlxd_ssd_life_years", "Years that the flash lasts so", value=ssd["life_years"])
    if (remote := stats.get("remote")) is not None:
        up = remote["state"] == "ok"
        yield GaugeMetricFamily("omlxd_remote_ok", "1 while the remote tier is read and written", value=float(up))
        yield from _gauges("omlxd_remote", remote, ("queue", "restoring", "link_bytes_per_second"))
        yield CounterMetricFamily("omlxd_remote_sent_bytes", "Bytes sent to it", value=remote["sent_bytes"])
        yield CounterMetricFamily(
            "omlxd_remote_fetched_bytes", "Payload fetched from it", value=remote["fetched_bytes"]
        )
    yield from _by_namespace(stats["namespaces"])
    yield from _evictions(stats["evictions"])
    yield from _daemon_counts(stats["counts"])
    for name, histogram in stats["histograms"].items():
        bounds = [*map(str, histogram["bounds"]), "+Inf"]
        buckets = list(zip(bounds, map(float, histogram["counts"]), strict=True))
        yield HistogramMetricFamily(
            f"omlxd_{name}", name.replace("_", " "), buckets=buckets, sum_value=histogram["sum"]
        )


def _by_tier(ram: RamStats, ssd: SsdStats | None) -> Iterable[Metric]:
    for field, unit, text in (
        ("limit", "_bytes", "What the tier may take"),
        ("used", "_bytes", "What the tier takes"),
        ("payload_bytes", "", "Payload of the blocks in the tier"),
        ("blocks", "", "Blocks in the tier"),
    ):
        family = GaugeMetricFamily(f"omlxd_tier_{field}{unit}", text, labels=["tier"])
        for name, tier in (("ram", ram), ("ssd", ssd)):
            if tier is not None:
                values: Mapping[str, Any] = tier
                family.add_metric([name], values[field])
        yield family


def _gauges(prefix: str, values: Mapping[str, Any], fields: Iterable[str]) -> Iterable[Metric]:
    for field in fields:
        unit = "_bytes" if field in ("mapped", "largest_free", "free", "min_free", "max_dirty") else ""
        text = f"The field {field} of omlxd status --json"
        yield GaugeMetricFamily(f"{prefix}_{field}{unit}", text, value=values[field])


def _by_namespace(namespaces: Iterable[NamespaceStats]) -> Iterable[Metric]:
    labels = ["model", "namespace"]
    resident = GaugeMetricFamily("omlxd_namespace_bytes", "Payload in a tier", labels=[*labels, "tier"])
    hits = CounterMetricFamily("omlxd_hits", "Blocks that engines got", labels=[*labels, "tier"])
    hit_bytes = CounterMetricFamily("omlxd_hit_bytes", "Payload bytes that engines got", labels=[*labels, "tier"])
    declined = CounterMetricFamily("omlxd_declined", "Blocks that were not taken", labels=[*labels, "reason"])
    simple = {
        key: CounterMetricFamily(f"omlxd_{name}", text, labels=labels) for key, (name, text) in SIMPLE_COUNTERS.items()
    }
    for row in namespaces:
        who = [row["model"], row["id"][:16]]
        resident.add_metric([*who, "ram"], row["ram_bytes"])
        resident.add_metric([*who, "ssd"], row["ssd_bytes"])
        for key, value in row["counts"].items():
            if key in simple:
                simple[key].add_metric(who, value)
            elif key.startswith("hits_"):
                hits.add_metric([*who, key.removeprefix("hits_")], value)
            elif key.startswith("hit_bytes_"):
                hit_bytes.add_metric([*who, key.removeprefix("hit_bytes_")], value)
            elif key.startswith("declined_"):
                declined.add_metric([*who, key.removeprefix("declined_")], value)
    yield from (resident, hits, hit_bytes, declined, *simple.values())


def _evictions(evictions: Mapping[str, int]) -> Iterable[Metric]:
    family = CounterMetricFamily("omlxd_evictions", "Blocks that left a tier", labels=["tier", "cause"])
    for name, value in evictions.items():
        tier, _, cause = name.partition(".")
        family.add_metric([tier, cause], value)
    yield family


def _daemon_counts(counts: Mapping[str, int]) -> Iterable[Metric]:
    family = CounterMetricFamily("omlxd_events", "Sums over all namespaces, and what belongs to none", labels=["event"])
    for name, value in sorted(counts.items()):
        family.add_metric([name], value)
    yield family


def host_and_port(address: str) -> tuple[str, int]:
    """Of an ``address`` that the configuration takes: "127.0.0.1:9464", "[::1]:9464"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class MetricsServer:
    """``GET /metrics`` on a loopback address."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats
        self._server: asyncio.Server | None = None
        self.address = ""

    async def listen(self, address: str) -> None:
        """Serve on ``address`` ("127.0.0.1:9464"), and nowhere else any more; "" is nowhere. Raises OSError."""
        if address == self.address:
            return
        await self.close()
        if address:
            host, port = host_and_port(address)
            self._server = await asyncio.start_server(self._answer, host, port, limit=MAX_REQUEST_BYTES, backlog=16)
            self.address = address
            log.info("metrics on http://%s/metrics", address)

    async def close(self) -> None:
        """Stop serving."""
        self.address = ""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                status, kind, body = self._respond(await reader.readuntil(b"\r\n\r\n"))
                head = (
                    f"HTTP/1.1 {status}",
                    f"Content-Type: {kind}",
                    f"Content-Length: {len(body)}",
                    "Connection: close",
                )
                writer.write("\r\n".join([*head, "", ""]).encode() + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError):
            pass  # whoever asked has gone, or asks nonsense: nobody to tell
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _respond(self, request: bytes) -> tuple[str, str, bytes]:
        method, _, rest = request.decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if not _is_local(request):
            return "403 Forbidden", "text/plain", b"only for this machine\n"
        if path != "/metrics":
            return "404 Not Found", "text/plain", b"there is /metrics\n"
        if method != "GET":
            return "405 Method Not Allowed", "text/plain", b"GET only\n"
        return "200 OK", CONTENT_TYPE_LATEST, prometheus_text(self._stats())


def _is_local(request: bytes) -> bool:
    """Was the server addressed as this machine? Keeps web pages from reading it through a name of their own."""
    for line in request.decode("latin-1").split("\r\n")[1:]:
        name, _, value = line.partition(":")
        if name.lower() == "host":
            host = value.strip().rpartition(":")[0] or value.strip()
            return host in ("127.0.0.1", "localhost", "[::1]")
    return False
