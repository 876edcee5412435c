from __future__ import annotations

import os
import plistlib
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest

from omlxd import paths
from omlxd.filesystems import filesystem_of


def test_socket_of_the_environment_wins(tmp_path: Path) -> None:
    chosen = tmp_path / "s"
    assert paths.socket_path({"OMLXD_SOCKET": str(chosen), "XDG_RUNTIME_DIR": "/run/x"}) == chosen


def test_socket_lies_in_the_runtime_folder_on_linux() -> None:
    found = paths.socket_path({"XDG_RUNTIME_DIR": "/run/user/4711"}, platform="linux")
    assert found == Path("/run/user/4711/omlxd/omlxd.sock")


def test_relative_runtime_folder_is_not_used() -> None:
    assert paths.socket_path({"XDG_RUNTIME_DIR": "here"}, platform="linux").is_absolute()
    assert "here" not in str(paths.socket_path({"XDG_RUNTIME_DIR": "here"}, platform="linux"))


def test_socket_path_that_would_be_too_long_falls_back_to_a_readable_one() -> None:
    home = "/Users/" + "x" * 80
    found = paths.socket_path({"HOME": home}, platform="darwin")
    assert found == Path(f"/tmp/omlxd-{os.getuid()}/omlxd.sock")
    assert len(os.fsencode(found)) <= paths.MAX_SOCKET_BYTES


def test_socket_on_macos_lies_in_the_users_library() -> None:
    found = paths.socket_path({"HOME": "/Users/ann"}, platform="darwin")
    assert found == Path("/Users/ann/Library/Application Support/omlxd/omlxd.sock")


@pytest.mark.parametrize(("length", "fits"), [(103, True), (104, False)])
def test_chosen_socket_path_is_measured_in_bytes(length: int, fits: bool) -> None:
    path = "/tmp/" + "é" * ((length - 5) // 2) + "x" * ((length - 5) % 2)
    assert len(os.fsencode(path)) == length
    if fits:
        assert paths.socket_path({"OMLXD_SOCKET": path}) == Path(path)
    else:
        with pytest.raises(paths.PathError, match=r"has 104 bytes; the system allows 103"):
            paths.socket_path({"OMLXD_SOCKET": path})


def test_private_dir_is_made_for_its_owner_only(tmp_path: Path) -> None:
    made = paths.private_dir(tmp_path / "a" / "b")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_folder_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    """It may be somebody's home, or /tmp."""
    for mode in (0o755, 0o700, 0o770):
        tmp_path.chmod(mode)
        assert paths.private_dir(tmp_path) == tmp_path
        assert stat.S_IMODE(tmp_path.stat().st_mode) == mode


def test_folder_for_a_group_may_be_entered_by_it(tmp_path: Path) -> None:
    assert stat.S_IMODE(paths.private_dir(tmp_path / "g", group=True).stat().st_mode) & 0o027 == 0


def test_folder_that_everybody_may_write_to_is_refused_unless_nobody_can_replace_anothers_file_there(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o777)
    for shared in (False, True):
        with pytest.raises(paths.PathError, match=r"everybody may write .* chmod o-w"):
            paths.private_dir(tmp_path, shared=shared)
    tmp_path.chmod(0o1777)
    assert paths.private_dir(tmp_path, shared=True) == tmp_path
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o1777
    with pytest.raises(paths.PathError, match="everybody may write"):
        paths.private_dir(tmp_path)


def test_private_dir_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(paths.PathError, match="file"):
        paths.private_dir(tmp_path / "file")


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to make a folder of someone else")
def test_private_dir_refuses_the_folder_and_the_link_of_someone_else(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 4711, 4711)
    with pytest.raises(paths.PathError, match="belongs to user 4711"):
        paths.private_dir(theirs)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    os.lchown(link, 4711, 4711)
    with pytest.raises(paths.PathError, match="link that belongs to user 4711"):
        paths.private_dir(link)


def test_cache_is_marked_for_backup_programs(tmp_path: Path) -> None:
    paths.mark_cache(tmp_path)
    tag = tmp_path / "CACHEDIR.TAG"
    assert tag.read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")
    tag.write_text("Signature: 8a477f597d28d172789f06886806bc55 mine")
    paths.mark_cache(tmp_path)
    assert tag.read_text().endswith("mine")


def test_time_machine_attribute_is_the_one_that_tmutil_sets(tmp_path: Path) -> None:
    calls: list[tuple[bytes, bytes, bytes]] = []

    def setxattr(path: bytes, name: bytes, value: bytes) -> int:
        calls.append((path, name, value))
        return 0

    assert paths.exclude_from_time_machine(tmp_path, setxattr=setxattr, platform="darwin")
    ((path, name, value),) = calls
    assert (path, name) == (os.fsencode(tmp_path), b"com.apple.metadata:com_apple_backup_excludeItem")
    assert plistlib.loads(value) == "com.apple.backupd"
    assert not paths.exclude_from_time_machine(tmp_path, setxattr=setxattr, platform="linux")
    assert len(calls) == 1


def test_config_file_of_the_environment_wins(tmp_path: Path) -> None:
    assert paths.config_path({"OMLXD_CONFIG": str(tmp_path / "c.toml")}) == tmp_path / "c.toml"
    assert paths.config_path({}).name == "config.toml"


@dataclass
class FakeMount:
    mountpoint: str
    fstype: str


@pytest.mark.parametrize(
    ("path", "kind", "trouble"),
    [
        ("/data/x", "ext4", None),
        ("/share/a/b", "nfs4", "network"),
        ("/share/local/b", "xfs", None),
        ("/shared", "ext4", None),
        ("/ssh", "fuse.sshfs", "FUSE"),
        ("/gluster/x", "fuse.glusterfs", "network"),
        ("/covered/x", "apfs", None),
    ],
)
def test_file_system_is_that_of_the_nearest_mount(path: str, kind: str, trouble: str | None) -> None:
    mounts = [
        FakeMount("/", "ext4"),
        FakeMount("/share", "nfs4"),
        FakeMount("/share/local", "xfs"),
        FakeMount("/ssh", "fuse.sshfs"),
        FakeMount("/gluster", "fuse.glusterfs"),
        FakeMount("/covered", "smbfs"),
        FakeMount("/covered", "apfs"),
    ]
    found = filesystem_of(Path(path), mounts)
    assert (found.kind, found.trouble) == (kind, trouble)


def test_file_system_of_a_real_path_is_known(tmp_path: Path) -> None:
    assert filesystem_of(tmp_path / "not" / "there").kind != "unknown"
