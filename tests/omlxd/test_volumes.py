"""A store is not begun on the disk under a mount point whose volume is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from omlxd.filesystems import Filesystem
from omlxd.paths import PathError
from omlxd.storage.ssd_data_file import DATA_NAME
from omlxd.volumes import KnownVolumes


class Machine:
    """A system disk with the home directory, and an external volume that may be mounted."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.point = folder / "Volumes" / "External"
        self.file = folder / "state" / "volumes.json"
        self.home.mkdir()
        self.point.mkdir(parents=True)
        self.mounted = True

    def filesystem(self, path: Path) -> Filesystem:
        external = self.mounted and path.is_relative_to(self.point)
        return Filesystem(str(self.point) if external else "/", "ext4")

    @property
    def volumes(self) -> KnownVolumes:
        """As a new process sees them."""
        return KnownVolumes(self.file, home=self.home, filesystem=self.filesystem)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_known_volume_that_is_not_mounted_is_missed(machine: Machine) -> None:
    store = machine.point / "store"
    machine.volumes.check(store)
    machine.volumes.remember(store)
    machine.volumes.check(store)
    machine.mounted = False
    with pytest.raises(PathError, match=f"not mounted at {machine.point}"):
        machine.volumes.check(store)
    with pytest.raises(PathError, match=str(machine.file)):
        machine.volumes.check(store)
    machine.mounted = True
    machine.volumes.check(store)


def test_the_mount_point_itself_may_be_the_store(machine: Machine) -> None:
    machine.volumes.remember(machine.point)
    machine.mounted = False
    with pytest.raises(PathError):
        machine.volumes.check(machine.point)


def test_without_the_record_or_with_a_store_there_it_may_be_anywhere(machine: Machine) -> None:
    store = machine.point / "store"
    machine.volumes.remember(store)
    machine.mounted = False
    store.mkdir()
    (store / DATA_NAME).touch()
    machine.volumes.check(store)  # somebody has moved it there
    machine.volumes.remember(store)
    (store / DATA_NAME).unlink()
    machine.volumes.check(store)  # and that is known now
    machine.mounted = True
    machine.volumes.remember(store)
    machine.mounted = False
    machine.file.unlink()
    machine.volumes.check(store)


@pytest.mark.parametrize(("below", "allowed"), [("store", True), ("omlxd/store", True), ("Disk/omlxd/store", False)])
def test_more_than_two_missing_folders_are_a_missing_volume(machine: Machine, below: str, allowed: bool) -> None:
    store = machine.point.parent / below
    if allowed:
        machine.volumes.check(store)
    else:
        with pytest.raises(PathError, match="as if its volume were not mounted"):
            machine.volumes.check(store)
    machine.volumes.check(machine.home / "a" / "b" / "c" / "d")


def test_nothing_is_remembered_of_the_home_directory_s_volume(machine: Machine) -> None:
    machine.volumes.remember(machine.home / "store")
    assert not machine.file.exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', "\xff"])
def test_a_file_that_cannot_be_read_counts_as_empty(machine: Machine, content: str) -> None:
    machine.file.parent.mkdir()
    machine.file.write_bytes(content.encode("latin-1"))
    store = machine.point / "store"
    machine.volumes.check(store)
    machine.volumes.remember(store)
    machine.mounted = False
    with pytest.raises(PathError):
        machine.volumes.check(store)


def test_the_record_is_bounded(machine: Machine) -> None:
    for number in range(150):
        machine.volumes.remember(machine.point / f"store{number}")
    assert machine.file.read_text().count("store") == 100
