"""omlxd as a service: a LaunchAgent on macOS, a systemd user unit with a socket unit on Linux.

In both, the service manager owns the listening socket and starts the daemon at the first connection; it is started
again after a crash, not after an orderly end and not after a configuration error (exit code 78). The time that stopping
may take is derived from the bytes that may be dirty.
"""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from omlxd.activation import LISTENERS
from omlxd.config_problems import EXIT_CONFIG
from omlxd.paths import private_dir

LABEL = "org.omlxd.daemon"
UNIT = "omlxd"

DRAIN_BYTES_PER_SECOND = 50_000_000  # a slow disk, with the codec; a fast one is done sooner
DRAIN_SECONDS = 30

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


class ServiceError(Exception):
    """The service manager refused; the text says what was asked and what it answered."""


@dataclass(frozen=True, slots=True)
class Service:
    """What a service file says of this installation."""

    command: Sequence[str]
    """The daemon with its arguments, the program as an absolute path."""
    socket: Path
    log: Path
    """Where launchd sends output; systemd has its journal."""
    max_dirty: int
    """Bytes that may have to be written when it stops."""
    memory_high: int
    """Bytes of memory that it should stay under: the RAM tier and what the process itself needs."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def stop_seconds(self) -> int:
        """How long stopping may take."""
        return DRAIN_SECONDS + self.max_dirty // DRAIN_BYTES_PER_SECOND


def this_command(*arguments: str) -> list[str]:
    """The running installation's ``omlxd serve``."""
    return [sys.executable, "-m", "omlxd", "serve", *arguments]


def launch_agent(service: Service) -> dict[str, object]:
    """The LaunchAgent, launchd.plist(5)."""
    agent: dict[str, object] = {
        "Label": LABEL,
        "ProgramArguments": list(service.command),
        "WorkingDirectory": "/",
        "Umask": 0o077,
        "RunAtLoad": False,  # the first connection starts it
        "Sockets": {
            LISTENERS: {
                "SockFamily": "Unix",
                "SockType": "stream",
                "SockPathName": str(service.socket),
                "SockPathMode": 0o600,
            }
        },
        "KeepAlive": {"Crashed": True},
        "ThrottleInterval": 10,
        "ExitTimeOut": service.stop_seconds,
        # An engine waits for what is restored: no background throttling. What runs at background priority anyway
        # does its I/O at low priority.
        "ProcessType": "Interactive",
        "LowPriorityBackgroundIO": True,
        "SoftResourceLimits": {"NumberOfFiles": 4096},
        "StandardOutPath": str(service.log),
        "StandardErrorPath": str(service.log),
    }
    if service.environment:
        agent["EnvironmentVariables"] = dict(service.environment)
    return agent


def systemd_service(service: Service) -> str:
    """The unit ``omlxd.service``, systemd.service(5)."""
    environment = "".join(f"Environment={_quote(f'{k}={v}')}\n" for k, v in sorted(service.environment.items()))
    return f"""\
[Unit]
Description=omlxd, the KV cache of local language models
Requires={UNIT}.socket
After={UNIT}.socket
StartLimitIntervalSec=60
StartLimitBurst=5

[Service]
Type=notify
WorkingDirectory=/
ExecStart={" ".join(_quote(argument, dollar=True) for argument in service.command)}
ExecReload=/bin/kill -HUP $MAINPID
{environment}Restart=on-failure
RestartSec=5
RestartPreventExitStatus={EXIT_CONFIG}
TimeoutStartSec=300
TimeoutStopSec={service.stop_seconds}
KillMode=mixed
MemoryHigh={service.memory_high}
LimitNOFILE=4096
UMask=0077
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
"""


def systemd_socket(service: Service) -> str:
    """The unit ``omlxd.socket``, systemd.socket(5)."""
    return f"""\
[Unit]
Description=omlxd's socket

[Socket]
ListenStream={str(service.socket).replace("%", "%%")}
SocketMode=0600
DirectoryMode=0700
RemoveOnStop=yes
TriggerLimitIntervalSec=60
TriggerLimitBurst=20

[Install]
WantedBy=sockets.target
"""


def _quote(text: str, *, dollar: bool = False) -> str:
    """``text`` as one word of a unit file: quotes, specifiers, and in commands variables, mean nothing in it."""
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    if dollar:
        text = text.replace("$", "$$")
    return f'"{text}"' if not text or set(text) & set(" \t'\"\\;") else text


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        raise ServiceError(f"there is no {command[0]} on this system") from None
    except subprocess.TimeoutExpired:
        raise ServiceError(f"{' '.join(command)} did not answer within two minutes") from None


@dataclass(frozen=True, slots=True)
class State:
    """What ``omlxd status`` says of the service."""

    installed: bool
    running: bool
    manager: str
    files: tuple[Path, ...]

    def __str__(self) -> str:
        if not self.installed:
            return "not installed as a service (omlxd install)"
        return f"{self.manager} service, {'running' if self.running else 'not running'}"


class Launchd:
    """A LaunchAgent of this user."""

    name = "launchd"

    def __init__(self, home: Path, run: Run = _run) -> None:
        self.files = (home / "Library" / "LaunchAgents" / f"{LABEL}.plist",)
        self._domain = f"gui/{os.getuid()}"
        self._run = run

    def install(self, service: Service, *, start: bool) -> None:
        """Write the agent and load it; ``start`` the daemon without waiting for a connection."""
        private_dir(service.socket.parent, shared=True)
        service.log.parent.mkdir(parents=True, exist_ok=True)
        (plist,) = self.files
        plist.parent.mkdir(parents=True, exist_ok=True)
        self._bootout()  # an older one; an error when there is none
        with _as_before_when_it_fails(self.files, self._bootout):
            plist.write_bytes(plistlib.dumps(launch_agent(service)))
            _must(self._run, ["launchctl", "bootstrap", self._domain, str(plist)])
        if start:
            _must(self._run, ["launchctl", "kickstart", f"{self._domain}/{LABEL}"])

    def uninstall(self) -> list[Path]:
        """Stop the daemon, unload the agent and remove it; the files that were removed."""
        self._bootout()
        return _remove(self.files)

    def state(self) -> State:
        """Is it installed, is it running."""
        printed = self._run(["launchctl", "print", f"{self._domain}/{LABEL}"])
        running = printed.returncode == 0 and "state = running" in printed.stdout
        return State(self.files[0].exists(), running, self.name, self.files)

    def _bootout(self) -> None:
        self._run(["launchctl", "bootout", f"{self._domain}/{LABEL}"])


class Systemd:
    """User units of systemd."""

    name = "systemd"

    def __init__(self, config_home: Path, run: Run = _run) -> None:
        folder = config_home / "systemd" / "user"
        self.files = (folder / f"{UNIT}.service", folder / f"{UNIT}.socket")
        self._run = run

    def install(self, service: Service, *, start: bool) -> None:
        """Write both units, enable the socket; ``start`` the daemon without waiting for a connection."""
        private_dir(service.socket.parent, shared=True)
        unit, sock = self.files
        unit.parent.mkdir(parents=True, exist_ok=True)
        with _as_before_when_it_fails(self.files, self._disable):
            unit.write_text(systemd_service(service))
            sock.write_text(systemd_socket(service))
            self._control("daemon-reload")
            self._control("enable", "--now", sock.name)
        if start:
            self._control("start", unit.name)

    def uninstall(self) -> list[Path]:
        """Stop the daemon and its socket, remove both units; the files that were removed."""
        unit, _ = self.files
        if any(file.exists() for file in self.files):
            self._disable()
            self._run(["systemctl", "--user", "stop", unit.name])
        removed = _remove(self.files)
        if removed:
            self._run(["systemctl", "--user", "daemon-reload"])
        return removed

    def state(self) -> State:
        """Is it installed, is it running."""
        installed = all(file.exists() for file in self.files)
        active = installed and self._run(["systemctl", "--user", "is-active", self.files[0].name]).returncode == 0
        return State(installed, active, self.name, self.files)

    def _disable(self) -> None:
        self._run(["systemctl", "--user", "disable", "--now", self.files[1].name])

    def _control(self, *arguments: str) -> None:
        _must(self._run, ["systemctl", "--user", *arguments])


Manager = Launchd | Systemd


def manager(run: Run = _run, *, platform: str = sys.platform) -> Manager:
    """This system's service manager."""
    if platform == "darwin":
        return Launchd(Path.home(), run)
    return Systemd(Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"), run)


@contextmanager
def _as_before_when_it_fails(files: Sequence[Path], undo: Callable[[], None]) -> Iterator[None]:
    """A service that could not be set up leaves no files that look like one; those of an earlier one are put back."""
    before = {file: file.read_bytes() for file in files if file.exists()}
    try:
        yield
    except (ServiceError, OSError):
        if not before:
            with suppress(ServiceError):
                undo()
        for file in files:
            if file in before:
                file.write_bytes(before[file])
            else:
                file.unlink(missing_ok=True)
        raise


def _must(run: Run, command: list[str]) -> None:
    done = run(command)
    if done.returncode != 0:
        told = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise ServiceError(f"{' '.join(command)}: {told}")


def _remove(files: Sequence[Path]) -> list[Path]:
    removed = [file for file in files if file.exists()]
    for file in removed:
        file.unlink()
    return removed
