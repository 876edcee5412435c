from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from omlxd import activation

ROOT = Path(__file__).resolve().parents[2]


def listener(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    sock.listen()
    return sock


def test_listening_socket_handed_over_by_systemd_is_taken(tmp_path: Path) -> None:
    """As systemd does it: descriptor 3, LISTEN_PID that of the process after exec."""
    script = (
        "import os; from omlxd.activation import inherited_sockets\n"
        "(sock,) = inherited_sockets()\n"
        "assert 'LISTEN_FDS' not in os.environ and not os.get_inheritable(sock.fileno())\n"
        "sock.setblocking(True); peer, _ = sock.accept(); peer.sendall(b'hello from ' + sock.getsockname().encode())\n"
    )
    with listener(tmp_path / "s") as sock:
        manager = (
            f"import os, sys; os.dup2({sock.fileno()}, 3)\n"
            "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1', LISTEN_FDNAMES='x')\n"
            "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])\n"
        )
        command = [sys.executable, "-c", manager, script]
        with subprocess.Popen(command, cwd=ROOT, pass_fds=[sock.fileno()]) as child:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(30)
                client.connect(str(tmp_path / "s"))
                assert client.recv(200) == b"hello from " + str(tmp_path / "s").encode()
            assert child.wait(30) == 0


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"LISTEN_PID": "1", "LISTEN_FDS": "1"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "0"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "lots"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "100000"},
    ],
)
def test_variables_meant_for_another_process_give_nothing(env: dict[str, str]) -> None:
    assert activation.inherited_sockets(env, platform="linux") == []
    assert env == {}


def test_launchd_gives_the_sockets_by_their_name_in_the_plist(tmp_path: Path) -> None:
    asked: list[str] = []
    with listener(tmp_path / "s") as sock:

        def launchd(name: str) -> list[int]:
            asked.append(name)
            return [os.dup(sock.fileno())]

        (found,) = activation.inherited_sockets({}, platform="darwin", launchd=launchd)
        with found:
            assert found.getsockname() == str(tmp_path / "s")
    assert asked == ["Listeners"]


def test_descriptor_that_is_no_unix_socket_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file:
        number = os.dup(file.fileno())
        with pytest.raises(activation.ActivationError, match=f"descriptor {number} .* no socket"):
            activation.inherited_sockets({}, platform="darwin", launchd=lambda name: [number])
        os.close(number)
    refusal = pytest.raises(activation.ActivationError, match="no unix stream socket")
    with socket.socket(socket.AF_INET) as tcp, refusal:
        activation.inherited_sockets({}, platform="darwin", launchd=lambda name: [tcp.fileno()])


def test_waiting_connections_are_refused_before_giving_up(tmp_path: Path) -> None:
    with listener(tmp_path / "s") as sock, socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
        one.connect(str(tmp_path / "s"))
        two.connect(str(tmp_path / "s"))
        assert activation.refuse_waiting([sock]) == 2
        assert one.recv(1) == b""
        assert activation.refuse_waiting([sock]) == 0


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told_through_its_socket(tmp_path: Path, abstract: bool) -> None:
    if abstract and sys.platform != "linux":
        pytest.skip("abstract sockets are Linux's")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        name = f"omlxd-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
        manager.bind("\0" + name if abstract else name)
        env = {"NOTIFY_SOCKET": "@" + name if abstract else name}
        assert activation.notify("READY=1", "STATUS=serving", env=env)
        assert manager.recv(100) == b"READY=1\nSTATUS=serving"


def test_telling_nobody_is_no_error(tmp_path: Path) -> None:
    assert not activation.notify("READY=1", env={})
    assert not activation.notify("READY=1", env={"NOTIFY_SOCKET": "vsock:2:1"})
    assert not activation.notify("READY=1", env={"NOTIFY_SOCKET": str(tmp_path / "gone")})


def test_more_time_is_asked_in_microseconds() -> None:
    assert activation.extend_timeout(12.5) == "EXTEND_TIMEOUT_USEC=12500000"
