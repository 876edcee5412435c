"""Times on the command line: ``90s``, ``15m``, ``12h``, ``7d``."""

from __future__ import annotations

import re

import click

UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_AGE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[smhdw])")


class Age(click.ParamType[float]):
    """Seconds."""

    name = "age"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read it; a usage error that says what is allowed otherwise."""
        if isinstance(value, float):
            return value
        match = _AGE.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is no time: a number with s, m, h, d or w is needed, as in 12h", param, ctx)
        return float(match["number"]) * UNITS[match["unit"]]
