"""Who gets in, and who can read what is stored."""

from __future__ import annotations

import grp
import os
import subprocess
import sys
from pathlib import Path

import pytest

from omlxd.protocol import encode
from tests.omlxd.configured import ConfiguredDaemon, fill, stats_of, wait_for

NOBODY = 65_534
KNOCK = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[3]))
sock = socket.socket(socket.AF_UNIX); sock.settimeout(20)
sock.connect(sys.argv[1])
try:
    sock.sendall(bytes.fromhex(os.environ["HELLO"]))
except BrokenPipeError:
    pass  # the daemon has said its word and closed already
print(sock.recv(100).hex())
"""


def knock(daemon: ConfiguredDaemon, *, gid: int = NOBODY) -> subprocess.CompletedProcess[str]:
    """Another user connects and greets; what is answered, in hexadecimal."""
    return subprocess.run(
        [sys.executable, "-c", KNOCK, str(daemon.socket), str(gid), str(NOBODY)],
        env={"HELLO": encode({"i": 0, "v": "hello", "versions": [1, 1]}).hex()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def is_refused(answer: subprocess.CompletedProcess[str]) -> bool:
    """Was it told off, or cut off before it could read that?"""
    said = bytes.fromhex(answer.stdout.strip())
    return b"this daemon is another user's" in said or (not said and "ConnectionResetError" in answer.stderr)


def test_socket_store_and_their_folders_are_their_owners_alone(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        fill(cache, blocks=2)
        cache.call("flush", timeout=60)
        store = daemon.directory / "store"
        assert daemon.socket.stat().st_mode & 0o777 == 0o600
        assert daemon.socket.parent.stat().st_mode & 0o777 == 0o700
        assert store.stat().st_mode & 0o777 == 0o700
        assert (store / "data.mdb").stat().st_mode & 0o777 == 0o600
        assert (store / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_another_user_is_refused_although_the_files_would_let_them_in(daemon: ConfiguredDaemon) -> None:
    assert "PermissionError" in knock(daemon).stderr
    daemon.socket.parent.chmod(0o755)
    daemon.socket.chmod(0o666)
    assert is_refused(knock(daemon))
    with daemon.connect() as cache:
        wait_for(lambda: stats_of(cache)["counts"].get("refused_foreign_user") == 1)
        assert f"uid {NOBODY}) is refused" in daemon.log.read_text()


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_members_of_the_group_that_is_named_are_let_in_and_others_are_not(tmp_path: Path) -> None:
    group = grp.getgrgid(1)
    daemon = ConfiguredDaemon(tmp_path / "daemon")
    daemon.tables["daemon"]["group"] = f'"{group.gr_name}"'
    daemon.write()
    try:
        daemon.start()
        assert daemon.socket.stat().st_mode & 0o777 == 0o660
        assert daemon.socket.stat().st_gid == group.gr_gid
        daemon.socket.parent.chmod(0o755)
        daemon.socket.chmod(0o666)
        assert is_refused(knock(daemon))
        let_in = knock(daemon, gid=group.gr_gid)
        assert b"boot" in bytes.fromhex(let_in.stdout.strip()), let_in.stderr
    finally:
        daemon.kill()
        daemon.close()
