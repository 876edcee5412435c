"""The configuration: what can be set, what is allowed, and where each value came from.

Four sources, each over the one before: defaults, a TOML file, ``OMLXD_<SECTION>_<KEY>`` in the environment, flags.
They are validated as a whole; every problem is reported in one go, a line each that names the key, the value and what
is allowed. ``load_config`` is pure: it reads the file it is given and nothing else.
"""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

from omlxd.config_problems import THE_FILE, ConfigError, Problem
from omlxd.paths import MAX_SOCKET_BYTES, PathError, check_socket_path, store_path
from omlxd.policy.registry import get_policy
from omlxd.storage.durations import parse_duration
from omlxd.storage.remote_url import parse_url
from omlxd.storage.sizes import MIN_SSD_BYTES, format_size, parse_size

GIB = 1 << 30
_ANY = 1 << 62  # a total that makes every percentage valid: only the form is checked when loading


def _size(*, auto: bool = False, percent: bool = False, zero: bool = True, least: int = 0) -> Callable[[object], str]:
    def check(value: object) -> str:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(f"{value!r} is neither a whole number nor text")
        nbytes = parse_size(value, total=_ANY if percent else None, auto=1 if auto else None)
        if nbytes == 0 and not zero:
            raise ValueError(f"size {value!r}: this cannot be 0")
        if 0 < nbytes < least and str(value).strip().lower() != "auto":
            raise ValueError(f"size {value!r}: {format_size(least)} are the least, or 0 to switch it off")
        return str(value).strip()

    return check


def _policy(value: str) -> str:
    get_policy(value)
    return value


def _socket(value: str) -> str:
    if value:
        try:
            check_socket_path(Path(value).expanduser())
        except PathError as error:
            raise ValueError(str(error)) from None
    return value


def _group(value: str) -> str:
    if value:
        import grp

        try:
            grp.getgrnam(value)
        except KeyError:
            raise ValueError('there is no such group on this system; "" is for you alone') from None
    return value


def _folder(value: str) -> str:
    if not value or "\0" in value:
        raise ValueError("a path is needed")
    if not Path(value).expanduser().is_absolute():
        raise ValueError("the path must be absolute (or start with ~): a service has no folder of its own")
    return value


def _listen(value: str) -> str:
    if value in ("", "off"):
        return ""
    host, _, port = value.rpartition(":")
    if host not in ("127.0.0.1", "localhost", "[::1]") or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError('"off", or a loopback address and port like "127.0.0.1:9464"')
    return value


Size = Annotated[str, BeforeValidator(_size(auto=True, percent=True))]
SsdSize = Annotated[str, BeforeValidator(_size(auto=True, percent=True, least=MIN_SSD_BYTES))]
Bytes = Annotated[str, BeforeValidator(_size(zero=False))]
Share = Annotated[str, BeforeValidator(_size(percent=True, zero=False))]
Dirty = Annotated[str, BeforeValidator(_size(auto=True, percent=True, zero=False))]
Policy = Annotated[str, AfterValidator(_policy)]
Codec = Literal["auto", "raw", "zstd", "zstd-planes"]


class Section(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Daemon(Section):
    """The process itself."""

    socket: Annotated[str, AfterValidator(_socket)] = Field(
        default="", description=f'path of the socket, at most {MAX_SOCKET_BYTES} bytes; "" is the default path'
    )
    group: Annotated[str, AfterValidator(_group)] = Field(
        default="", description='a group whose members may connect too; "": only you'
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="what is logged")
    log_format: Literal["text", "json"] = Field(default="text", description="how a line of the log looks")


class Ram(Section):
    """The tier in shared memory."""

    size: Size = Field(default="auto", description='bytes, "8GiB", "20%" of memory, "auto", or 0 to switch it off')
    policy: Policy = Field(default="lru", description="what leaves when room is needed")
    segment: Bytes = Field(default="1GiB", description="size of one shared-memory segment")


class Ssd(Section):
    """The tier on the SSD."""

    path: Annotated[str, AfterValidator(_folder)] = Field(
        default_factory=lambda: str(store_path()), description="folder of the store"
    )
    size: SsdSize = Field(
        default="auto", description='bytes, "200GiB", "20%" of the volume, "auto", or 0 to switch it off'
    )
    min_free: Annotated[str, BeforeValidator(_size(percent=True))] = Field(
        default="5GiB", description="space on the volume that is left alone, whatever size says"
    )
    policy: Policy = Field(default="lru", description="what leaves when room is needed")
    durability: Literal["commit", "interval", "none"] = Field(
        default="commit", description="when written data is forced to the disk; none may lose the store at a power cut"
    )
    codec: Codec = Field(default="auto", description="how blocks are stored")
    mode: Literal["write_back", "write_through", "second_touch"] = Field(
        default="write_back",
        description="when a block is written: when it has to leave RAM, at once, or when used again",
    )
    max_dirty: Dirty = Field(
        default="auto", description="the most that a crash may lose: bytes in RAM that are not yet on the SSD"
    )
    any_filesystem: bool = Field(default=False, description="allow a network or FUSE file system (stalls, lost locks)")


def _remote_url(value: str) -> str:
    if value:
        parse_url(value)
    return value


def _remote_admission(value: str) -> str:
    from omlxd.storage.remote_writer import Admission  # an event loop and more, that only this setting's check needs

    Admission.parse(value)
    return value


def _duration(value: str) -> str:
    parse_duration(value)
    return value


Duration = Annotated[str, AfterValidator(_duration)]


class Remote(Section):
    """A tier that is shared with other machines: a Valkey server or cluster (docs/remote.md)."""

    url: Annotated[str, AfterValidator(_remote_url)] = Field(
        default="",
        description='"valkey://user:password@host:6379", "valkeys://" for TLS, "valkey+cluster://"; "" is off',
    )
    key_file: str = Field(default="", description="file with a pre-shared key: what is sent is sealed with it")
    ca_file: str = Field(default="", description="with TLS: who may have issued the server's certificate")
    ttl: Duration = Field(default="7d", description="how long a block is kept on the server after its last use")
    admission: Annotated[str, AfterValidator(_remote_admission)] = Field(
        default="everything",
        description='what is sent: "everything", "second_touch", or "prefix:8192" tokens of a chain',
    )
    max_rate: Annotated[str, BeforeValidator(_size())] = Field(
        default="0", description='bytes a second that are sent at most, "50MB"; 0 is no bound'
    )
    deadline: Duration = Field(default="50ms", description="the longest that a lookup waits for the server")
    keep: bool = Field(default=True, description="what is fetched goes to this machine's SSD too")
    tier: str = Field(
        default="omlxd.storage.remote:RemoteTier", description="the class that does it, module:Class: ours or another"
    )


class Metrics(Section):
    """Figures for Prometheus."""

    listen: Annotated[str, AfterValidator(_listen)] = Field(
        default="", description='loopback address and port, "127.0.0.1:9464"; "" is off'
    )


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
        return parse_size(self.ssd.size, total=_ANY, auto=1) == 0

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
        config._origins.update(self._origins)
        config._origins.update({key: old.origin(key) for key in keys})
        config._notes.extend(self._notes)
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


def auto_ram(memory: int) -> int:
    """An eighth of the first 32 GiB and a quarter of the rest: 1 of 8 GiB, 4 of 32, 124 of 512.

    The model itself takes most of a small machine; a big one has room for many conversations.
    """
    return min(memory, 32 * GIB) // 8 + max(memory - 32 * GIB, 0) // 4


def auto_ssd(available: int, min_free: int) -> int:
    """Half of what the volume could give above the floor, at most 256 GiB; 0 on a volume that is nearly full."""
    return max(0, min((available - min_free) // 2, 256 * GIB))


def load_config(
    file: Path | None = None, env: Mapping[str, str] | None = None, flags: Mapping[str, object] | None = None
) -> Config:
    """Defaults, then ``file``, then ``env``, then ``flags``, as one valid configuration.

    Args:
        file: a TOML file; one that is not there counts as empty.
        env: variables; those named ``OMLXD_<SECTION>_<KEY>`` count, and ``OMLXD_SOCKET``.
        flags: ``{"ram.size": "8GiB"}``; None values do not count.

    Raises:
        ConfigError: with every problem there is.
    """
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    problems: list[Problem] = []
    notes: list[str] = []
    if file is not None:
        tree = _read_file(file)
        origins = {key: str(file) for key in _leaves(tree)}
    for name, value in sorted((env or {}).items()):
        key = _key_of_variable(name, notes)
        if key is None:
            continue
        if _is_known(key):
            _put(tree, key, value)
            origins[key] = f"environment {name}"
        else:
            problems.append(_unknown(key, value, f"environment {name}"))
    for key, flag in (flags or {}).items():
        if flag is not None:
            _put(tree, key, flag)
            origins[key] = f"flag --{key.replace('.', '-').replace('_', '-')}"
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems += [_problem(detail, origins, file) for detail in error.errors(include_url=False)]
    if problems:
        raise ConfigError(problems)
    config._origins.update(origins)
    config._notes.extend(notes)
    return config


def _read_file(file: Path) -> dict[str, Any]:
    try:
        if file.exists() and not (file.is_file() or file.is_dir()):  # a pipe would be waited for, by the whole daemon
            raise ConfigError([Problem(str(file), None, THE_FILE, "cannot be read: not a regular file")])
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(file), None, THE_FILE, f"not valid TOML: {error}")]) from None
    except OSError as error:
        raise ConfigError([Problem(str(file), None, THE_FILE, f"cannot be read: {error.strerror}")]) from None


def _leaves(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, name))
        else:
            yield _dotted((*above, name))


def _dotted(path: tuple[str | int, ...]) -> str:
    if len(path) > 1 and path[0] == "namespace":
        return ".".join(["namespace", f'"{path[1]}"', *map(str, path[2:])])
    return ".".join(map(str, path))


def _put(tree: dict[str, Any], key: str, value: object) -> None:
    section, _, name = key.partition(".")
    table = tree.setdefault(section, {})
    if isinstance(table, dict):  # otherwise the file is wrong, and validation says so
        table[name] = value


CLIENT_VARIABLES = frozenset({"OMLXD_CONFIG"})
"""Variables with our prefix that are no setting of the daemon."""


def _key_of_variable(name: str, notes: list[str]) -> str | None:
    if name == "OMLXD_SOCKET":
        return "daemon.socket"
    if not name.startswith("OMLXD_") or name in CLIENT_VARIABLES:
        return None
    section, _, key = name.removeprefix("OMLXD_").lower().partition("_")
    if section in _tables() and key:
        return f"{section}.{key}"
    notes.append(f"{name} is set and means nothing: settings are OMLXD_<SECTION>_<KEY>, as in OMLXD_RAM_SIZE")
    return None


def _tables() -> dict[str, type[Section]]:
    tables: dict[str, type[Section]] = {}
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            tables[name] = field.annotation
    return tables


def known_keys() -> list[str]:
    """Every key that can be set, ``namespace`` aside."""
    return [f"{name}.{key}" for name, table in _tables().items() for key in table.model_fields]


def _is_known(key: str) -> bool:
    return key in known_keys()


def _unknown(key: str, value: object, origin: str) -> Problem:
    names = [*known_keys(), *_tables(), "namespace"]
    if key.startswith("namespace."):
        stem = key.rpartition(".")[0]
        names = [f"{stem}.{name}" for name in NamespaceRules.model_fields]
    near = get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
    if isinstance(value, dict):
        return Problem(f"[{key}]", None, origin, f"there is no such table; {hint}")
    return Problem(key, value, origin, f"there is no such setting; {hint}")


def _problem(detail: Any, origins: Mapping[str, str], file: Path | None) -> Problem:
    key = _dotted(detail["loc"])
    origin = origins.get(key) or (str(file) if file else "flag")
    value = detail["input"]
    if detail["type"] == "extra_forbidden":
        return _unknown(key, value, origin)
    if detail["type"] == "model_type" or (key == "namespace" and detail["type"] == "dict_type"):
        header = key if key != "namespace" else 'namespace."org/name"'
        return Problem(key, value, origin, f"a table is needed: [{header}]")
    message = detail["msg"].removeprefix("Value error, ")
    return Problem(key, value, origin, message[0].lower() + message[1:])


def example() -> str:
    """A file with every setting at its default, commented out, with a line on what it does."""
    lines = [
        "# omlxd's configuration. Lines that start with # show the defaults.",
        "# Each [section] is there already: remove the # before a setting to change it.",
        "# Changes are applied while it runs; `omlxd config check` tells what is wrong.",
    ]
    for name, table in _tables().items():
        lines += ["", *_comment(str(table.__doc__)), f"[{name}]"]
        defaults = table.model_validate({}).model_dump()
        for key, field in table.model_fields.items():
            lines += [*_comment(f"{key}: {field.description}"), f"# {key} = {_toml(defaults[key])}"]
    lines += ["", f"# {NamespaceRules.__doc__}", '# [namespace."org/name"]']
    for key, field in NamespaceRules.model_fields.items():
        shown = field.get_default() if field.get_default() is not None else _RULE_EXAMPLES[key]
        lines += [*_comment(f"{key}: {field.description}"), f"# {key} = {_toml(shown)}"]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    """In lines of at most 80 columns."""
    return textwrap.wrap(text, 80, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False)


_RULE_EXAMPLES = {"codec": "zstd-planes", "remote_ttl": "30d"}
"""For settings without a default of their own."""


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
