"""The configuration: what can be set, what its default is, and what it means on a machine.

Where values come from is in ``config_sources``, what is allowed in ``config_checks``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from omlxd.config_checks import (
    ANY_TOTAL,
    Bytes,
    Codec,
    Dirty,
    Duration,
    Folder,
    Group,
    Listen,
    MinFree,
    Policy,
    Rate,
    RemoteAdmission,
    RemoteUrl,
    Share,
    Size,
    Socket,
    SsdSize,
)
from omlxd.paths import MAX_SOCKET_BYTES, store_path
from omlxd.storage.sizes import parse_size

GIB = 1 << 30


class Section(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Daemon(Section):
    """The process itself."""

    socket: Socket = Field(
        default="", description=f'path of the socket, at most {MAX_SOCKET_BYTES} bytes; "" is the default path'
    )
    group: Group = Field(default="", description='a group whose members may connect too; "": only you')
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="what is logged")
    log_format: Literal["text", "json"] = Field(default="text", description="how a line of the log looks")


class Ram(Section):
    """The tier in shared memory."""

    size: Size = Field(default="auto", description='bytes, "8GiB", "20%" of memory, "auto", or 0 to switch it off')
    policy: Policy = Field(default="prefix", description="what leaves when room is needed")
    segment: Bytes = Field(default="1GiB", description="size of one shared-memory segment")


class Ssd(Section):
    """The tier on the SSD."""

    path: Folder = Field(default_factory=lambda: str(store_path()), description="folder of the store")
    size: SsdSize = Field(
        default="auto", description='bytes, "200GiB", "20%" of the volume, "auto", or 0 to switch it off'
    )
    min_free: MinFree = Field(default="5GiB", description="space on the volume that is left alone, whatever size says")
    policy: Policy = Field(default="prefix", description="what leaves when room is needed")
    durability: Literal["commit", "interval", "none"] = Field(
        default="commit", description="when written data is forced to the disk; none may lose the store at a power cut"
    )
    codec: Codec = Field(default="auto", description="how blocks are stored")
    mode: Literal["write_back", "write_through", "second_touch"] = Field(
        default="write_back",
        description="when a block is written: when it has to leave RAM, at once, or when used or stored again",
    )
    max_dirty: Dirty = Field(
        default="auto", description="the most that a crash may lose: bytes in RAM that are not yet on the SSD"
    )
    any_filesystem: bool = Field(default=False, description="allow a network or FUSE file system (stalls, lost locks)")


class Remote(Section):
    """A tier that is shared with other machines: a Valkey server or cluster (docs/remote.md)."""

    url: RemoteUrl = Field(
        default="",
        description='"valkey://user:password@host:6379", "valkeys://" for TLS, "valkey+cluster://"; "" is off',
    )
    key_file: str = Field(default="", description="file with a pre-shared key: what is sent is sealed with it")
    ca_file: str = Field(default="", description="with TLS: who may have issued the server's certificate")
    ttl: Duration = Field(default="7d", description="how long a block is kept on the server after its last use")
    admission: RemoteAdmission = Field(
        default="everything",
        description='what is sent: "everything", "second_touch", or "prefix:8192" tokens of a chain',
    )
    max_rate: Rate = Field(default="0", description='bytes a second that are sent at most, "50MB"; 0 is no bound')
    deadline: Duration = Field(default="50ms", description="the longest that a lookup waits for the server")
    keep: bool = Field(default=True, description="what is fetched goes to this machine's SSD too")
    tier: str = Field(
        default="omlxd.storage.remote:RemoteTier", description="the class that does it, module:Class: ours or another"
    )


class Metrics(Section):
    """Figures for Prometheus."""

    listen: Listen = Field(default="", description='loopback address and port, "127.0.0.1:9464"; "" is off')


class Models(Section):
    """The folders of the models that engines use, as far as they have told them."""

    watch: bool = Field(default=True, description="retire a model's blocks when its weights change or its folder goes")
    grace_seconds: float = Field(default=60.0, ge=0, le=86_400, description="how long a change must last before that")


class NamespaceRules(Section):
    """What holds for the namespaces of one model."""

    max_share: Share = Field(default="100%", description="the most of a tier that this model may fill")
    codec: Codec | None = Field(default=None, description="how its blocks are stored; default: as [ssd] says")
    remote_ttl: Duration | None = Field(
        default=None, description="how long others have its blocks; default: [remote] ttl"
    )


class Config(Section):
    """A valid configuration. Sizes are kept as written: ``*_bytes`` say what they mean on a machine."""

    daemon: Daemon = Daemon()
    ram: Ram = Field(default_factory=Ram)
    ssd: Ssd = Field(default_factory=Ssd)
    remote: Remote = Remote()
    metrics: Metrics = Metrics()
    models: Models = Models()
    namespace: dict[str, NamespaceRules] = Field(default_factory=dict)

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _notes: list[str] = PrivateAttr(default_factory=list)

    def origin(self, key: str) -> str:
        """Where the value of ``key`` ("ram.size") came from: default, a file, a variable or a flag."""
        return self._origins.get(key, "default")

    def remember(self, origins: Mapping[str, str], notes: Iterable[str]) -> None:
        """Say from now on where values came from, by key, and what is odd."""
        self._origins.update(origins)
        self._notes.extend(notes)

    @property
    def notes(self) -> list[str]:
        """What is odd but no error, in words (a variable with our prefix that means nothing)."""
        return list(self._notes)

    def ram_bytes(self, memory: int) -> int:
        """Budget of the RAM tier on a machine with ``memory`` bytes; 0 is off."""
        return parse_size(self.ram.size, total=memory, auto=auto_ram(memory))

    def ssd_bytes(self, volume: int, available: int) -> int:
        """Limit of the SSD tier.

        Args:
            volume: size of the volume in bytes.
            available: what is free on it and what the store holds already, together.
        """
        return parse_size(self.ssd.size, total=volume, auto=auto_ssd(available, self.min_free_bytes(volume)))

    @property
    def ssd_is_off(self) -> bool:
        """Is there to be no SSD tier, on whatever machine?"""
        return parse_size(self.ssd.size, total=ANY_TOTAL, auto=1) == 0

    def min_free_bytes(self, volume: int) -> int:
        """Bytes of the volume that are left alone."""
        return parse_size(self.ssd.min_free, total=volume)

    def max_dirty_bytes(self, ram: int) -> int:
        """Bytes that may be in RAM alone, of a RAM tier of ``ram`` bytes."""
        return parse_size(self.ssd.max_dirty, total=ram, auto=min(ram // 4, 4 * GIB))

    def segment_bytes(self) -> int:
        """Bytes of one segment of shared memory."""
        return parse_size(self.ram.segment)

    def share_bytes(self, model: str, limit: int) -> int | None:
        """The most of a tier of ``limit`` bytes that a model may fill; None where nothing says so."""
        share = self.rules(model).max_share
        return None if share == "100%" else parse_size(share, total=limit)

    def keeping(self, old: Config, keys: Iterable[str]) -> Config:
        """This configuration with the values that ``keys`` have in ``old``."""
        kept = self.model_dump()
        before = old.model_dump()
        for key in keys:
            section, _, name = key.partition(".")
            if section != "namespace":
                kept[section][name] = before[section][name]
        config = Config.model_validate(kept)
        config.remember({**self._origins, **{key: old.origin(key) for key in keys}}, self._notes)
        return config

    def rules(self, model: str) -> NamespaceRules:
        """What holds for a model's namespaces."""
        return self.namespace.get(model) or NamespaceRules.model_validate({})

    def values(self) -> Iterator[tuple[str, object]]:
        """Every key with its value, in the order of the file: ``("ram.size", "8GiB")``."""
        for section, table in self.model_dump().items():
            for key, value in table.items():
                if section == "namespace":
                    for rule, what in value.items():
                        yield f'namespace."{key}".{rule}', what
                else:
                    yield f"{section}.{key}", value


def tables() -> dict[str, type[Section]]:
    """The sections by name, ``namespace`` aside."""
    found: dict[str, type[Section]] = {}
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found[name] = field.annotation
    return found


def known_keys() -> list[str]:
    """Every key that can be set, ``namespace`` aside."""
    return [f"{name}.{key}" for name, table in tables().items() for key in table.model_fields]


def auto_ram(memory: int) -> int:
    """An eighth of the first 32 GiB and a quarter of the rest: 1 of 8 GiB, 4 of 32, 124 of 512.

    The model itself takes most of a small machine; a big one has room for many conversations.
    """
    return min(memory, 32 * GIB) // 8 + max(memory - 32 * GIB, 0) // 4


def auto_ssd(available: int, min_free: int) -> int:
    """Half of what the volume could give above the floor, at most 256 GiB; 0 on a volume that is nearly full."""
    return max(0, min((available - min_free) // 2, 256 * GIB))
