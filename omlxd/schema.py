"""The shape of what ``stats`` answers: the one source for ``omlxd status``, ``omlxd top``, ``--json`` and the metrics.

Sizes are bytes, times are seconds, rates are per second. ``SCHEMA`` grows when a field changes its meaning or goes; new
fields may come at any time.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict

SCHEMA = 1


class DaemonStats(TypedDict):
    """The process."""

    version: str
    pid: int
    boot: str
    state: str
    """``serving`` or ``draining``."""
    uptime: float
    socket: str
    config_file: str
    log_level: str
    config_problem: str | None
    """Why the file as it is now is not used; None when it is."""
    needs_restart: list[str]
    """Settings whose new value waits for a restart."""


class RamStats(TypedDict):
    """The tier in shared memory."""

    limit: int
    used: int
    mapped: int
    """Bytes of the segments, used or not."""
    blocks: int
    payload_bytes: int
    pinned_bytes: int
    """What cannot be evicted now: leased, being written, dirty, pinned by an operator."""
    leases: int
    leased_bytes: int
    reservations: int
    reserved_bytes: int
    policy: str
    largest_free: int


class SsdStats(TypedDict):
    """The tier on the SSD."""

    state: str
    """``ok``, ``read-only``, ``full`` or ``gone``."""
    path: str
    limit: int
    used: int
    """What the store takes on the disk, everything counted: what ``du`` says."""
    blocks: int
    payload_bytes: int
    stored_bytes: int
    policy: str
    mode: str
    codec: str
    free: int
    """Free bytes on the volume."""
    min_free: int
    dirty_blocks: int
    dirty_bytes: int
    max_dirty: int
    queue: int
    """Restores that wait or run."""
    quarantined: int
    written_bytes: int
    """Since the daemon started."""
    written_per_day: float
    read_bytes: int
    life_years: float | None
    """How long the volume's flash lasts at this rate (see ``omlxd.wear``); None when next to nothing is written."""


class RemoteStats(TypedDict):
    """The tier that is shared with other machines."""

    state: str
    """``ok``, ``connecting``, ``slow``, ``gone``, ``refused``; ``read-only`` and ``full`` where only writing does not work."""
    reason: str
    """Why it is so, in words; empty when all is well."""
    url: str
    """Without user and password."""
    sealed: bool
    nodes: list[dict[str, object]]
    known_blocks: int
    """Keys whose presence or absence is remembered."""
    queue: int
    """Blocks that wait to be sent."""
    restoring: int
    link_bytes_per_second: float
    fetched_bytes: int
    sent_bytes: int
    counts: dict[str, int]


class RateStats(TypedDict):
    """Growth over one window."""

    hits_ram: float
    hits_ssd: float
    hits_remote: NotRequired[float]
    misses: float
    hit_percent: float | None
    """Blocks loaded of blocks asked for; None when nothing was asked."""
    stored_bytes: float
    spilled_bytes: float
    restored_bytes: float
    loaded_bytes: float


class NamespaceStats(TypedDict):
    """One model in one configuration."""

    id: str
    model: str
    fingerprint: str
    block_tokens: int
    retired: bool
    watched: bool
    """Is the folder of its weights watched?"""
    ram_blocks: int
    ram_bytes: int
    ssd_blocks: int
    ssd_bytes: int
    clients: NotRequired[int]
    """Connections that have registered it."""
    counts: dict[str, int]
    """hits_ram, hits_ssd, misses, stored, declined_<reason>, ... since the daemon started."""


class ClientStats(TypedDict):
    """One connection."""

    id: int
    name: str
    pid: int | None
    uid: int | None
    connected: float
    leases: int
    leased_bytes: int
    oldest_lease: float | None
    reserved_bytes: int
    requests: int


class Histogram(TypedDict):
    """Counts of observations at or under each bound (cumulative), as Prometheus wants them."""

    bounds: list[float]
    counts: list[int]
    """One more than bounds: the last is the count of all."""
    sum: float


class Stats(TypedDict):
    """Everything."""

    schema: int
    daemon: DaemonStats
    health: str
    """``ok`` or ``trouble``."""
    warnings: list[str]
    ram: RamStats
    ssd: SsdStats | None
    rates: dict[str, RateStats]
    """By window: ``1m``, ``5m``, ``15m``."""
    counts: dict[str, int]
    """Sums over the namespaces, and what has none."""
    evictions: dict[str, int]
    """By ``tier.cause``: ``ram.evicted``, ``ssd.limit``, ..."""
    histograms: dict[str, Histogram]
    """``load_seconds``, ``restore_seconds``, ``eviction_age_seconds``, ..."""
    namespaces: list[NamespaceStats]
    clients: list[ClientStats]
    remote: NotRequired[RemoteStats | None]
    """None while it is off."""
    pins: NotRequired[list[dict[str, object]]]
