"""docs/lab.md shows what the commands print, and all that it tells one to type can be typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from omlxd.cli.root import main
from scripts.daemon_process import CHECKOUT

PAGE = (CHECKOUT / "docs" / "lab.md").read_text()
SHOWN = re.findall(r"```console\n\$ omlxd (.*)\n((?:.*\n)*?)```", PAGE)
TYPED = [line.removeprefix("omlxd ") for line in PAGE.splitlines() if line.startswith("omlxd ")]


def without_times(text: str) -> list[str]:
    """What the replays took differs from run to run, and with it the width of its column."""
    return [re.sub(r" +(\d+\.\d s|took)$", "", line.rstrip()) for line in text.rstrip().splitlines()]


def test_there_is_something_to_try() -> None:
    assert len(SHOWN) == 3
    assert len(TYPED) == 3


@pytest.mark.parametrize(("command", "output"), SHOWN, ids=[command.split()[0] for command, _ in SHOWN])
def test_output_is_what_the_command_prints(command: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CHECKOUT)
    result = CliRunner().invoke(main, shlex.split(command), env={"COLUMNS": "80"}, prog_name="omlxd")
    assert result.exit_code == 0, result.output
    assert without_times(result.stdout) == without_times(output)


@pytest.mark.parametrize("line", TYPED)
def test_what_is_to_be_typed_is_understood(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name, *arguments = shlex.split(line)
    if name != "record":
        (tmp_path / "work.jsonl").touch()
    command = main.get_command(click.Context(main), name)
    assert command is not None
    command.make_context(name, arguments)
