"""What every command shares: the configuration, the daemon it talks to, how it prints, how it ends."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from omlxd.config_problems import EXIT_CONFIG, ConfigError, Problem
from omlxd.errors import OmlxdError, Refused, Unavailable
from omlxd.paths import PathError, check_socket_path, socket_path

if TYPE_CHECKING:  # what looks at the daemon only must not wait for the configuration's model, nor for tables
    from rich.console import Console, RenderableType

    from omlxd.client import Cache
    from omlxd.config import Config

F = TypeVar("F", bound=Callable[..., Any])

WIDTH = 80
"""Columns that output fits in when nobody says how wide the terminal is."""


class Exit(IntEnum):
    """Exit codes of every command."""

    OK = 0
    FAILED = 1
    """The daemon or the system refused; the message says why."""
    USAGE = 2
    """The command line makes no sense (click's code)."""
    NO_DAEMON = 3
    """No daemon answers on the socket."""
    NOT_FOUND = 4
    """There is no such block, namespace or client; for `doctor` and `verify`: something is wrong."""
    CONFIG = EXIT_CONFIG
    """The configuration cannot be used."""
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Common:
    """The options that stand before the command."""

    config_file: Path
    socket_option: str | None
    config_must_exist: bool = False
    """Was the file named by a flag? The default one need not be there."""

    def config(self, flags: dict[str, object] | None = None) -> Config:
        """The configuration as the daemon would read it here. Raises ConfigError."""
        from omlxd.config_sources import load_config

        self._require_file()
        return load_config(self.config_file, os.environ, {"daemon.socket": self.socket_option, **(flags or {})})

    def socket(self) -> Path:
        """The daemon's socket: flag, environment, file, default. What else is wrong in the file does not matter here.

        Raises ConfigError (a file was named that is not there), PathError.
        """
        self._require_file()
        chosen = self.socket_option
        for variable in ("OMLXD_SOCKET", "OMLXD_DAEMON_SOCKET"):
            if chosen is None:
                chosen = os.environ.get(variable)
        if chosen is None:
            chosen = _socket_in(self.config_file)
        return check_socket_path(Path(chosen).expanduser()) if chosen else socket_path()

    def _require_file(self) -> None:
        if self.config_must_exist and not self.config_file.exists():
            allowed = "there is no such file; omlxd --config FILE config init writes one"
            raise ConfigError([Problem(str(self.config_file), None, "flag --config", allowed)])

    @contextmanager
    def daemon(self, *, name: str = "omlxd command", timeout: float = 30.0) -> Iterator[Cache]:
        """A connection to the running daemon."""
        from omlxd.client import connect

        with connect(self.socket(), name=name, timeout=timeout) as cache:
            yield cache


def _socket_in(file: Path) -> str:
    """``daemon.socket`` of a configuration file; empty where it says nothing, or cannot be read."""
    try:
        daemon = tomllib.loads(file.read_text(encoding="utf-8")).get("daemon") if file.is_file() else None
    except (OSError, ValueError):
        return ""
    found = daemon.get("socket") if isinstance(daemon, dict) else None
    return found if isinstance(found, str) else ""


pass_common = click.make_pass_decorator(Common)


def json_option(command: F) -> F:
    """`--json`: one JSON document on standard output instead of tables."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead (docs/cli.md has the schema).")(
        command
    )


def console(*, stderr: bool = False) -> Console:
    """Where people read: colours and the terminal's width on a terminal, neither in a pipe."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else int(os.environ.get("COLUMNS", WIDTH))
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


def show(renderable: RenderableType) -> None:
    """Print for people."""
    console().print(renderable)


def show_json(document: object) -> None:
    """Print for programs: one document, keys in a stable order, bytes as hexadecimal."""
    click.echo(json.dumps(document, indent=2, sort_keys=True, default=_json_value))


def json_line(document: object) -> None:
    """Print one line of a stream for programs, at once."""
    click.echo(json.dumps(document, sort_keys=True, default=_json_value))
    sys.stdout.flush()


def _json_value(value: object) -> object:
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def hint(message: str) -> None:
    """Tell something on standard error; on a terminal in lines that break between words."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size((WIDTH, 24)).columns
        lines = message.splitlines()
        message = "\n".join(
            textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) if len(line) > width else line
            for line in lines
        )
    click.echo(message, err=True)


def fail(message: str, code: Exit = Exit.FAILED) -> NoReturn:
    """End the command with ``message`` on standard error."""
    hint(message)
    raise SystemExit(int(code))


@contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """Turns what commands raise into a message and an exit code; a traceback is a bug of ours."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(int(Exit.INTERRUPTED)) from None
    except click.Abort as abort:
        if isinstance(abort.__context__, KeyboardInterrupt):  # at a question, where click makes this of it
            click.echo(err=True)
            raise SystemExit(int(Exit.INTERRUPTED)) from None
        raise
    except ConfigError as error:
        fail(str(error), Exit.CONFIG)
    except Unavailable as error:
        fail(str(error), Exit.NO_DAEMON)
    except Refused as error:
        fail(error.message, Exit.NOT_FOUND if error.code == "not_found" else Exit.FAILED)
    except (OmlxdError, PathError) as error:
        fail(str(error))
    except BrokenPipeError:
        # `omlxd ls | head`: nobody reads on. Python must not complain again when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
