"""Where the remote tier's server is: ``[remote] url``."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

DEFAULT_PORT = 6379
SCHEMES = {"valkey": False, "valkeys": True, "redis": False, "rediss": True}
"""Names of the protocol: with TLS?"""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Target:
    """What ``[remote] url`` says. ``password`` and ``username`` are never shown."""

    address: Address
    cluster: bool
    tls: bool
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    db: int = 0

    def __str__(self) -> str:
        scheme = ("valkeys" if self.tls else "valkey") + ("+cluster" if self.cluster else "")
        return f"{scheme}://{self.address}" + (f"/{self.db}" if self.db else "")


def parse_url(url: str) -> Target:
    """``valkey[s][+cluster]://[user:password@]host[:port][/db]``. ``ValueError`` says what is wrong, without the password."""
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    if scheme not in SCHEMES or kind not in ("", "cluster") or not parts.hostname:
        raise ValueError("write valkey://host:6379, valkeys://... for TLS, valkey+cluster://... for a cluster")
    try:
        port = parts.port or DEFAULT_PORT
    except ValueError:
        raise ValueError("the port must be a number up to 65535") from None
    path = parts.path.strip("/")
    if path and (not path.isdigit() or kind):
        raise ValueError("after the host comes nothing, or the number of a database (a cluster has only one)")
    return Target(
        Address(parts.hostname, port),
        kind == "cluster",
        SCHEMES[scheme],
        unquote(parts.username) if parts.username else None,
        unquote(parts.password) if parts.password else None,
        int(path or 0),
    )
