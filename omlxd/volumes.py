"""Which volume a store is on, remembered from one start to the next.

A path below a mount point is there without its volume, too: as an empty folder of the system disk. A store that began
anew there would fill the wrong disk, and its blocks would be hidden when the volume comes. Two rules prevent that:

1. A store that was on a volume of its own is looked for on a volume mounted at the same place. Mount points are
   remembered by path in ``volumes.json``, since device numbers change from boot to boot.
2. At most two folders are made for a store (``omlxd/store``), unless it is under the home directory: where more of the
   path is missing, what is missing is the volume.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from omlxd.filesystems import Filesystem, filesystem_of
from omlxd.paths import PathError, state_path
from omlxd.storage.ssd_data_file import DATA_NAME

log = logging.getLogger(__name__)

MOST_NEW_FOLDERS = 2
MOST_REMEMBERED = 100


class KnownVolumes:
    """The file ``volumes.json``: mount points by store path, of stores that are not on the home directory's volume."""

    def __init__(
        self,
        file: Path | None = None,
        *,
        home: Path | None = None,
        filesystem: Callable[[Path], Filesystem] = filesystem_of,
    ) -> None:
        """``file``: where it is kept (default: in the user's state directory)."""
        self.file = file if file is not None else state_path() / "volumes.json"
        self._home = home if home is not None else Path.home()
        self._filesystem = filesystem

    def check(self, store: Path) -> None:
        """Raise PathError where the folder ``store`` would be made, or a store begun, on a volume that is not meant."""
        if (store / DATA_NAME).exists():
            return
        expected = self._read().get(str(store))
        if expected is not None and self._filesystem(store).mountpoint != expected:
            raise PathError(
                f"the volume of {store} is not mounted at {expected}, where it was: mount it, or, to begin a new store "
                f"without it, remove {self.file}"
            )
        missing = _missing_folders(store)
        if missing > MOST_NEW_FOLDERS and not store.is_relative_to(self._home):
            raise PathError(
                f"{missing} folders of the path {store} are missing, as if its volume were not mounted: mount it, or "
                f"make {store.parent} yourself"
            )

    def remember(self, store: Path) -> None:
        """A store is in use at ``store``. Best effort: that it can't be written down is no reason not to use it."""
        known = self._read()
        mountpoint = self._filesystem(store).mountpoint
        wanted = None if mountpoint == self._filesystem(self._home).mountpoint else mountpoint
        if known.get(str(store)) == wanted:
            return
        known.pop(str(store), None)
        if wanted is not None:
            known[str(store)] = wanted
        newest = dict(list(known.items())[-MOST_REMEMBERED:])
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh = self.file.with_name(f"{self.file.name}.{os.getpid()}")
            fresh.write_text(json.dumps(newest, indent=1) + "\n", encoding="utf-8")
            fresh.replace(self.file)
        except OSError as error:
            log.warning("the volume of %s could not be remembered in %s: %s", store, self.file, error)

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(self.file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read and counts as empty: %s", self.file, error)
            return {}
        if not isinstance(found, dict):
            log.warning("%s holds no map and counts as empty", self.file)
            return {}
        return {path: point for path, point in found.items() if isinstance(point, str)}


def _missing_folders(path: Path) -> int:
    missing = 0
    while not path.exists() and path != path.parent:
        missing += 1
        path = path.parent
    return missing
