"""What every command shares: the configuration, the daemon it talks to, how it prints, how it ends."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from rich.console import Console, RenderableType

from omlxd.config import EXIT_CONFIG, Config, ConfigError, load_config
from omlxd.errors import OmlxdError, Refused, Unavailable
from omlxd.paths import PathError, socket_path

if TYPE_CHECKING:
    from omlxd.client import Cache

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

    def config(self, flags: dict[str, object] | None = None) -> Config:
        """The configuration as the daemon would read it here. Raises ConfigError."""
        return load_config(self.config_file, os.environ, {"daemon.socket": self.socket_option, **(flags or {})})

    def socket(self) -> Path:
        """The daemon's socket: flag, environment, file, default. A broken file does not stand in the way."""
        try:
            chosen = self.config().daemon.socket
        except ConfigError as error:
            click.echo(f"the configuration is not used: {error}", err=True)
            chosen = self.socket_option or ""
        return Path(chosen).expanduser().absolute() if chosen else socket_path()

    @contextmanager
    def daemon(self, *, name: str = "omlxd command", timeout: float = 30.0) -> Iterator[Cache]:
        """A connection to the running daemon."""
        from omlxd.client import connect

        with connect(self.socket(), name=name, timeout=timeout) as cache:
            yield cache


pass_common = click.make_pass_decorator(Common)


def json_option(command: F) -> F:
    """`--json`: one JSON document on standard output instead of tables."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead (docs/cli.md has the schema).")(
        command
    )


def console(*, stderr: bool = False) -> Console:
    """Where people read: colours and the terminal's width on a terminal, neither in a pipe."""
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


def fail(message: str, code: Exit = Exit.FAILED) -> NoReturn:
    """End the command with ``message`` on standard error."""
    click.echo(message, err=True)
    raise SystemExit(int(code))


@contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """Turns what commands raise into a message and an exit code; a traceback is a bug of ours."""
    try:
        yield
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
