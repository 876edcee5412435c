"""Numbers with units on the command line: bytes, seconds, lists of either."""

from __future__ import annotations

import click

from omlxd.storage.durations import parse_duration
from omlxd.storage.sizes import format_size, parse_size


class Bytes(click.ParamType[int]):
    """A number of bytes: `64MiB`."""

    name = "size"

    def __init__(self, least: int = 1) -> None:
        self._least = least

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes; a usage error that says what is allowed otherwise."""
        try:
            size = value if isinstance(value, int) else parse_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if size < self._least:
            self.fail(f"{value!r} is too small: {format_size(self._least)} is the least", param, ctx)
        return size


class Seconds(click.ParamType[float]):
    """A time: `90`, `15m`, `8h`."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds; a usage error that says what is allowed otherwise."""
        try:
            return value if isinstance(value, float) else parse_duration(_number_or_text(str(value)))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Several(click.ParamType[tuple[str, ...]]):
    """Values between commas, each once: `1%,5%`."""

    name = "list"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The values; a usage error where there is none, or an empty one."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(parts):
            self.fail(f"{value!r} has an empty value; values stand between commas, as in 1%,5%", param, ctx)
        return tuple(dict.fromkeys(parts))


def _number_or_text(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text
