"""The data file before LMDB gets to see it: is it there, a file, in order, and as long as it says?"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from omlxd.storage.ssd_errors import StoreBroken
from omlxd.storage.ssd_pages import BadFile, read_header
from omlxd.storage.ssd_structure import check_structure

DATA_NAME = "data.mdb"


def open_data(path: Path, *, readonly: bool) -> int:
    """A descriptor of the store's data file. Raises ``StoreBroken`` for a folder, ``OSError`` (also for a link)."""
    data = path / DATA_NAME
    flags = os.O_RDONLY if readonly else os.O_RDWR
    try:
        return os.open(data, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except IsADirectoryError as error:
        raise StoreBroken(path, f"{data} is not a file") from error


def make_ready(path: Path, map_bytes: int, *, readonly: bool, thorough: bool) -> int:
    """Make sure that LMDB can follow what is in the file, if there is one.

    Returns how many bytes the map must have: ``map_bytes``, or more for a longer file. Raises ``StoreBroken``, ``OSError``.
    """
    try:
        descriptor = open_data(path, readonly=readonly)
    except FileNotFoundError:
        return map_bytes
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise StoreBroken(path, f"{path / DATA_NAME} is not a file")
        if not status.st_size:
            return map_bytes
        header = read_header(descriptor)
        try:
            check_structure(descriptor, header, thorough=thorough)
        except BadFile as error:
            raise BadFile(f"its structure is damaged: {error}") from error
        if status.st_size < header.needed_bytes and not readonly:
            # All that is in use is there: a kill came between a commit and ``Environment._lengthen``.
            os.ftruncate(descriptor, header.needed_bytes)
    except BadFile as error:
        raise StoreBroken(path, str(error)) from error
    finally:
        os.close(descriptor)
    return max(map_bytes, header.needed_bytes)
