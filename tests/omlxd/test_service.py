from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from omlxd.service import (
    LABEL,
    Launchd,
    Service,
    ServiceError,
    Systemd,
    launch_agent,
    systemd_service,
    systemd_socket,
    this_command,
)
from scripts.daemon_process import CHECKOUT

# Keys of launchd.plist(5) with the type of their values, those of the dictionaries in it included.
LAUNCHD_KEYS: dict[str, type | tuple[type, ...]] = {
    "Label": str, "Disabled": bool, "UserName": str, "GroupName": str, "inetdCompatibility": dict,
    "LimitLoadToHosts": list, "LimitLoadFromHosts": list, "LimitLoadToSessionType": (str, list),
    "LimitLoadToHardware": dict, "LimitLoadFromHardware": dict, "Program": str, "BundleProgram": str,
    "ProgramArguments": list, "EnableGlobbing": bool, "EnableTransactions": bool, "EnablePressuredExit": bool,
    "OnDemand": bool, "ServiceIPC": bool, "KeepAlive": (bool, dict), "RunAtLoad": bool, "RootDirectory": str,
    "WorkingDirectory": str, "EnvironmentVariables": dict, "Umask": (int, str), "TimeOut": int, "ExitTimeOut": int,
    "ThrottleInterval": int, "InitGroups": bool, "WatchPaths": list, "QueueDirectories": list,
    "StartOnMount": bool, "StartInterval": int, "StartCalendarInterval": (dict, list), "StandardInPath": str,
    "StandardOutPath": str, "StandardErrorPath": str, "Debug": bool, "WaitForDebugger": bool,
    "SoftResourceLimits": dict, "HardResourceLimits": dict, "Nice": int, "ProcessType": str,
    "AbandonProcessGroup": bool, "LowPriorityIO": bool, "LowPriorityBackgroundIO": bool,
    "MaterializeDatalessFiles": bool, "LaunchOnlyOnce": bool, "MachServices": dict, "Sockets": dict,
    "LaunchEvents": dict, "HopefullyExitsLast": bool, "HopefullyExitsFirst": bool, "SessionCreate": bool,
    "LegacyTimers": bool, "AssociatedBundleIdentifiers": (str, list),
}  # fmt: skip
KEEP_ALIVE_KEYS = {"SuccessfulExit", "NetworkState", "PathState", "OtherJobEnabled", "Crashed", "AfterInitialDemand"}
SOCKET_KEYS = {
    "SockType", "SockPassive", "SockNodeName", "SockServiceName", "SockFamily", "SockProtocol", "SockPathName",
    "SecureSocketWithKey", "SockPathOwner", "SockPathGroup", "SockPathMode", "Bonjour", "MulticastGroup",
}  # fmt: skip
LIMIT_KEYS = {
    "Core",
    "CPU",
    "Data",
    "FileSize",
    "MemoryLock",
    "NumberOfFiles",
    "NumberOfProcesses",
    "ResidentSetSize",
    "Stack",
}
PROCESS_TYPES = {"Background", "Standard", "Adaptive", "Interactive"}


def service(tmp_path: Path, **changes: object) -> Service:
    values: dict[str, object] = {
        "command": this_command("--config", "/home/ann/my config.toml"),
        "socket": tmp_path / "run" / "omlxd.sock",
        "log": tmp_path / "logs" / "omlxd.log",
        "max_dirty": 4 << 30,
        "memory_high": 9 << 30,
        "environment": {"OMLXD_CONFIG": '/home/ann/50% "mine".toml'},
    }
    return Service(**{**values, **changes})  # type: ignore[arg-type]


def test_launch_agent_has_only_keys_of_launchd_plist_with_their_types(tmp_path: Path) -> None:
    agent = plistlib.loads(plistlib.dumps(launch_agent(service(tmp_path))))
    for key, value in agent.items():
        assert isinstance(value, LAUNCHD_KEYS[key]), key
    assert set(agent["KeepAlive"]) <= KEEP_ALIVE_KEYS
    assert set(agent["SoftResourceLimits"]) <= LIMIT_KEYS
    assert agent["ProcessType"] in PROCESS_TYPES
    for sock in agent["Sockets"].values():
        assert set(sock) <= SOCKET_KEYS


def test_launch_agent_starts_on_a_connection_and_again_only_after_a_crash(tmp_path: Path) -> None:
    agent = launch_agent(service(tmp_path))
    assert agent["RunAtLoad"] is False
    assert agent["KeepAlive"] == {"Crashed": True}
    (sock,) = agent["Sockets"].values()  # type: ignore[attr-defined]
    assert sock["SockPathName"] == str(tmp_path / "run" / "omlxd.sock")
    assert sock["SockPathMode"] == 0o600
    assert agent["Umask"] == 0o077


def test_stopping_may_take_as_long_as_the_dirty_bytes_need(tmp_path: Path) -> None:
    small, big = service(tmp_path, max_dirty=0), service(tmp_path, max_dirty=48 << 30)
    assert launch_agent(small)["ExitTimeOut"] == 30
    assert launch_agent(big)["ExitTimeOut"] == 30 + (48 << 30) // 50_000_000
    assert f"TimeoutStopSec={big.stop_seconds}\n" in systemd_service(big)


def test_configuration_error_is_not_restarted(tmp_path: Path) -> None:
    unit = systemd_service(service(tmp_path))
    assert "RestartPreventExitStatus=78\n" in unit
    assert "Restart=on-failure\n" in unit
    assert launch_agent(service(tmp_path))["KeepAlive"] == {"Crashed": True}  # an exit code is no crash


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_to_say_about_the_units(tmp_path: Path) -> None:
    made = service(tmp_path, socket=Path("/run/user/4711/omlxd/50% mine.sock"))
    (tmp_path / "omlxd.service").write_text(systemd_service(made))
    (tmp_path / "omlxd.socket").write_text(systemd_socket(made))
    done = subprocess.run(
        [
            "systemd-analyze",
            "verify",
            "--user",
            "--man=no",
            str(tmp_path / "omlxd.service"),
            str(tmp_path / "omlxd.socket"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    complaints = [line for line in done.stderr.splitlines() if "omlxd" in line]
    assert (done.returncode, complaints) == (0, []), done.stderr


def test_words_of_a_unit_file_survive_spaces_quotes_and_specifiers(tmp_path: Path) -> None:
    unit = systemd_service(service(tmp_path, command=["/opt/my $x/python", "serve", 'a "b"', "100%"]))
    assert 'ExecStart="/opt/my $$x/python" serve "a \\"b\\"" 100%%\n' in unit
    assert 'Environment="OMLXD_CONFIG=/home/ann/50%% \\"mine\\".toml"\n' in unit


class Commands:
    """Records what the service manager is asked; answers from a table, success by default."""

    def __init__(self, answers: dict[str, tuple[int, str]] | None = None) -> None:
        self.asked: list[str] = []
        self.answers = answers or {}

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        line = " ".join(command)
        self.asked.append(line)
        for part, (code, text) in self.answers.items():
            if part in line:
                return subprocess.CompletedProcess(command, code, text, text)
        return subprocess.CompletedProcess(command, 0, "", "")


def test_install_and_uninstall_on_systemd(tmp_path: Path) -> None:
    run = Commands()
    systemd = Systemd(tmp_path / "config", run)
    assert str(systemd.state()).startswith("not installed")
    systemd.install(service(tmp_path), start=True)
    folder = tmp_path / "config" / "systemd" / "user"
    assert sorted(p.name for p in folder.iterdir()) == ["omlxd.service", "omlxd.socket"]
    assert run.asked == [
        "systemctl --user daemon-reload",
        "systemctl --user enable --now omlxd.socket",
        "systemctl --user start omlxd.service",
    ]
    assert systemd.state().running
    assert len(systemd.uninstall()) == 2
    assert list(folder.iterdir()) == []
    assert not systemd.state().installed


def test_install_and_uninstall_on_launchd(tmp_path: Path) -> None:
    run = Commands({"launchctl print": (0, "\tstate = running\n")})
    launchd = Launchd(tmp_path, run)
    launchd.install(service(tmp_path), start=False)
    plist = tmp_path / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    assert plistlib.loads(plist.read_bytes())["Label"] == LABEL
    assert [line.split()[1] for line in run.asked] == ["bootout", "bootstrap"]
    assert str(launchd.state()) == "launchd service, running"
    assert launchd.uninstall() == [plist]
    assert not launchd.state().installed


def test_install_without_start_waits_for_a_connection(tmp_path: Path) -> None:
    run = Commands()
    Systemd(tmp_path, run).install(service(tmp_path), start=False)
    assert not [line for line in run.asked if " start " in line]


def test_refusal_of_the_service_manager_is_passed_on(tmp_path: Path) -> None:
    run = Commands({"daemon-reload": (1, "Failed to connect to bus: No medium found")})
    with pytest.raises(ServiceError, match="systemctl --user daemon-reload: Failed to connect to bus"):
        Systemd(tmp_path, run).install(service(tmp_path), start=False)


def test_failed_install_leaves_the_units_as_they_were(tmp_path: Path) -> None:
    units = Systemd(tmp_path, Commands({"enable": (1, "no")}))
    with pytest.raises(ServiceError):
        units.install(service(tmp_path), start=False)
    assert not any(file.exists() for file in units.files)
    Systemd(tmp_path, Commands()).install(service(tmp_path), start=False)
    before = [file.read_text() for file in units.files]
    with pytest.raises(ServiceError):
        units.install(replace(service(tmp_path), max_dirty=1 << 40), start=False)
    assert [file.read_text() for file in units.files] == before


def _why_no_systemd() -> str:
    if sys.platform != "linux" or os.getuid() != 0:
        return "needs root on Linux, for a mount namespace"
    if not Path("/lib/systemd/systemd").exists() or shutil.which("unshare") is None:
        return "systemd or unshare is not installed"
    return ""


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(bool(_why_no_systemd()), reason=_why_no_systemd())
def test_life_of_the_service_under_a_real_systemd(tmp_path: Path) -> None:
    """Installed, started by a connection, killed, stopped, misconfigured, mended, uninstalled."""
    command = ["unshare", "-m", sys.executable, "-m", "tests.omlxd.systemd_session", str(tmp_path)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "all is well"
