"""What can be said without a daemon: the store as it lies on the disk. Nothing is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from rich.console import Group, RenderableType
from rich.text import Text

from omlxd.cli.context import Exit, fail, hint
from omlxd.cli.views import middle, plain_table
from omlxd.filesystems import disk_bytes
from omlxd.protocol import Message
from omlxd.storage.sizes import format_size

if TYPE_CHECKING:
    from omlxd.config import Config
    from omlxd.storage.ssd_look import Look

MODEL_WIDTH = 40


class StoppedNamespace(TypedDict):
    """One namespace on the disk."""

    id: str
    model: str
    retired: bool
    ssd_blocks: int
    ssd_bytes: int


class Stopped(TypedDict):
    """`omlxd status --json` without a daemon."""

    running: bool
    why: str
    socket: str
    store: str
    store_exists: bool
    store_bytes: int
    problem: str | None
    """Why the store could not be read; None when it could, or when there is none."""
    blocks: int
    payload_bytes: int
    namespaces: list[StoppedNamespace]


@contextmanager
def the_store(config: Config, why: str) -> Iterator[Look]:
    """The store of the daemon that does not run; ``why`` it is known not to. Ends the command when it can't be read."""
    from omlxd.storage.ssd_errors import SsdError
    from omlxd.storage.ssd_look import look_at

    path = Path(config.ssd.path).expanduser()
    try:
        with look_at(path) as look:
            hint(f"{why}; this is the store as it lies on the disk")
            yield look
    except FileNotFoundError as error:
        fail(f"{why}; and {error}", Exit.NO_DAEMON)
    except (SsdError, OSError) as error:
        fail(f"{why}; and its store cannot be read: {error}", Exit.NO_DAEMON)


def stopped_listing(look: Look, *, namespace: str = "", tier: str = "any", prefix: str = "", limit: int) -> Message:
    """As the daemon's answer to ``list``."""
    models = {space.id: str(space.descriptor.get("model", "")) for space in look.spaces}
    wanted = {id_ for id_, model in models.items() if model == namespace or id_.hex().startswith(namespace.lower())}
    if namespace and not wanted:
        known = ", ".join(sorted(set(models.values()))) or "none"
        fail(f"no namespace is named {namespace!r}; known models: {known}", Exit.NOT_FOUND)
    found = [
        entry
        for entry in (look.entries if tier != "ram" else [])
        if entry.key.hex().startswith(prefix.lower()) and (not namespace or entry.namespace in wanted)
    ]
    rows: list[dict[str, Any]] = [
        {
            "key": entry.key,
            "namespace": entry.namespace,
            "bytes": entry.nbytes,
            "parent": entry.parent,
            "position": entry.position,
            "ram": False,
            "ssd": True,
            "stored_bytes": entry.stored_bytes,
        }
        for entry in found[:limit]
    ]
    return {"blocks": rows, "total": len(found), "models": models}


def stopped_status(config: Config, socket: Path, why: str) -> Stopped:
    """Look at the store of a daemon that does not run."""
    from omlxd.storage.ssd_errors import SsdError
    from omlxd.storage.ssd_look import look_at

    store = Path(config.ssd.path).expanduser()
    stopped: Stopped = {
        "running": False,
        "why": why,
        "socket": str(socket),
        "store": str(store),
        "store_exists": store.is_dir(),
        "store_bytes": disk_bytes(store),
        "problem": None,
        "blocks": 0,
        "payload_bytes": 0,
        "namespaces": [],
    }
    try:
        with look_at(store) as look:
            blocks = Counter(entry.namespace for entry in look.entries)
            payload: Counter[bytes] = Counter()
            for entry in look.entries:
                payload[entry.namespace] += entry.nbytes
            stopped["blocks"], stopped["payload_bytes"] = blocks.total(), payload.total()
            stopped["namespaces"] = [
                {
                    "id": space.id.hex(),
                    "model": str(space.descriptor.get("model", "")),
                    "retired": bool(space.descriptor.get("retired")),
                    "ssd_blocks": blocks[space.id],
                    "ssd_bytes": payload[space.id],
                }
                for space in look.spaces
            ]
    except FileNotFoundError:
        pass
    except (SsdError, OSError) as error:
        stopped["problem"] = str(error)
    return stopped


def stopped_view(stopped: Stopped, service: str) -> RenderableType:
    """For people."""
    lines: list[RenderableType] = [Text(stopped["why"], style="yellow", overflow="fold"), Text(service, style="dim")]
    if not stopped["store_exists"]:
        lines.append(Text(f"there is no store in {stopped['store']} yet", overflow="fold"))
        return Group(*lines)
    size = format_size(stopped["store_bytes"])
    lines.append(Text(f"the store in {stopped['store']} takes {size}", overflow="fold"))
    if stopped["problem"]:
        lines.append(Text(stopped["problem"], style="yellow", overflow="fold"))
    if stopped["namespaces"]:
        table = plain_table("namespace", "model", "blocks", "payload", right=("blocks", "payload"))
        for row in sorted(stopped["namespaces"], key=lambda row: -row["ssd_bytes"]):
            model = middle(row["model"], MODEL_WIDTH) + (" (retired)" if row["retired"] else "")
            table.add_row(row["id"][:8], model, f"{row['ssd_blocks']:,}", format_size(row["ssd_bytes"]))
        lines += ["", table]
    return Group(*lines)
