"""A real Valkey (or Redis) server on loopback, in a directory of its own, started and ended by the test."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.far_host import FarHost

BINARY = shutil.which("valkey-server") or shutil.which("redis-server")
INSTALL = "needs valkey-server or redis-server: apt-get install redis-server (Debian), brew install valkey (macOS)"
PATIENCE = 60.0


def free_port() -> int:
    """A port that nobody listens at now (and 10,000 above it, where a cluster's bus is)."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < 50_000:
            return port


def wait_until(condition, what: str, seconds: float = PATIENCE) -> None:  # type: ignore[no-untyped-def]
    """Until ``condition()`` is true; fails with ``what`` after a generous time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.01)


class ValkeyServer:
    """One process. ``options`` as on its command line, without dashes: ``maxmemory="20mb"``."""

    def __init__(self, folder: Path, *, port: int | None = None, host: FarHost | None = None, **options: str) -> None:
        """``host``: where it runs; None: here, on loopback."""
        self.host = host
        self.address = host.address if host is not None else "127.0.0.1"
        self.folder = folder
        self.port = port or free_port()
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return f"valkey://{self.address}:{self.port}"

    def start(self) -> None:
        if BINARY is None:
            pytest.skip(INSTALL)
        options = {
            "port": str(self.port),
            "bind": self.address,
            "protected-mode": "no",
            "save": "",
            "appendonly": "no",
            **self.options,
        }
        options["dir"] = str(self.folder)
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
        with (self.folder / "log").open("ab") as log:
            command = [BINARY, *words] if self.host is None else self.host.command(BINARY, *words)
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        wait_until(self._listens, f"the server at {self.port}: {(self.folder / 'log').read_text()[-2000:]}")

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()[-2000:]
        with socket.socket() as probe:
            return probe.connect_ex((self.address, self.port)) == 0

    def client(self, **options: object):  # type: ignore[no-untyped-def]
        import valkey

        return valkey.Valkey(self.address, self.port, **options)  # type: ignore[arg-type]

    def pause(self) -> None:
        """It stays connected and does not answer."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """As a power cut: nothing is left."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def running(folder: Path, *, host: FarHost | None = None, **options: str) -> Iterator[ValkeyServer]:
    """A server for the length of a block."""
    server = ValkeyServer(folder, host=host, **options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def cluster(folder: Path, nodes: int = 3) -> Iterator[list[ValkeyServer]]:
    """A cluster of primaries that share the slots evenly."""
    servers = [
        ValkeyServer(
            folder / str(at), cluster_enabled="yes", cluster_node_timeout="1500", cluster_require_full_coverage="no"
        )
        for at in range(nodes)
    ]
    try:
        for server in servers:
            server.start()
        bounds = [16_384 * at // nodes for at in range(nodes + 1)]
        for at, server in enumerate(servers):
            with server.client() as client:
                client.execute_command("CLUSTER ADDSLOTSRANGE", bounds[at], bounds[at + 1] - 1)
                client.execute_command("CONFIG SET", "cluster-announce-ip", "127.0.0.1")
                for other in servers[:at]:
                    client.execute_command("CLUSTER MEET", "127.0.0.1", other.port)
        for server in servers:
            with server.client() as client:
                wait_until(
                    lambda: (
                        client.execute_command("CLUSTER INFO")["cluster_state"] == "ok"
                        and len(client.execute_command("CLUSTER SLOTS")) == nodes
                    ),
                    "the cluster to come about",
                )
        yield servers
    finally:
        for server in servers:
            server.kill()


@contextlib.contextmanager
def replica_of(primary: ValkeyServer, folder: Path) -> Iterator[ValkeyServer]:
    """A replica of one of a cluster's primaries."""
    server = ValkeyServer(folder, **{**primary.options, "cluster_replica_validity_factor": "0"})
    try:
        server.start()
        with server.client() as client, primary.client() as other:
            node = other.execute_command("CLUSTER MYID")
            other.execute_command("CONFIG SET", "repl-diskless-sync-delay", "0")
            client.execute_command("CONFIG SET", "cluster-announce-ip", "127.0.0.1")
            client.execute_command("CLUSTER MEET", "127.0.0.1", primary.port)
            wait_until(lambda: client.execute_command("CLUSTER INFO")["cluster_known_nodes"] == "4", "it to know all")
            client.execute_command("CLUSTER REPLICATE", node)
            wait_until(lambda: client.info("replication")["master_link_status"] == "up", "its primary's data")
        yield server
    finally:
        server.kill()
