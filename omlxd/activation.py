"""The service manager's side of starting and stopping: sockets it hands over, and what it is told.

systemd passes descriptors from 3 upwards and says how many in ``LISTEN_FDS`` (sd_listen_fds(3)); launchd gives them
when asked, by the name they have in the plist (``launch_activate_socket``). systemd is told about readiness and
progress through the datagram socket in ``NOTIFY_SOCKET`` (sd_notify(3)); launchd wants to hear nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
from collections.abc import Callable, MutableMapping

LISTENERS = "Listeners"
"""Name of our sockets in the LaunchAgent."""

FIRST_FD = 3
_MAX_FDS = 16


class ActivationError(Exception):
    """A descriptor handed over is no listening unix socket."""


def inherited_sockets(
    env: MutableMapping[str, str] | None = None,
    *,
    platform: str = sys.platform,
    launchd: Callable[[str], list[int]] | None = None,
) -> list[socket.socket]:
    """The listening sockets that the service manager holds for us; empty when we were started by hand.

    The variables are taken out of ``env``, so that no child process mistakes the descriptors for its own.

    Raises:
        ActivationError: a descriptor is not what was agreed.
    """
    env = os.environ if env is None else env
    fds = _from_systemd(env)
    if not fds and platform == "darwin":
        fds = (launchd or _from_launchd)(LISTENERS)
    return [_adopt(fd) for fd in fds]


def _from_systemd(env: MutableMapping[str, str]) -> list[int]:
    pid, count = env.pop("LISTEN_PID", ""), env.pop("LISTEN_FDS", "")
    env.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit() or not 0 < int(count) <= _MAX_FDS:
        return []
    return list(range(FIRST_FD, FIRST_FD + int(count)))


def _from_launchd(name: str) -> list[int]:
    """Descriptors of the running launchd job; empty outside of one (ESRCH) and where the plist names none (ENOENT)."""
    libc = ctypes.CDLL(None)
    activate, free = libc.launch_activate_socket, libc.free
    activate.restype = ctypes.c_int
    activate.argtypes = [
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.POINTER(ctypes.c_int)),
        ctypes.POINTER(ctypes.c_size_t),
    ]
    free.argtypes = [ctypes.c_void_p]
    fds, count = ctypes.POINTER(ctypes.c_int)(), ctypes.c_size_t()
    if activate(name.encode(), ctypes.byref(fds), ctypes.byref(count)) != 0:
        return []
    found = [fds[index] for index in range(count.value)]
    free(fds)
    return found


def _adopt(fd: int) -> socket.socket:
    try:
        os.set_inheritable(fd, False)
        found = socket.socket(fileno=fd)
    except OSError as error:
        raise ActivationError(f"descriptor {fd} from the service manager is no socket: {error.strerror}") from None
    if found.family != socket.AF_UNIX or found.type != socket.SOCK_STREAM:
        found.detach()
        raise ActivationError(f"descriptor {fd} from the service manager is no unix stream socket: see the unit file")
    found.setblocking(False)
    return found


def refuse_waiting(sockets: list[socket.socket]) -> int:
    """Close the connections that wait on ``sockets``; how many there were.

    Before giving up on a configuration error: a connection left waiting would make the service manager start us again
    at once, for the same error.
    """
    refused = 0
    for listener in sockets:
        listener.setblocking(False)
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()
                refused += 1
    return refused


def notify(*states: str, env: MutableMapping[str, str] | None = None) -> bool:
    """Tell systemd ``READY=1``, ``STOPPING=1``, ``STATUS=...``; False where nobody listens. Never waits."""
    address = (os.environ if env is None else env).get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto("\n".join(states).encode(), address)
    except OSError:
        return False
    return True


def extend_timeout(seconds: float) -> str:
    """The state that asks systemd for ``seconds`` more from now (``EXTEND_TIMEOUT_USEC``), for a long drain."""
    return f"EXTEND_TIMEOUT_USEC={int(seconds * 1_000_000)}"
