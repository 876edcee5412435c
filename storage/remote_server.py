"""One server of the remote tier, and the few commands that it is asked for.

Everything here blocks and runs on worker threads. Whatever goes wrong comes out as ``Trouble`` with one word for the state
and a sentence for a person; nothing of the client library gets any further.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from omlxd.storage.codec import Buffer
from omlxd.storage.remote_seal import PREFIX
from omlxd.storage.remote_url import Address, Target
from omlxd.storage.tier import Trouble

HOW_TO_INSTALL = "pip install 'omlxd[valkey]'"
READ_BYTES = 256 * 1024
"""What one read of the socket may bring: with less, a 2 MiB value takes the GIL many times."""
PIPELINED_BYTES = 8 << 20
"""Values of one round trip: bounds memory, and how much a broken connection throws away."""


class Moved(Trouble):
    """Another node of the cluster has these names now."""


class _Pipeline(Protocol):
    """What is used of the client library's pipelines (it is typed in part only)."""

    def execute_command(self, *args: object) -> object: ...

    def execute(self, raise_on_error: bool = True) -> list[object]: ...


class _Pool(Protocol):
    def disconnect(self) -> None: ...


class _Client(Protocol):
    """What is used of its clients."""

    connection_pool: _Pool

    def execute_command(self, *args: object) -> object: ...

    def pipeline(self, transaction: bool = True) -> _Pipeline: ...


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a worker waits for the next bytes of a server."""

    ask: float = 1.0
    """For headers; who asks has a deadline of its own and does not wait so long."""
    move: float = 1.0
    """For pieces, either way."""
    connect: float = 1.0


class Server:
    """A node. Connections are made when they are needed and kept; any thread may call."""

    def __init__(self, target: Target, address: Address, patience: Patience, ca_file: str = "") -> None:
        """Connects to nothing yet. ``Trouble`` when the client library is not installed."""
        self.address = address
        self._target = target
        self._asking = _client(target, address, patience.ask, patience.connect, ca_file)
        self._moving = _client(target, address, patience.move, patience.connect, ca_file)

    def close(self) -> None:
        """End all connections."""
        for client in (self._asking, self._moving):
            client.connection_pool.disconnect()

    def ping(self) -> None:
        """Is it there, well, and does it let us read? ``LOADING`` and ``MASTERDOWN`` count as not well."""
        with contextlib.suppress(Moved), self._told():
            self._asking.execute_command("MGET", PREFIX + b"{00}:probe")

    def get_headers(self, names: Sequence[bytes], groups: Sequence[Sequence[bytes]]) -> list[object]:
        """What stands under ``names``: bytes, None, or anything that a stranger has put there; one round trip.

        ``groups``: the same names, those of one slot together; one group when the server is not a cluster's.
        """
        with self._told():
            if len(groups) == 1:
                return list(cast("list[object]", self._asking.execute_command("MGET", *names)))
            pipe = self._asking.pipeline(transaction=False)
            for group in groups:
                pipe.execute_command("MGET", *group)
            answers = pipe.execute(raise_on_error=False)
        found: dict[bytes, object] = {}
        for group, answer in zip(groups, answers, strict=True):
            if isinstance(answer, Exception):
                trouble = self._trouble(answer)
                if not isinstance(trouble, Moved):
                    raise trouble
                continue  # misses until the map of the cluster is read again
            found.update(zip(group, cast("list[object]", answer), strict=True))
        return [found.get(name) for name in names]

    def get_pieces(self, names: Sequence[bytes]) -> list[object]:
        """What stands under ``names``, all of one slot."""
        with self._told():
            return list(cast("list[object]", self._moving.execute_command("MGET", *names)))

    def put(self, values: Iterable[tuple[bytes, Buffer]], ttl_ms: int) -> None:
        """Store values, in order, some at a time; what follows one that was refused is not sent."""
        with self._told():
            for group in _grouped(values):
                pipe = self._moving.pipeline(transaction=False)
                for name, value in group:
                    pipe.execute_command("SET", name, value, "PX", ttl_ms)
                for answer in pipe.execute(raise_on_error=False):
                    if isinstance(answer, Exception):
                        raise answer

    def extend(self, names: Sequence[bytes], ttl_ms: int) -> None:
        """Have ``names`` live for ``ttl_ms`` from now on."""
        with self._told():
            pipe = self._moving.pipeline(transaction=False)
            for name in names:
                pipe.execute_command("PEXPIRE", name, ttl_ms)
            pipe.execute(raise_on_error=False)

    def remove(self, names: Sequence[bytes]) -> None:
        """Remove names, one slot's."""
        with self._told():
            self._moving.execute_command("UNLINK", *names)

    def slots(self) -> list[tuple[int, int, Address]]:
        """First and last slot, and the primary that has them, as this node of a cluster sees it."""
        with self._told():
            answer = self._asking.execute_command("CLUSTER SLOTS")
        # Rows of [first, last, [host, port, id, ...] of the primary, the same of each replica].
        rows = cast("list[tuple[int, int, list[object]]]", answer)
        return [(row[0], row[1], self._address(row[2][0], row[2][1])) for row in rows]

    def _address(self, host: object, port: object) -> Address:
        """As a node tells it; one that does not know its own address is where we have reached it."""
        told = host.decode() if isinstance(host, bytes) else ""
        return Address(told or self.address.host, int(cast(int, port)))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        from valkey.exceptions import ValkeyError

        try:
            yield
        except (ValkeyError, OSError) as error:
            raise self._trouble(error) from error

    def _trouble(self, error: Exception) -> Trouble:
        state, reason = _diagnose(error, self._target)
        kind = Moved if state == "moved" else Trouble
        return kind(state, f"{self.address}: {reason}")


def _grouped(values: Iterable[tuple[bytes, Buffer]]) -> Iterator[list[tuple[bytes, Buffer]]]:
    group: list[tuple[bytes, Buffer]] = []
    size = 0
    for name, value in values:
        group.append((name, value))
        size += len(value)
        if size >= PIPELINED_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _client(target: Target, address: Address, timeout: float, connect: float, ca_file: str) -> _Client:
    try:
        from valkey import Valkey
        from valkey.backoff import NoBackoff
        from valkey.connection import Connection, ConnectionPool, SSLConnection
        from valkey.retry import Retry
    except ImportError as error:
        raise Trouble("refused", f"the client library is missing ({error}): {HOW_TO_INSTALL}") from None
    options: dict[str, object] = {
        "host": address.host,
        "port": address.port,
        "db": target.db,
        "username": target.username,
        "password": target.password,
        "socket_timeout": timeout,
        "socket_connect_timeout": min(connect, max(timeout, 0.1)),
        "socket_keepalive": True,
        "socket_read_size": READ_BYTES,
        "retry": Retry(NoBackoff(), 0),  # whoever asks has a deadline; the breaker decides when to try again
        "client_name": "omlxd",
        "lib_name": None,
        "lib_version": None,
    }
    if target.tls:
        options |= {"ssl_ca_certs": ca_file or None, "ssl_check_hostname": True}
    kind = SSLConnection if target.tls else Connection
    return cast(_Client, Valkey(connection_pool=ConnectionPool(connection_class=kind, max_connections=64, **options)))


def _diagnose(error: Exception, target: Target) -> tuple[str, str]:
    """One word and one sentence for what a client library's error means."""
    from valkey import exceptions as errors

    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text or "certificate verify failed" in text:
        return "refused", (
            "its certificate is not one that we trust; give the file of its issuer as [remote] ca_file, "
            f"and check that the url has the name that it is issued for ({_after_ssl(text)})"
        )
    if "SSL" in text and target.tls:
        return "refused", f"no TLS connection comes about; does it speak TLS at this port? ({_after_ssl(text)})"
    if isinstance(error, errors.AuthenticationError | errors.AuthenticationWrongNumberOfArgsError):
        return "refused", f"it does not let us in: check user and password in [remote] url ({text})"
    if isinstance(error, errors.NoPermissionError):
        return "refused", f"its access rules forbid a command that is needed: see docs/remote.md ({text})"
    if text.startswith(("MOVED ", "ASK ", "TRYAGAIN")):
        return "moved", "the block's slot is on another node, or on its way there"
    if isinstance(error, errors.ReadOnlyError):
        return "read-only", "it takes no writes: it is a replica"
    if isinstance(error, errors.OutOfMemoryError):
        return "full", "it is out of memory and may not evict: set maxmemory-policy allkeys-lru, or raise maxmemory"
    if isinstance(error, errors.BusyLoadingError) or text.startswith(("MASTERDOWN", "CLUSTERDOWN")):
        return "gone", f"it is not ready ({text})"
    if isinstance(error, errors.TimeoutError | TimeoutError):
        return "slow", "it does not answer in time"
    if isinstance(error, errors.ConnectionError | OSError):
        return "gone", f"it cannot be reached ({text.rstrip('.')})"
    if text.startswith("MISCONF"):
        return "read-only", f"it takes no writes now ({text})"
    if text.startswith("NOREPLICAS"):
        return "read-only", f"it takes no writes without its replicas ({text})"
    if text.startswith("WRONGTYPE"):
        return "refused", "under one of our names stands something that is not ours: give omlxd a database of its own"
    if "cluster support disabled" in text:
        return "refused", "it is not a cluster's node: write valkey:// instead of valkey+cluster://"
    return "refused", f"it answers with an error: {text}"


def _after_ssl(text: str) -> str:
    return text[text.find("[SSL") :] if "[SSL" in text else text
