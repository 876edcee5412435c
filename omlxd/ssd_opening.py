"""From the configuration to an open SSD tier, at the start or later, and why there is none."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from omlxd.config import Config
from omlxd.filesystems import filesystem_of
from omlxd.paths import PathError, mark_cache, private_dir
from omlxd.storage.sizes import format_size
from omlxd.storage.ssd import MIN_LIMIT, SsdError, SsdLocked, SsdTier
from omlxd.storage.ssd_data_file import DATA_NAME
from omlxd.volumes import KnownVolumes

log = logging.getLogger(__name__)


class NoSsd(Exception):
    """There can be no SSD tier now; the text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Opening:
    """An open tier, and the size of its volume in bytes."""

    tier: SsdTier
    volume: int


def open_ssd(config: Config, volumes: KnownVolumes) -> Opening | None:
    """Open the store as the configuration says; None where it is switched off. Blocking, on any thread.

    Raises NoSsd (the disk or its volume is not as it should be: it may be later), SsdLocked (another daemon has the
    store).
    """
    if config.ssd_is_off:
        return None
    path = Path(config.ssd.path).expanduser()
    try:
        return _open(config, path, volumes)
    except (SsdLocked, NoSsd):
        raise
    except (OSError, PathError, SsdError, ValueError) as error:
        raise NoSsd(f"the SSD tier could not be opened: {error}") from error


def limit_of(config: Config, path: Path) -> int:
    """The limit in bytes that the configuration gives the store in ``path``, an existing folder, on its volume."""
    volume = shutil.disk_usage(path)
    return config.ssd_bytes(volume.total, volume.free + size_on_disk(path))


def _open(config: Config, path: Path, volumes: KnownVolumes) -> Opening:
    volumes.check(path)
    private_dir(path)
    total = shutil.disk_usage(path).total
    limit = limit_of(config, path)
    if limit < MIN_LIMIT:
        raise NoSsd(
            f"the volume of {path} is too full for an SSD tier: [ssd] size = {config.ssd.size!r} comes to "
            f"{format_size(limit)}, and {format_size(MIN_LIMIT)} are the least; free some space, or set another size"
        )
    filesystem = filesystem_of(path)
    if filesystem.trouble and not config.ssd.any_filesystem:
        raise NoSsd(
            f"{path} is on a {filesystem.trouble} file system ({filesystem.kind}), where locks and maps "
            "can't be trusted: set [ssd] path to a local disk"
        )
    mark_cache(path)
    tier = SsdTier.open(
        path,
        limit=limit,
        policy=config.ssd.policy,
        min_free=config.min_free_bytes(total),
        durability=config.ssd.durability,
        codec=config.ssd.codec,
        clock=time.time,
        free_space=free_space,
    )
    volumes.remember(path)
    return Opening(tier, total)


def begin_stopped(config: Config) -> None:
    """Begin a store as a daemon that starts would, if there is none. Raises NoSsd, SsdLocked."""
    if (Path(config.ssd.path).expanduser() / DATA_NAME).exists():
        return
    opening = open_ssd(config, KnownVolumes())
    if opening is None:
        raise NoSsd("the SSD tier is switched off: set [ssd] size")
    opening.tier.close()


def open_stopped(config: Config) -> SsdTier:
    """Open the store of a daemon that does not run, with room for all that is in it: nothing leaves for the limit.

    Raises NoSsd (there is none, or the disk), SsdLocked.
    """
    path = Path(config.ssd.path).expanduser()
    if not (path / DATA_NAME).exists():
        raise NoSsd(f"there is no store in {path}")
    try:
        used = size_on_disk(path)
        return SsdTier.open(
            path,
            limit=max(MIN_LIMIT, limit_of(config, path), used + used // 8 + MIN_LIMIT),
            policy=config.ssd.policy,
            min_free=0,
            durability=config.ssd.durability,
            codec=config.ssd.codec,
            clock=time.time,
            free_space=free_space,
        )
    except OSError as error:
        raise NoSsd(f"the store in {path} could not be opened: {error}") from error


def announce_trimming(tier: SsdTier, models: Mapping[bytes, str]) -> None:
    """Log what will leave for the limit, before anything does. ``models``: names of namespaces by their id."""
    if not tier.over_limit_bytes:
        return
    forecast = tier.forecast()
    parts = ", ".join(
        f"{format_size(nbytes)} of {models.get(space) or space.hex()[:12]}"
        for space, nbytes in sorted(forecast.by_namespace.items(), key=lambda item: -item[1])
    )
    log.warning(
        "the store takes %s and its limit is %s: %d blocks (%s) leave, step by step; %s go back to the file system",
        format_size(tier.used_bytes),
        format_size(tier.limit),
        forecast.blocks,
        parts or "none can",
        format_size(forecast.returned_bytes),
    )


def free_space(path: Path) -> int:
    """Bytes free on the volume of ``path``."""
    return shutil.disk_usage(path).free


def size_on_disk(path: Path) -> int:
    """Bytes that the files directly in ``path`` take on the disk."""
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(path) if entry.is_file(follow_symlinks=False))
