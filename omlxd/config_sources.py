"""Where the configuration comes from.

Four sources, each over the one before: defaults, a TOML file, ``OMLXD_<SECTION>_<KEY>`` in the environment, flags.
They are validated as a whole; every problem is reported in one go, a line each that names the key, the value and what
is allowed. ``load_config`` is pure: it reads the file it is given and nothing else.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from omlxd.config import Config, NamespaceRules, known_keys, tables
from omlxd.config_problems import THE_FILE, ConfigError, Problem


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
    config.remember(origins, notes)
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
    if section in tables() and key:
        return f"{section}.{key}"
    notes.append(f"{name} is set and means nothing: settings are OMLXD_<SECTION>_<KEY>, as in OMLXD_RAM_SIZE")
    return None


def _is_known(key: str) -> bool:
    return key in known_keys()


def _unknown(key: str, value: object, origin: str) -> Problem:
    names = [*known_keys(), *tables(), "namespace"]
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
