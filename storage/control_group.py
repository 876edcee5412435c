"""How much memory the control group of this process leaves it, on Linux: a container, or a service with a limit, has less
than the machine has.

Files of both versions of the interface are read: ``memory.max`` and ``memory.current`` of the one hierarchy, or
``memory.limit_in_bytes`` and ``memory.usage_in_bytes`` of the memory controller. The limits of all groups above hold too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MEMBERSHIP = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


def within(total: int, available: int, *, membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> tuple[int, int]:
    """``total`` and ``available`` bytes of the machine, or less where this process may not have all of it."""
    for limit, used in _limits(membership, mount):
        if limit < total:
            total = limit
        available = min(available, max(0, limit - used))
    return total, available


def _limits(membership: Path, mount: Path) -> Iterator[tuple[int, int]]:
    """Limit and use (what can be had back without swapping left out) of each group that this process is in, in bytes."""
    for folder, files in _groups(membership, mount):
        limit = _number(folder / files[0])
        used = _number(folder / files[1])
        if limit is not None and used is not None:
            yield limit, max(0, used - _inactive(folder, files[2]))


def _groups(membership: Path, mount: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # another system
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            top, files = mount, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, files = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = top / path.lstrip("/")
        if ".." in folder.parts or not folder.is_dir():  # a container that sees its own group only, as the top
            folder = top
        while True:
            yield folder, files
            if folder == top:
                break
            folder = folder.parent


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def _inactive(folder: Path, name: str) -> int:
    """Bytes of files that the system has read and can forget."""
    try:
        for line in (folder / "memory.stat").read_text().splitlines():
            what, _, count = line.partition(" ")
            if what == name:
                return int(count)
    except (OSError, ValueError):
        pass
    return 0
