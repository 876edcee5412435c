"""What a path lies on, and how much of the disk it takes.

LMDB maps its file: over a network or FUSE that means stalls, lost locks, SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

NETWORK = frozenset(
    {
        "nfs",
        "nfs3",
        "nfs4",
        "cifs",
        "smb",
        "smb2",
        "smb3",
        "smbfs",
        "afpfs",
        "webdav",
        "davfs",
        "ncpfs",
        "9p",
        "ceph",
        "glusterfs",
        "lustre",
        "afs",
        "beegfs",
        "gpfs",
        "ocfs2",
        "gfs2",
        "vboxsf",
        "prl_fs",
        "vmhgfs",
    }
)
FUSE = ("fuse", "macfuse", "osxfuse")


class Mount(Protocol):
    """The part of ``psutil.disk_partitions(all=True)`` that is read."""

    @property
    def mountpoint(self) -> str: ...  # noqa: D102
    @property
    def fstype(self) -> str: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Filesystem:
    """The file system under a path."""

    mountpoint: str
    kind: str

    @property
    def trouble(self) -> str | None:
        """``"network"`` or ``"FUSE"`` where a store should not be; None for a local file system."""
        kind = self.kind.lower()
        if kind in NETWORK or kind.removeprefix("fuse.") in NETWORK:
            return "network"
        return "FUSE" if kind.startswith(FUSE) else None


def filesystem_of(path: Path, mounts: Iterable[Mount] | None = None) -> Filesystem:
    """The file system that ``path`` (or the nearest folder above it that exists) is on."""
    real = os.path.realpath(path)
    found = Filesystem("/", "unknown")
    for mount in psutil.disk_partitions(all=True) if mounts is None else mounts:
        point = mount.mountpoint
        below = point == "/" or real == point or real.startswith(point.rstrip("/") + "/")
        # Of equal mount points the later one covers the earlier.
        if below and len(point) >= len(found.mountpoint):
            found = Filesystem(point, mount.fstype)
    return found


def disk_bytes(folder: Path) -> int:
    """What the files in ``folder`` take on the disk, as ``du`` counts; 0 where there is none."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue  # it went while we looked
    return total
