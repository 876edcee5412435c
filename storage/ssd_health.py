"""A look at the disk under the store: is it there, the same, writable, with room. Writer's thread."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import lmdb

from omlxd.storage.environment import Environment, trouble
from omlxd.storage.ssd_ballast import ballast_bytes, lay_ballast
from omlxd.storage.ssd_data_file import DATA_NAME
from omlxd.storage.ssd_errors import Damaged, DiskTrouble, SsdError
from omlxd.storage.ssd_load import Opened, other_bytes
from omlxd.storage.ssd_pages import BadFile
from omlxd.storage.ssd_plan import Health, State
from omlxd.storage.ssd_transaction import WriteTransaction

log = logging.getLogger(__name__)


def look(
    environment: Environment,
    state: State,
    limit: int,
    free_space: Callable[[Path], int],
    reopen: Callable[[bool], Opened],
) -> Health:
    """Find out how the disk is. ``reopen`` is called where the store is back after it was gone or read-only.

    Its argument says whether to check the structure first: a file that never left, and still could not be used.
    """
    path = environment.path
    try:
        if state == "gone" or not environment.is_in_place():
            return _find_again(environment, reopen)
        environment.check()
        if environment.readonly:
            if not _is_writable(path):
                return Health("read-only", "the disk is mounted read-only")
            return _find_again(environment, reopen)
        if state != "ok":
            with WriteTransaction(environment) as txn:  # does it take a write again?
                txn.put(environment.meta, b"tick", b"")
        environment.go_through()  # so that what another program did is found when idle, too
        synced = environment.durability == "interval"
        if synced:
            environment.sync()
        lay_ballast(path, ballast_bytes(limit))
        return Health(
            "ok",
            free_bytes=free_space(path),
            allocated_bytes=environment.allocated_bytes(),
            other_bytes=other_bytes(path),
            synced=synced,
        )
    except (DiskTrouble, Damaged, BadFile, OSError, lmdb.Error) as error:
        what = error if isinstance(error, DiskTrouble) else trouble(error)
        return Health(what.state, what.reason)


def _find_again(environment: Environment, reopen: Callable[[bool], Opened]) -> Health:
    """Open what is at the path now, unless that would start a store on a disk that is not the one it was on."""
    path = environment.path
    try:
        same_volume = os.stat(path).st_dev == environment.device
    except OSError as error:
        return Health("gone", f"{path}: {error.strerror}")
    if not same_volume and not (path / DATA_NAME).exists():
        return Health("gone", f"{path} is not the volume that the store was on, and has no store")
    try:
        return Health("ok", loaded=reopen(environment.is_in_place()))
    except (SsdError, OSError, lmdb.Error) as error:
        return Health("gone", str(error))


def _is_writable(path: Path) -> bool:
    return not os.statvfs(path).f_flag & os.ST_RDONLY
