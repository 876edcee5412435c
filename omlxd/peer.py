"""Who is at the other end of a unix socket."""

from __future__ import annotations

import socket
import struct
import sys
from dataclasses import dataclass

_SOL_LOCAL = 0
_LOCAL_PEERCRED = 1
_LOCAL_PEERPID = 2
_UCRED = struct.Struct("3i")
_XUCRED = struct.Struct("2Ih16I")


@dataclass(frozen=True, slots=True)
class Peer:
    """A process: ``pid`` is 0 where the system does not say, ``gid`` its primary group."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """The process that connected (or listened). Raises OSError when the system does not tell."""
    if sys.platform == "darwin":
        data = sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size)
        _, uid, _, gid, *_ = _XUCRED.unpack(data.ljust(_XUCRED.size, b"\0"))
        return Peer(sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID), uid, gid)
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid, uid, gid)
