"""What omlxd does under a real systemd user manager, as a program: run it in a mount namespace of its own.

    unshare -m python -m tests.omlxd.systemd_session FOLDER

It gives itself an empty /run, which is what makes systemd believe that it booted this machine, starts
`systemd --user`, and goes through the life of the service. Prints `all is well` at the end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import omlxd
from scripts.daemon_process import CHECKOUT

SYSTEMD = "/lib/systemd/systemd"
PATIENCE_SECONDS = 60.0
CONFIG = '[ram]\nsize = "32MiB"\n[ssd]\nsize = "64MiB"\nmin_free = "0"\n'


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def systemctl(*arguments: str) -> str:
    done = subprocess.run(["systemctl", "--user", *arguments], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip()


def prop(name: str) -> str:
    return systemctl("show", "--value", "-p", name, "omlxd.service")


def command(*arguments: str, code: int = 0) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "omlxd", *arguments, "--json"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    return json.loads(done.stdout)


def connected_pid() -> int:
    """The pid of a daemon that answers; 0 while none does."""
    with suppress(omlxd.OmlxdError), omlxd.connect(timeout=30) as cache:
        return int(cache.call("stats")["daemon"]["pid"])
    return 0


def life(config: Path) -> None:
    made = command("install")
    unit, sock = (Path(file) for file in made["files"])
    assert unit.exists()
    assert sock.exists()
    assert prop("ActiveState") == "inactive"

    first = connected_pid()  # the first connection starts it
    assert first
    wait_for(lambda: prop("ActiveState") == "active")
    assert prop("MainPID") == str(first)
    with omlxd.connect() as cache:
        space = cache.namespace(model="org/one", fingerprint="f", block_tokens=16)
        assert space.store(list(range(16)), [b"x" * 5000]).stored == 1
        list(cache.stream("flush", timeout=60))
    assert os.stat(made["socket"]).st_mode & 0o777 == 0o600

    os.kill(first, signal.SIGKILL)  # a crash: it is there again
    wait_for(lambda: connected_pid() not in (0, first))
    assert prop("ExecMainStatus") == "0"

    stopped = command("stop")  # an orderly end: it stays away until somebody connects
    wait_for(lambda: prop("ActiveState") == "inactive")
    assert stopped["stopped"] is True
    with omlxd.connect(timeout=30) as cache:
        space = cache.namespace(model="org/one", fingerprint="f", block_tokens=16)
        with space.load(list(range(16))) as lease:
            assert [bytes(block.view) for block in lease] == [b"x" * 5000]

    command("stop")
    wait_for(lambda: prop("ActiveState") == "inactive")
    config.write_text('[ram]\nsize = "-1"\n')  # a configuration error: 78, and no restart
    assert connected_pid() == 0
    wait_for(lambda: prop("ExecMainStatus") == "78")
    assert prop("NRestarts") == "0"
    assert prop("ActiveState") == "failed"
    config.write_text(CONFIG)  # mended: the next connection starts it
    wait_for(connected_pid)

    removed = command("uninstall")["removed"]
    assert sorted(removed) == sorted(made["files"])
    assert not Path(made["socket"]).exists()
    wait_for(lambda: connected_pid() == 0)


def main() -> None:
    folder = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    runtime = Path("/run/user/0")
    for made in (runtime, Path("/run/systemd/system"), folder / "config" / "omlxd"):
        made.mkdir(parents=True)
    runtime.chmod(0o700)
    config = folder / "config" / "omlxd" / "config.toml"
    config.write_text(CONFIG)
    for name in [name for name in os.environ if name.startswith("OMLXD_")]:
        del os.environ[name]
    os.environ.update(
        HOME=str(folder),
        XDG_RUNTIME_DIR=str(runtime),
        XDG_CONFIG_HOME=str(folder / "config"),
        XDG_CACHE_HOME=str(folder / "cache"),
        PYTHONPATH=str(CHECKOUT),
    )
    log = (folder / "systemd.log").open("w")
    manager = subprocess.Popen([SYSTEMD, "--user", "--log-target=console"], stdout=log, stderr=log)
    try:
        wait_for(lambda: systemctl("is-system-running") == "running")
        systemctl("set-environment", f"PYTHONPATH={CHECKOUT}")
        life(config)
        complaints = [line for line in (folder / "systemd.log").read_text().splitlines() if "Unknown" in line]
        assert complaints == []
        print("all is well")
    finally:
        manager.terminate()
        manager.wait(30)


if __name__ == "__main__":
    main()
