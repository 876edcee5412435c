"""Bytes and file descriptors over a unix socket, one system call each. Needs no event loop: engines import this."""

from __future__ import annotations

import os
import socket
from array import array
from collections.abc import Sequence

READ_BYTES = 256 << 10
MAX_FDS = 64
_FD_SPACE = socket.CMSG_SPACE(MAX_FDS * array("i").itemsize)


def receive_into(sock: socket.socket, buffer: bytearray) -> tuple[int, list[int]]:
    """Fill ``buffer`` with what is there to be read: how many bytes (0: the peer has closed), and which descriptors.

    Descriptors come close-on-exec. Raises OSError, also when the peer sent more than ``MAX_FDS`` at once.
    """
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    count, ancillary, msg_flags, _ = sock.recvmsg_into([buffer], _FD_SPACE, flags)
    if not ancillary:
        return count, []
    fds = array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    received = list(fds)
    if not flags:
        for fd in received:
            os.set_inheritable(fd, False)
    if msg_flags & socket.MSG_CTRUNC:
        for fd in received:
            os.close(fd)
        raise OSError(
            f"descriptors were lost: the peer sent more than {MAX_FDS} at once, or this process has none left"
        )
    return count, received


def send_with_fds(sock: socket.socket, data: bytes | memoryview, fds: Sequence[int]) -> int:
    """Send some of ``data`` with ``fds`` attached to its first byte; how many bytes went."""
    if not fds:
        return sock.send(data)
    return sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))])


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that were not passed on, or are sent."""
    for fd in fds:
        os.close(fd)
