"""The daemon's log: one line an event, on standard error; keeping and rotating it is the system's business.

What goes in: sizes, counts, reasons, the first digits of keys, names of models and clients. What never does: token ids,
prompt text, payloads.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

ROOT = "omlxd"


class TextLines(logging.Formatter):
    """``2026-01-31T12:00:00.123Z INFO server: text``; without the time where the journal adds its own."""

    def __init__(self, *, with_time: bool) -> None:
        super().__init__("%(levelname)s %(short)s: %(message)s")
        self._with_time = with_time

    def format(self, record: logging.LogRecord) -> str:
        """One line, more only for a traceback."""
        record.short = record.name.removeprefix(f"{ROOT}.")
        line = super().format(record)
        return f"{_time(record)} {line}" if self._with_time else line


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the traceback of an error."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def start_logging(level: str, form: str, *, stream: TextIO | None = None, env: Mapping[str, str] | None = None) -> None:
    """Log to ``stream`` (standard error): ``level`` as in the configuration, ``form`` "text" or "json"."""
    env = os.environ if env is None else env
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines(with_time="JOURNAL_STREAM" not in env))
    root = logging.getLogger(ROOT)
    root.handlers[:] = [handler]
    root.propagate = False
    set_level(level)


def set_level(level: str) -> None:
    """Log from ``level`` on ("debug", "info", "warning", "error"); at once."""
    logging.getLogger(ROOT).setLevel(level.upper())
