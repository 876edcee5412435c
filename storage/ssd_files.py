"""What lies in a store's folder, and what is not accepted in its place."""

from __future__ import annotations

import stat
from pathlib import Path

from omlxd.storage.environment import COPY_NAME
from omlxd.storage.ssd_ballast import BALLAST_NAME
from omlxd.storage.ssd_data_file import DATA_NAME
from omlxd.storage.ssd_errors import SsdError
from omlxd.storage.ssd_lock import LOCK_NAME

ASIDE_NAME = "set-aside"
TAG_NAME = "CACHEDIR.TAG"
_FILES = (DATA_NAME, "lock.mdb", LOCK_NAME, BALLAST_NAME, TAG_NAME)
_FOLDERS = (ASIDE_NAME, COPY_NAME)


def refuse_strangers(path: Path) -> None:
    """Raise ``SsdError`` where one of the store's own names is a link, or a folder where a file is due, or the other way.

    A link would have another file written to, or made, wherever it leads. A ``data.mdb`` that is no file is
    left to ``open_store``, which moves it aside.
    """
    for name in (*_FILES, *_FOLDERS):
        found = path / name
        try:
            mode = found.lstat().st_mode
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(mode):
            raise SsdError(
                f"{found} is a symbolic link, and a store's files are not looked for elsewhere: remove it, or set "
                "[ssd] path to the folder where the store is"
            )
        if name in _FOLDERS and not stat.S_ISDIR(mode):
            raise SsdError(f"{found} is not a folder, and the store needs that name: move it away")
        if name in _FILES and name != DATA_NAME and not stat.S_ISREG(mode):
            raise SsdError(f"{found} is not a file, and the store needs that name: move it away")
