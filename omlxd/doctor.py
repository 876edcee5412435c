"""Checks of the whole set-up, each with what to do when it fails.

Every check looks at the real thing: the file that the daemon would read, the folder it would write, the socket that
engines use. Nothing is changed.
"""

from __future__ import annotations

import os
import platform
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import psutil

from omlxd.config import Config
from omlxd.config_problems import ConfigError
from omlxd.config_sources import load_config
from omlxd.errors import OmlxdError
from omlxd.filesystems import disk_bytes, filesystem_of
from omlxd.memory import memory
from omlxd.paths import MAX_SOCKET_BYTES
from omlxd.schema import Stats
from omlxd.service import ServiceError, manager
from omlxd.storage import metal
from omlxd.storage.sizes import format_size

FEW_DESCRIPTORS = 1024
_OWN_FOLDER = "OMLXD_SOCKET, or socket under [daemon]; without them there is a private one"


class Verdict(StrEnum):
    """How a check came out."""

    OK = "ok"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was looked at, how it is, what to do."""

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""

    @property
    def wrong(self) -> bool:
        """Does something have to be done?"""
        return self.verdict is Verdict.WRONG

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return {name: str(value) for name, value in asdict(self).items()}


def ok(check: str, found: str) -> Finding:
    """A check that went well."""
    return Finding(check, Verdict.OK, found)


def note(check: str, found: str, remedy: str = "") -> Finding:
    """Nothing is broken; worth knowing."""
    return Finding(check, Verdict.NOTE, found, remedy)


def wrong(check: str, found: str, remedy: str) -> Finding:
    """Something has to be done."""
    return Finding(check, Verdict.WRONG, found, remedy)


def examine(config_file: Path, socket: Path) -> list[Finding]:
    """All checks, in the order in which trouble is best looked for."""
    found = [*_system(), *_mlx()]
    try:
        config = load_config(config_file, os.environ)
    except ConfigError as error:
        found += [wrong("configuration", str(p), p.remedy) for p in error.problems]
        config = load_config()
    else:
        found += _configuration(config, config_file)
    told = any(one.wrong and one.check == "configuration" for one in found)
    found += [*_socket(socket), *_store(config), *_remote(config), *_memory(config), *_service()]
    return [*found, *_daemon(socket, config, configuration_is_told=told)]


def _system() -> Iterator[Finding]:
    text = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        yield wrong(
            "system", text, "MLX needs Apple silicon; a Python for x86_64 runs under Rosetta: install one for arm64"
        )
    else:
        yield ok("system", text)
    if sys.platform != "win32":
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < FEW_DESCRIPTORS:
            yield note(
                "descriptors", f"a process may open {soft} files", "raise it with ulimit -n 4096, or use omlxd install"
            )


def _mlx() -> Iterator[Finding]:
    try:
        zero_copy = metal.is_zero_copy()
    except ImportError as error:
        yield wrong("mlx", f"cannot be imported: {error}", "pip install mlx (on Linux: pip install 'mlx[cpu]')")
        return
    where = "adopts memory without a copy" if zero_copy else "copies (no Metal here): correct, and slower"
    yield ok("mlx", f"{version('mlx')}, {where}")


def _configuration(config: Config, file: Path) -> Iterator[Finding]:
    yield ok("configuration", str(file) if file.exists() else f"defaults ({file} is not there)")
    for text in config.notes:
        yield note("configuration", text, "correct the name, or unset it")


def _socket(socket: Path) -> Iterator[Finding]:
    length = len(os.fsencode(socket))
    if length > MAX_SOCKET_BYTES:
        yield wrong(
            "socket", f"{socket} has {length} bytes", f"choose one of at most {MAX_SOCKET_BYTES} (OMLXD_SOCKET)"
        )
        return
    folder = socket.parent
    try:
        found = folder.stat()
    except FileNotFoundError:
        yield ok("socket", f"{socket} (its folder is made when the daemon starts)")
        return
    mode = stat.S_IMODE(found.st_mode)
    if mode & stat.S_ISVTX and found.st_uid in (os.getuid(), 0):
        yield note("socket", f"{folder} is shared by everybody", f"a folder of your own is better: {_OWN_FOLDER}")
    elif found.st_uid != os.getuid():
        yield wrong("socket", f"{folder} belongs to user {found.st_uid}", f"choose a folder of your own: {_OWN_FOLDER}")
    elif mode & stat.S_IWOTH:
        yield wrong("socket", f"everybody may write to {folder}", f"choose a folder of your own: {_OWN_FOLDER}")
    elif mode & 0o077:
        yield note(
            "socket",
            f"others may enter {folder} (mode {mode:04o})",
            f"unless a group is meant to, use a folder of its own: {_OWN_FOLDER}",
        )
    else:
        yield ok("socket", str(socket))


def _store(config: Config) -> Iterator[Finding]:
    if config.ssd_is_off:
        yield note(
            "store", "the SSD tier is off: nothing outlives the daemon", 'size = "auto" under [ssd] switches it on'
        )
        return
    store = Path(config.ssd.path).expanduser()
    system = filesystem_of(store)
    if system.trouble and not config.ssd.any_filesystem:
        yield wrong(
            "store",
            f"{store} is on a {system.trouble} file system ({system.kind} at {system.mountpoint})",
            "choose a folder on a local disk (path under [ssd]); any_filesystem = true insists",
        )
    nearest = store
    while not nearest.exists():
        nearest = nearest.parent
    if not os.access(nearest, os.W_OK | os.X_OK):
        yield wrong(
            "store", f"{nearest} cannot be written", f"chmod u+rwx {nearest}, or choose another path under [ssd]"
        )
        return
    volume = psutil.disk_usage(str(nearest))
    held = disk_bytes(store)
    limit = config.ssd_bytes(volume.total, volume.free + held)
    floor = config.min_free_bytes(volume.total)
    text = f"{store}: {format_size(held)} of {format_size(limit)}, {format_size(volume.free)} free on {system.kind}"
    if limit == 0:
        yield wrong(
            "store", f"{text}: no room", f"free some space (the floor is {format_size(floor)}), or lower min_free"
        )
    elif volume.free < floor:
        yield wrong("store", f"{text}: under the floor of {format_size(floor)}", "free some space, or lower min_free")
    else:
        yield ok("store", text)


def _remote(config: Config) -> Iterator[Finding]:
    """What this machine has to have for the shared tier; how the server is, only a running daemon can say."""
    if not config.remote.url:
        return
    for name, what in (("key_file", config.remote.key_file), ("ca_file", config.remote.ca_file)):
        if what and not os.access(Path(what).expanduser(), os.R_OK):
            yield wrong("remote", f"{what} cannot be read", f"correct {name} under [remote], or the file's mode")
    if config.remote.tier == Config().remote.tier and find_spec("valkey") is None:
        yield wrong("remote", "the package valkey is not installed", "pip install 'omlxd[valkey]', or url = \"\"")


def _memory(config: Config) -> Iterator[Finding]:
    total, available = memory()
    ram = config.ram_bytes(total)
    text = f"{format_size(ram)} for the RAM tier of {format_size(total)}, {format_size(available)} available"
    if ram == 0:
        yield note("memory", "the RAM tier is off", 'size = "auto" under [ram] switches it on')
    elif ram > total:
        yield wrong("memory", f"{text}: more than this process may use", "lower size under [ram]")
    elif ram > total // 2:
        yield note("memory", text, "that leaves little for models: lower size under [ram]")
    else:
        yield ok("memory", text)


def _service() -> Iterator[Finding]:
    try:
        state = manager().state()
    except ServiceError as error:
        yield note("service", str(error))
        return
    if state.installed:
        yield ok("service", str(state))
    else:
        yield note("service", "not installed", "omlxd install --start keeps it running in the background")


def _daemon(socket: Path, config: Config, *, configuration_is_told: bool) -> Iterator[Finding]:
    from omlxd.client import connect

    try:
        with connect(socket, name="omlxd doctor", timeout=10.0) as cache:
            stats = cast("Stats", cache.call("stats"))
            settings = cache.call("settings")["values"]
    except OmlxdError as error:
        text = str(error)  # where nobody listens, it says already what to do
        yield note("daemon", text, "" if "omlxd serve" in text else "omlxd serve starts it")
        return
    daemon = stats["daemon"]
    yield ok("daemon", f"{daemon['version']}, pid {daemon['pid']}, {daemon['state']}")
    problem = daemon["config_problem"]
    for warning in stats["warnings"]:
        if configuration_is_told and problem and problem in warning:
            continue  # the same file, the same problem: found above
        yield wrong("daemon", warning, "see its log; omlxd status shows the whole picture")
    if waiting := daemon["needs_restart"]:
        yield note("daemon", f"in effect after a restart: {', '.join(waiting)}", "omlxd stop, and start it again")
    if not configuration_is_told and (other := _set_otherwise(settings, config)):
        yield note(
            "daemon",
            f"it was started with other settings than are found here: {other}",
            "omlxd config show --running tells all of them; the store and the memory above are not its own",
        )
    if (remote := stats.get("remote")) is not None and remote["state"] == "ok":
        yield ok("remote", remote["url"])
    yield from _use(stats)


def _set_otherwise(running: Mapping[str, Mapping[str, object]], config: Config) -> str:
    """Where the tiers of a running daemon are not what the configuration here would make; empty: nowhere."""
    here = dict(config.values())
    return ", ".join(
        f"{key} = {running[key]['value']}"
        for key in ("ram.size", "ssd.path", "ssd.size")
        if key in running and running[key]["value"] != here[key]
    )


def _use(stats: Stats) -> Iterator[Finding]:
    counts = stats["counts"]
    hits = counts.get("hits_ram", 0) + counts.get("hits_ssd", 0) + counts.get("hits_remote", 0)
    asked = hits + counts.get("misses", 0)
    if not stats["namespaces"]:
        yield note("use", "no engine has registered a model yet", "connect one: README, Connect an engine")
    elif not asked and not counts.get("stored", 0):
        yield note(
            "use",
            "engines are connected, but nothing was stored or asked for",
            "prompts shorter than a block (block_tokens) cannot be kept; omlxd explain tells more",
        )
    else:
        yield ok("use", f"{hits:,} of {asked:,} blocks asked for were there")
    declined = {name.removeprefix("declined_"): n for name, n in counts.items() if name.startswith("declined_") and n}
    declined.pop("pending", None)
    if declined:
        text = ", ".join(f"{reason} {count:,}" for reason, count in sorted(declined.items()))
        yield note(
            "use",
            f"blocks were not taken: {text}",
            "no_room, too_large, less_worth: raise size under [ram]; ssd_behind: max_dirty under [ssd]",
        )
