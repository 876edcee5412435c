"""What the inspecting commands show, as functions of what the daemon answers. Everything fits 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from omlxd.counting import counted
from omlxd.schema import ClientStats, NamespaceStats, RamStats, RateStats, RemoteStats, SsdStats, Stats
from omlxd.storage.sizes import format_size

if TYPE_CHECKING:
    from omlxd.doctor import Finding

BAR = 16
MODEL_WIDTH = 22
MOST_ROWS = 12
"""Namespaces and clients that are shown; the rest is summed up in a line (`--all` shows them)."""
WEAR_SECONDS = 3_600
"""What was written in a shorter time says nothing about a day."""
OWN = "omlxd "
"""How the names of this program's own connections begin."""


def duration(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min``, ``5 h 12 min``, ``4 d 2 h``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def bar(used: int, limit: int, width: int = BAR) -> Text:
    """How full; red from nine tenths."""
    share = min(1.0, used / limit) if limit > 0 else 0.0
    full = round(share * width)
    return Text("█" * full, style="red" if share >= 0.9 else "green") + Text("░" * (width - full), style="dim")


def percent(part: float, whole: float) -> str:
    """A share of a whole, or ``-`` where there is no whole."""
    return f"{100 * part / whole:.0f} %" if whole > 0 else "-"


def middle(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters; its middle goes, since names of models differ at their ends."""
    if len(text) <= width:
        return text
    tail = (width - 1) * 2 // 3
    return f"{text[: width - 1 - tail]}…{text[-tail:]}"


def plain_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Columns without lines; those named in ``right`` are numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True, overflow="ellipsis")
    return table


def columns_of(rows: Sequence[Sequence[str]]) -> str:
    """Lines with aligned columns, as wide as they are: for what must not be broken."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def status(stats: Stats, *, service: str = "", everything: bool = False, asking: int | None = None) -> RenderableType:
    """`omlxd status`; ``asking`` is the pid of the command itself, which is not one of the clients."""
    most = None if everything else MOST_ROWS
    parts: list[RenderableType] = [
        header(stats, service),
        "",
        tiers(stats["ram"], stats["ssd"], stats.get("remote"), uptime=stats["daemon"]["uptime"]),
        "",
        rates(stats["rates"]),
    ]
    if stats["namespaces"]:
        parts += ["", namespaces(stats["namespaces"], most)]
    if held := stats.get("pins"):
        parts += ["", pins(held, most)]
    others = [row for row in stats["clients"] if not (row["pid"] == asking and row["name"].startswith(OWN))]
    if others:
        parts += ["", clients(others, most)]
    if waiting := stats["daemon"]["needs_restart"]:
        text = f"! changed in the file, and in effect after a restart: {', '.join(waiting)}"
        parts += ["", Text(text, style="yellow")]
    if stats["warnings"]:
        parts += ["", *(Text(f"! {warning}", style="yellow") for warning in stats["warnings"])]
    return Group(*parts)


def header(stats: Stats, service: str = "") -> RenderableType:
    """Who answers, and is all well."""
    daemon = stats["daemon"]
    well = stats["health"] == "ok"
    first = Text(
        f"omlxd {daemon['version']}, pid {daemon['pid']}, {daemon['state']} for {duration(daemon['uptime'])}: "
    )
    first.append("all is well" if well else "see the warnings below", style="green" if well else "yellow bold")
    lines = [first, Text(f"socket {daemon['socket']}", style="dim", overflow="fold")]
    if service:
        lines.append(Text(service, style="dim"))
    return Group(*lines)


def tiers(ram: RamStats, ssd: SsdStats | None, remote: RemoteStats | None = None, *, uptime: float) -> RenderableType:
    """All tiers: how full, and what is going on in them."""
    table = plain_table(
        "tier", "", "full", "used", "limit", "blocks", "policy", right=("full", "used", "limit", "blocks")
    )
    for name, tier in (("RAM", ram), ("SSD", ssd)):
        if tier is None or not tier["limit"]:
            table.add_row(name, Text("off", style="dim"), "", "", "", "", "")
            continue
        table.add_row(
            name,
            bar(tier["used"], tier["limit"]),
            percent(tier["used"], tier["limit"]),
            format_size(tier["used"]),
            format_size(tier["limit"]),
            f"{tier['blocks']:,}",
            tier["policy"],
        )
    details = [
        f"RAM: {format_size(ram['pinned_bytes'])} in use or not yet written to the SSD, and cannot leave now",
        f"RAM: {format_size(ram['leased_bytes'])} in {counted(ram['leases'], 'lease')}, "
        f"{format_size(ram['reserved_bytes'])} being stored",
    ]
    if ssd is not None:
        details += [
            f"SSD: {ssd['state']}, {ssd['mode']}, codec {ssd['codec']}; {format_size(ssd['dirty_bytes'])} dirty of "
            f"{format_size(ssd['max_dirty'])}, {counted(ssd['queue'], 'restore')} now",
            f"SSD: {format_size(ssd['free'])} free on the volume, {format_size(ssd['min_free'])} of it are left alone",
        ]
        if uptime >= WEAR_SECONDS:
            details.append(f"SSD: {format_size(int(ssd['written_per_day']))} written a day{_life(ssd['life_years'])}")
        details.append(f"SSD: {ssd['path']}")
    if remote is not None:
        details += remote_lines(remote)
    return Group(table, *(Text(line, style="dim", overflow="fold") for line in details))


def remote_lines(remote: RemoteStats) -> list[str]:
    """The tier that is shared with other machines."""
    sealed = "sealed" if remote["sealed"] else "not sealed"
    return [
        f"remote: {remote['state']}, {remote['url']}, {sealed}; {counted(remote['queue'], 'block')} to be sent, "
        f"{counted(remote['restoring'], 'restore')} now",
        f"        {format_size(remote['sent_bytes'])} sent, {format_size(remote['fetched_bytes'])} fetched, "
        f"{format_size(int(remote['link_bytes_per_second']))}/s lately",
    ]


def _life(years: float | None) -> str:
    if years is None:
        return ""
    return (
        f": the drive lasts {'over 50' if years > 50 else f'about {years:.0f}'} years"
        if years >= 1
        else ": too much for the drive"
    )


def rates(windows: Mapping[str, RateStats]) -> Table:
    """Hit rates and throughput over the last minutes."""
    table = plain_table("last", *windows, right=tuple(windows))
    values = list(windows.values())
    table.add_row("hit rate", *(f"{v['hit_percent']:.0f} %" if v["hit_percent"] is not None else "-" for v in values))
    table.add_row("blocks from RAM", *(f"{v['hits_ram']:.1f}/s" for v in values))
    table.add_row("blocks from SSD", *(f"{v['hits_ssd']:.1f}/s" for v in values))
    if any(v.get("hits_remote") for v in values):
        table.add_row("blocks from afar", *(f"{v.get('hits_remote', 0.0):.1f}/s" for v in values))
    table.add_row("stored", *(f"{format_size(int(v['stored_bytes']))}/s" for v in values))
    table.add_row("spilled", *(f"{format_size(int(v['spilled_bytes']))}/s" for v in values))
    table.add_row("restored", *(f"{format_size(int(v['restored_bytes']))}/s" for v in values))
    return table


def hit_share(counts: Mapping[str, int]) -> str:
    """Blocks loaded of blocks asked for."""
    hits = counts.get("hits_ram", 0) + counts.get("hits_ssd", 0) + counts.get("hits_remote", 0)
    return percent(hits, hits + counts.get("misses", 0))


def namespaces(rows: Sequence[NamespaceStats], most: int | None = None) -> RenderableType:
    """One line a namespace, the biggest first; those that are empty and that nobody uses are only counted."""
    used = [row for row in rows if most is None or row["ram_blocks"] or row["ssd_blocks"] or row.get("clients")]
    ordered = sorted(used, key=lambda row: -(row["ram_bytes"] + row["ssd_bytes"]))
    shown = ordered[:most]
    table = plain_table("namespace", "model", "RAM", "", "SSD", "", "hits", right=("RAM", "SSD", "hits", ""))
    for row in shown:
        table.add_row(
            row["id"][:8],
            middle(row["model"], MODEL_WIDTH),
            f"{row['ram_blocks']:,}",
            format_size(row["ram_bytes"]),
            f"{row['ssd_blocks']:,}",
            format_size(row["ssd_bytes"]),
            "retired" if row["retired"] else hit_share(row["counts"]),
        )
    idle = len(rows) - len(used)
    empty = [Text(f"{counted(idle, 'namespace')} without blocks and clients (--all)", style="dim")] if idle else []
    return Group(*([table] if shown else []), *_rest(len(ordered) - len(shown), "namespace"), *empty)


def clients(rows: Sequence[ClientStats], most: int | None = None) -> RenderableType:
    """One line a connection, those that hold most first."""
    ordered = sorted(rows, key=lambda row: -(row["leased_bytes"] + row["reserved_bytes"]))
    shown = ordered[:most]
    table = plain_table(
        "client",
        "pid",
        "connected",
        "leases",
        "leased",
        "writing",
        right=("pid", "connected", "leases", "leased", "writing"),
    )
    table.columns[0].max_width = 28
    for row in shown:
        table.add_row(
            row["name"],
            str(row["pid"] or "-"),
            duration(row["connected"]),
            str(row["leases"]),
            format_size(row["leased_bytes"]),
            format_size(row["reserved_bytes"]),
        )
    return Group(table, *_rest(len(ordered) - len(shown), "client"))


def _rest(count: int, what: str) -> list[Text]:
    return [Text(f"and {count} more {what if count == 1 else what + 's'} (--all)", style="dim")] if count > 0 else []


def pins(rows: Sequence[Mapping[str, object]], most: int | None = None) -> RenderableType:
    """One line a pin, the one that ends first on top."""
    ordered = sorted(rows, key=lambda row: _seconds_left(row))
    shown = ordered[:most]
    table = plain_table("pinned up to", "blocks", "bytes", "ends in", right=("blocks", "bytes", "ends in"))
    for row in shown:
        key, blocks, size = row["key"], row["blocks"], row["bytes"]
        assert isinstance(key, bytes)
        assert isinstance(blocks, int)
        assert isinstance(size, int)
        table.add_row(key.hex()[:16], f"{blocks:,}", format_size(size), duration(_seconds_left(row)))
    return Group(table, *_rest(len(ordered) - len(shown), "pin"))


def _seconds_left(row: Mapping[str, object]) -> float:
    left = row["seconds_left"]
    assert isinstance(left, int | float)
    return left


def leases(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Who holds what, the oldest first."""
    if not rows:
        return Text("no leases")
    table = plain_table(
        "lease", "client", "pid", "blocks", "bytes", "held for", right=("lease", "pid", "blocks", "bytes")
    )
    for row in sorted(rows, key=lambda row: -float(row["seconds"])):
        table.add_row(
            str(row["lease"]),
            middle(str(row["client"]), 28),
            str(row["pid"] or "-"),
            f"{row['blocks']:,}",
            format_size(int(row["bytes"])),
            duration(float(row["seconds"])),
        )
    return table


def event_line(event: Mapping[str, Any]) -> str:
    """``stored 3fa9c1… ns 01ab… ram 2.0 MiB position 12``."""
    parts = [str(event["event"])]
    if event.get("key"):
        parts.append(bytes(event["key"]).hex()[:16])
    parts.append(f"ns {bytes(event['namespace']).hex()[:8]}")
    parts += [str(event[name]) for name in ("tier", "cause") if event.get(name)]
    if "bytes" in event:
        parts.append(format_size(int(event["bytes"])))
    if "position" in event:
        parts.append(f"position {event['position']}")
    return " ".join(parts)


def blocks(rows: Sequence[Mapping[str, Any]], models: Mapping[bytes, str]) -> Table:
    """One line a block."""
    table = plain_table("block", "pos", "size", "on SSD", "where", "model", right=("pos", "size", "on SSD"))
    for row in rows:
        table.add_row(
            bytes(row["key"]).hex()[:16],
            str(row["position"]),
            format_size(int(row["bytes"])),
            format_size(int(row["stored_bytes"])) if "stored_bytes" in row else "-",
            where(row),
            middle(models.get(row["namespace"], bytes(row["namespace"]).hex()[:8]), 24),
        )
    return table


def where(row: Mapping[str, Any]) -> str:
    """``RAM``, ``SSD``, ``RAM+SSD``, with ``dirty``, ``pinned`` and how many leases read it."""
    place = "+".join(name for name, there in (("RAM", row.get("ram")), ("SSD", row.get("ssd"))) if there)
    marks = ["dirty"] if row.get("dirty") else []
    if row.get("pins"):
        marks.append("pinned")
    if int(row.get("ref_cnt", 0)) < 0:
        marks.append("arriving")
    elif engines := engines_reading(row):
        marks.append(f"{engines} read")
    return " ".join([place, *marks])


def engines_reading(row: Mapping[str, Any]) -> int:
    """Leases of engines on a block: its readers but for the writer of a dirty one, and pins."""
    return max(0, int(row.get("ref_cnt", 0)) - int(bool(row.get("dirty"))) - int(row.get("pins", 0)))


def block(row: Mapping[str, Any], model: str) -> str:
    """Everything about one block, each thing in a line that is not broken: keys are copied from here."""
    key = bytes(row["key"])
    lines = [
        ("key", key.hex()),
        ("KV group", str(int.from_bytes(key[32:], "big"))),
        ("model", model or "not known"),
        ("namespace", bytes(row["namespace"]).hex()),
        ("position", f"{row['position']}" + ("  (head of its chain)" if row["parent"] is None else "")),
        *([("parent", bytes(row["parent"]).hex())] if row["parent"] is not None else []),
        ("payload", f"{format_size(int(row['bytes']))} ({row['bytes']:,} bytes)"),
        ("where", where(row)),
    ]
    for name, title in (
        ("stored_bytes", "bytes on SSD"),
        ("codec", "codec"),
        ("stored_at", "stored"),
        ("chunk_id", "slot"),
    ):
        if row.get(name) is not None:
            lines.append((title, f"{row[name]:,}" if name == "stored_bytes" else str(row[name])))
    return columns_of(lines)


def findings(found: Sequence[Finding]) -> Table:
    """`omlxd doctor`: a line a check, with what to do under it."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    styles = {"ok": "green", "note": "yellow", "wrong": "red bold"}
    for one in found:
        table.add_row(Text(str(one.verdict), style=styles[str(one.verdict)]), one.check, one.found)
        if one.remedy:
            table.add_row("", "", Text(f"-> {one.remedy}", style="dim"))
    return table
