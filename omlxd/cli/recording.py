"""`omlxd record`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import omlxd
from omlxd.cli.context import Common, Exit, console, fail, hint, json_option, pass_common, show_json
from omlxd.cli.looking import stats_of
from omlxd.cli.quantities import Bytes, Seconds
from omlxd.cli.views import duration
from omlxd.counting import counted
from omlxd.errors import OmlxdError
from omlxd.storage.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from omlxd.client import Cache
    from omlxd.lab.recording import Scribe

PATIENCE_SECONDS = 20 * 86_400.0
"""How long nothing at all may happen; poll() knows no longer times than 24 days."""
END_BYTES = 4096
"""Room of a recording that is left for its last lines."""


class Full(Exception):
    """The recording is as large as it may be."""


class RecordingFile:
    """A new file for its owner alone that always ends with a whole line."""

    def __init__(self, path: Path, most: int, *, replace: bool) -> None:
        """``most``: bytes. Raises OSError."""
        if replace:
            path.unlink(missing_ok=True)
        self.path = path
        self.size = 0
        self._most = most
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, lines: Iterable[str], *, last: bool = False) -> None:
        """Append lines, all or none of those that fit. Raises Full, OSError (what is there is whole then, too)."""
        data = bytearray()
        room = self._most - self.size - (0 if last else END_BYTES)
        full = False
        for line in lines:
            if len(data) + len(line) > room:
                full = True
                break
            data += line.encode("ascii")
        self._append(data)
        if full and not last:
            raise Full

    def close(self) -> None:
        """Flush to the disk, close; a file without a line is removed."""
        try:
            os.ftruncate(self._fd, self.size)  # an interruption may have come in the middle of a write
            os.fsync(self._fd)
        finally:
            os.close(self._fd)
            if not self.size:
                self.path.unlink(missing_ok=True)

    def _append(self, data: bytearray) -> None:
        os.ftruncate(self._fd, self.size)
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            os.ftruncate(self._fd, self.size)
            raise
        self.size += len(data)


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--seconds", type=Seconds(), metavar="TIME", help="Stop after this time: 600, 90m, 8h.")
@click.option(
    "--max-size",
    type=Bytes(least=1 << 16),
    default="64MiB",
    show_default=True,
    metavar="SIZE",
    help="Stop when the file is so large.",
)
@click.option("--namespace", metavar="NAME", help="Only of this model, or of this namespace id.")
@click.option("--force", is_flag=True, help="Replace FILE when it is there.")
@json_option
@pass_common
def record(
    common: Common, file: Path, seconds: float | None, max_size: int, namespace: str | None, force: bool, as_json: bool
) -> None:
    """Record what engines ask and store, for `replay` and `advise`.

    Until Ctrl-C, or as long as --seconds says. The file is a trace for
    `replay` and `advise`. It has no prompts, no token ids and no hashes:
    blocks are numbered as they come. It may be killed at any time: what is
    in the file by then can be replayed.

    \b
    omlxd record work.jsonl --seconds 8h
    omlxd advise work.jsonl
    """
    from omlxd.lab.recording import Scribe, TooManyBlocks

    if file.exists() and not file.is_file():
        fail(f"{file} is no regular file: a recording cannot replace it")
    if file.exists() and not force:
        fail(f"{file} is there already: --force replaces it")
    with common.daemon(name="omlxd record") as cache:
        scribe = Scribe({"name": file.name.removesuffix(".jsonl"), **_of_daemon(cache)})
        fields: dict[str, Any] = {} if seconds is None else {"seconds": seconds}
        parts = cache.stream(
            "record", timeout=PATIENCE_SECONDS, **fields, **({"namespace": namespace} if namespace else {})
        )
        first = next(parts)  # refused, if it is, before there is a file
        try:
            out = RecordingFile(file, max_size, replace=force)
        except OSError as error:
            fail(f"{file} cannot be written: {error.strerror or error}")
        why, code = "its time was over", Exit.OK
        try:
            with _progress(scribe, out, quiet=as_json) as tell:
                out.write(scribe.lines(first["events"]))
                for part in parts:
                    out.write(scribe.lines(part["events"], part.get("lost", 0)))
                    tell()
        except KeyboardInterrupt:
            why, code = "interrupted", Exit.INTERRUPTED
        except Full:
            why = f"the file is as large as it may be (--max-size {format_size(max_size)})"
        except TooManyBlocks:
            why = "it has as many different blocks as a recording may"
        except OmlxdError as error:
            why, code = f"the daemon has gone ({error})", Exit.NO_DAEMON
        except OSError as error:
            why, code = f"{file} takes no more: {error.strerror or error}", Exit.FAILED
        _finish(out, scribe, why)
    if as_json:
        show_json(
            {
                "file": file.absolute(),
                "requests": scribe.requests,
                "blocks": scribe.blocks,
                "bytes": out.size,
                "seconds": scribe.seconds,
                "lost": scribe.lost,
                "ended": why,
            }
        )
    else:
        _tell_end(file, scribe, out, why, code)
    if not out.size and code == Exit.OK:
        code = Exit.NOT_FOUND
    raise SystemExit(int(code))


def _of_daemon(cache: Cache) -> dict[str, object]:
    """What a recording says of the daemon that made it."""
    stats = stats_of(cache)
    told: dict[str, object] = {
        "omlxd": omlxd.__version__,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "ram_bytes": stats["ram"]["limit"],
        "ram_policy": stats["ram"]["policy"],
    }
    if (ssd := stats["ssd"]) is not None:
        told |= {"ssd_bytes": ssd["limit"], "ssd_policy": ssd["policy"], "ssd_mode": ssd["mode"]}
    return told


def _finish(out: RecordingFile, scribe: Scribe, why: str) -> None:
    """Write what a full disk still takes of the end."""
    try:
        if out.size:
            out.write(scribe.end(why), last=True)
    except OSError as error:
        hint(f"the last lines could not be written: {error.strerror or error}")
    try:
        out.close()
    except OSError as error:
        hint(f"{out.path}: {error.strerror or error}")


def _tell_end(file: Path, scribe: Scribe, out: RecordingFile, why: str, code: Exit) -> None:
    if code in (Exit.FAILED, Exit.NO_DAEMON) or (why != "its time was over" and code == Exit.OK):
        hint(f"ended: {why}")
    if not out.size:
        hint("nothing was asked and nothing stored: there is no recording")
        return
    click.echo(
        f"recorded {counted(scribe.requests, 'request')} for {counted(scribe.blocks, 'block')} "
        f"in {duration(scribe.seconds)}: {format_size(out.size)} in {file}"
    )
    if scribe.lost:
        hint(f"{counted(scribe.lost, 'event')} lost: this recorder was too slow")


@contextmanager
def _progress(scribe: Scribe, out: RecordingFile, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """A line on standard error, where somebody watches."""
    terminal = console(stderr=True)
    if quiet or not terminal.is_terminal:
        yield lambda: None
        return

    def text() -> str:
        return (
            f"recording: {counted(scribe.requests, 'request')}, {counted(scribe.blocks, 'block')}, "
            f"{format_size(out.size)} (Ctrl-C ends it)"
        )

    with terminal.status(text()) as status:
        yield lambda: status.update(text())
