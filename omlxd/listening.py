"""Making the daemon's socket: owner-only, and never a second one beside a living daemon."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from omlxd.paths import PathError, check_socket_path, private_dir
from omlxd.peer import peer_of


class SocketTaken(Exception):
    """Another daemon listens there."""


@dataclass(slots=True)
class Listening:
    """A bound socket and the lock that says whose the path is. ``close`` removes both."""

    sock: socket.socket
    path: Path
    lock: int
    file: tuple[int, int]
    """Inode and time of the socket's file: is it still this one that newcomers find?"""
    group: int | None = None

    @property
    def is_found(self) -> bool:
        """Does the path lead to this socket? Not after somebody has deleted or replaced its file."""
        try:
            return _file_at(self.path) == self.file
        except OSError:
            return False

    def again(self) -> Listening:
        """Listen at the path once more, when it does not lead here any longer. Raises as :func:`listen_at` does."""
        self._let_go()
        return listen_at(self.path, group=self.group)

    def close(self) -> None:
        """Close the socket and remove its file."""
        self.sock.close()
        if self.is_found:
            self.path.unlink(missing_ok=True)
        self._let_go()

    def _let_go(self) -> None:
        lock, self.lock = self.lock, -1
        if lock >= 0:
            os.close(lock)


def listen_at(path: Path, *, group: int | None = None, backlog: int = 128) -> Listening:
    """Listen at ``path``; a stale file of a daemon that died is replaced.

    ``group``: id of a group whose members may connect too.

    Raises:
        SocketTaken: a living daemon has it; the message names its pid.
        PathError: the path is too long, or its folder is not ours.
    """
    check_socket_path(path)
    private_dir(path.parent, group=group is not None, shared=True)
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # The lock ends with its process, however that ends; the file itself stays and means nothing.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise SocketTaken(_taken(path)) from None
    try:
        _remove_stale(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            before = os.umask(0o177 if group is None else 0o117)
            try:
                sock.bind(os.fspath(path))
            finally:
                os.umask(before)
            if group is not None:
                os.chown(path, -1, group)
            sock.listen(backlog)
            file = _file_at(path)
        except OSError as error:
            sock.close()
            raise PathError(
                f"cannot listen at {path}: {error.strerror or error}; choose another path with --socket"
            ) from error
    except BaseException:
        os.close(lock)
        raise
    return Listening(sock, path, lock, file, group)


def _file_at(path: Path) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_ino, found.st_mtime_ns


def _remove_stale(path: Path) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise PathError(f"{path} is there and is no socket: move it away, or choose another path with --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
                path.unlink(missing_ok=True)
                return
        raise SocketTaken(_taken(path))


def _taken(path: Path) -> str:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(os.fspath(path))
            who = f"pid {peer_of(probe).pid}"
    except OSError:
        who = "it does not answer"
    return f"another daemon listens at {path} ({who}): stop it with 'omlxd stop', or choose another path with --socket"
