"""What can be set of the remote tier: ``[remote]`` of the configuration, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from omlxd.storage.durations import parse_duration
from omlxd.storage.remote_url import Target, parse_url
from omlxd.storage.remote_writer import EVERYTHING, Admission
from omlxd.storage.sizes import parse_size

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """Settings of a running tier. Times in seconds, sizes in bytes."""

    target: Target
    key_file: str = ""
    """Where the pre-shared key is; empty: blocks are stored as they are."""
    ca_file: str = ""
    """Certificates of those who may have issued the server's; empty: the system's."""
    ttl: float = 7 * 86_400.0
    """How long a block is kept on the server after it was written or last fetched late in its life."""
    admission: Admission = EVERYTHING
    max_rate: int = 0
    """Bytes a second that may be written; 0: no bound."""
    deadline: float = 0.05
    """The longest that a lookup waits for the server."""

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> RemoteSettings:
        """From the configuration's table; what is not of ours is left aside. ``ValueError`` names the setting."""
        return cls(
            _named("url", parse_url, str(options.get("url", ""))),
            str(options.get("key_file", "")),
            str(options.get("ca_file", "")),
            _named("ttl", parse_duration, str(options.get("ttl", "7d"))),
            _named("admission", Admission.parse, str(options.get("admission", "everything"))),
            _named("max_rate", parse_size, str(options.get("max_rate", "0"))),
            _named("deadline", parse_duration, str(options.get("deadline", "50ms"))),
        )

    def fixed_changes(self, new: RemoteSettings) -> list[str]:
        """What differs in ``new`` and can only be changed by a restart."""
        fixed = ("target", "key_file", "ca_file")
        return [name for name in fixed if getattr(self, name) != getattr(new, name)]

    def secret_path(self) -> Path | None:
        """The key file; None where there is to be no sealing."""
        return Path(self.key_file).expanduser() if self.key_file else None


def _named(name: str, parse: Callable[[str], Parsed], text: str) -> Parsed:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"remote.{name}: {error}") from None
