"""What can be wrong with a configuration. Apart from ``config.py``, so that commands that read none need not load it."""

from __future__ import annotations

from dataclasses import dataclass

EXIT_CONFIG = 78
"""Exit code for a configuration that cannot be used (EX_CONFIG of sysexits.h); service managers do not retry it."""

THE_FILE = "file"
"""Origin of a problem with the file as a whole; its path is the problem's key then."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: the key, the value, where it was set, what is allowed."""

    key: str
    value: object
    origin: str
    allowed: str

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {_shorten(self.value)}"
        return f"{self.key}{shown} ({self.origin}): {self.allowed}"

    @property
    def remedy(self) -> str:
        """Where to correct it."""
        if self.origin == THE_FILE:
            return f"correct {self.key}"
        if self.origin.startswith("environment "):
            return f"correct or unset {self.origin.removeprefix('environment ')}"
        return f"correct it in {self.origin}"


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class ConfigError(Exception):
    """A configuration that cannot be used; its text has a line for each problem."""

    exit_code = EXIT_CONFIG

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems
