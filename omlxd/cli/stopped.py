"""What can be said without a daemon: the store as it lies on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from rich.console import Group, RenderableType
from rich.text import Text

from omlxd.config import Config
from omlxd.filesystems import disk_bytes
from omlxd.storage.sizes import format_size


class Stopped(TypedDict):
    """`omlxd status --json` without a daemon."""

    running: bool
    why: str
    socket: str
    store: str
    store_exists: bool
    store_bytes: int


def stopped_status(config: Config, socket: Path, why: str) -> Stopped:
    """Look at the store of a daemon that does not run; nothing is changed."""
    store = Path(config.ssd.path).expanduser()
    return {
        "running": False,
        "why": why,
        "socket": str(socket),
        "store": str(store),
        "store_exists": store.is_dir(),
        "store_bytes": disk_bytes(store),
    }


def stopped_view(stopped: Stopped, service: str) -> RenderableType:
    """For people."""
    lines = [Text(stopped["why"], style="yellow", overflow="fold"), Text(service, style="dim")]
    if stopped["store_exists"]:
        lines.append(
            Text(f"the store in {stopped['store']} takes {format_size(stopped['store_bytes'])}", overflow="fold")
        )
    else:
        lines.append(Text(f"there is no store in {stopped['store']} yet", overflow="fold"))
    return Group(*lines)
