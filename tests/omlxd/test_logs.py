from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from omlxd.logs import set_level, start_logging

log = logging.getLogger("omlxd.somewhere")


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger("omlxd")
    before = (root.handlers[:], root.propagate, root.level)
    yield
    root.handlers[:], root.propagate, root.level = before


def test_text_lines_have_time_level_and_place() -> None:
    out = io.StringIO()
    start_logging("info", "text", stream=out, env={})
    log.info("stored %d blocks", 3)
    time, _, rest = out.getvalue().partition(" ")
    assert time.endswith("Z")
    assert len(time) == len("2026-01-31T12:00:00.123Z")
    assert rest == "INFO somewhere: stored 3 blocks\n"


def test_journal_adds_its_own_time() -> None:
    out = io.StringIO()
    start_logging("info", "text", stream=out, env={"JOURNAL_STREAM": "8:1"})
    log.warning("x")
    assert out.getvalue() == "WARNING somewhere: x\n"


def test_json_lines_are_one_object_each_with_the_traceback_inside() -> None:
    out = io.StringIO()
    start_logging("info", "json", stream=out, env={})
    try:
        raise KeyError("gone")
    except KeyError:
        log.exception("restore failed\nbadly")
    (line,) = out.getvalue().splitlines()
    found = json.loads(line)
    assert (found["level"], found["logger"], found["message"]) == ("error", "omlxd.somewhere", "restore failed\nbadly")
    assert "KeyError: 'gone'" in found["error"]


def test_level_changes_live_and_starting_again_does_not_double_lines() -> None:
    out = io.StringIO()
    start_logging("warning", "text", stream=out, env={})
    start_logging("warning", "text", stream=out, env={})
    log.info("no")
    set_level("debug")
    log.debug("yes")
    assert [line.rpartition(": ")[2] for line in out.getvalue().splitlines()] == ["yes"]
