"""Where omlxd's files are, and that they are its owner's alone.

======================  ====================================  ===========================================
what                    Linux                                 macOS
======================  ====================================  ===========================================
configuration           ``~/.config/omlxd/config.toml``       ``~/Library/Application Support/omlxd/...``
store                   ``~/.cache/omlxd/store``              ``~/Library/Caches/omlxd/store``
log of the service      the journal                           ``~/Library/Logs/omlxd/omlxd.log``
socket                  ``$XDG_RUNTIME_DIR/omlxd/omlxd.sock``  ``~/Library/Application Support/omlxd/...``
======================  ====================================  ===========================================

The socket's path has to fit a ``sockaddr_un``: 103 bytes on macOS. Where the usual path is longer (or Linux has no
runtime folder for the user) the socket is ``/tmp/omlxd-UID/omlxd.sock``. That depends on nothing but the environment,
so clients and the daemon agree on it. Engines import this module: the socket needs the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

APP = "omlxd"
MAX_SOCKET_BYTES = 103  # macOS: 104 with the closing zero; Linux allows 107, a path good on both is better

_CACHEDIR_TAG = """Signature: 8a477f597d28d172789f06886806bc55
# This file marks a cache of omlxd: backup programs may leave this folder out.
# See https://bford.info/cachedir/
"""
_BACKUP_ATTRIBUTE = b"com.apple.metadata:com_apple_backup_excludeItem"


class PathError(Exception):
    """A path that cannot be used; the message names it and says what to do."""


def socket_path(env: Mapping[str, str] | None = None, *, platform: str = sys.platform) -> Path:
    """The socket that clients and the daemon use: ``$OMLXD_SOCKET``, or the default.

    Raises PathError when ``$OMLXD_SOCKET`` is longer than a socket's path may be.
    """
    env = os.environ if env is None else env
    if chosen := env.get("OMLXD_SOCKET"):
        return check_socket_path(Path(chosen).expanduser())
    usual = _usual_runtime_dir(env, platform)
    if usual is not None and len(os.fsencode(usual / "omlxd.sock")) <= MAX_SOCKET_BYTES:
        return usual / "omlxd.sock"
    return Path("/tmp") / f"{APP}-{os.getuid()}" / "omlxd.sock"


def _usual_runtime_dir(env: Mapping[str, str], platform: str) -> Path | None:
    if platform == "darwin":
        return Path(env.get("HOME") or Path.home()) / "Library" / "Application Support" / APP
    runtime = env.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isabs(runtime):
        return Path(runtime) / APP
    by_logind = Path(f"/run/user/{os.getuid()}")
    return by_logind / APP if os.access(by_logind, os.W_OK | os.X_OK) else None


def check_socket_path(path: Path) -> Path:
    """``path``, absolute; PathError when it is too long for a socket."""
    path = Path(os.path.abspath(path))
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_BYTES:
        raise PathError(
            f"socket path {path} has {length} bytes; the system allows {MAX_SOCKET_BYTES}: "
            "choose a shorter one with OMLXD_SOCKET or socket = ... under [daemon]"
        )
    return path


def config_path(env: Mapping[str, str] | None = None) -> Path:
    """The configuration file: ``$OMLXD_CONFIG``, or the default. It need not exist."""
    env = os.environ if env is None else env
    if chosen := env.get("OMLXD_CONFIG"):
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_config_dir(APP, appauthor=False)) / "config.toml"


def store_path() -> Path:
    """The default folder of the SSD tier."""
    import platformdirs

    return Path(platformdirs.user_cache_dir(APP, appauthor=False)) / "store"


def state_path() -> Path:
    """Where the daemon remembers what is neither configuration nor cache."""
    import platformdirs

    return Path(platformdirs.user_state_dir(APP, appauthor=False))


def log_path() -> Path:
    """Where the service's output goes on macOS."""
    import platformdirs

    return Path(platformdirs.user_log_dir(APP, appauthor=False)) / "omlxd.log"


def private_dir(path: Path, *, group: bool = False, shared: bool = False) -> Path:
    """``path`` as a folder for our files; made where missing, for its owner alone (with ``group``: its group may enter).

    A folder that is there is left as it is: it may hold other things too. Raises PathError for one of someone else, one
    that everybody may write to, a link of someone else, or something that is no folder. With ``shared`` a folder like
    ``/tmp`` will do, where nobody can replace what is another's.
    """
    try:
        path.mkdir(mode=0o750 if group else 0o700, parents=True, exist_ok=True)
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            if found.st_uid not in (os.getuid(), 0):
                raise PathError(f"{path} is a link that belongs to user {found.st_uid}: choose another path")
            found = os.stat(path)
    except OSError as error:
        raise PathError(f"folder {path} cannot be made or used: {error.strerror or error}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise PathError(f"{path} is no folder: move it away or choose another path")
    if shared and found.st_mode & stat.S_ISVTX and found.st_uid in (os.getuid(), 0):
        return path
    if found.st_uid != os.getuid():
        raise PathError(
            f"{path} belongs to user {found.st_uid}, not to you (user {os.getuid()}): choose a folder of your own"
        )
    if found.st_mode & stat.S_IWOTH:
        raise PathError(f"everybody may write to {path}: chmod o-w {path}, or choose a folder of your own")
    return path


def mark_cache(path: Path) -> None:
    """Tell backup programs that ``path`` (a folder) holds a cache. Best effort: a mark is no reason not to start."""
    tag = path / "CACHEDIR.TAG"
    try:
        if not tag.exists():
            tag.write_text(_CACHEDIR_TAG)
    except OSError:
        return
    exclude_from_time_machine(path)


def _macos_setxattr(path: bytes, name: bytes, value: bytes) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.setxattr(path, name, value, len(value), 0, 0)
    return result


def exclude_from_time_machine(
    path: Path,
    *,
    setxattr: Callable[[bytes, bytes, bytes], int] = _macos_setxattr,
    platform: str = sys.platform,
) -> bool:
    """Set the attribute that Time Machine reads (what ``tmutil addexclusion`` sets). True where it was set."""
    if platform != "darwin":
        return False
    import plistlib

    value = plistlib.dumps("com.apple.backupd", fmt=plistlib.FMT_BINARY)
    return setxattr(os.fsencode(path), _BACKUP_ATTRIBUTE, value) == 0
