"""`omlxd explain` against a real daemon, and what the daemon remembers for it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

import omlxd
from omlxd.cli.context import Exit
from omlxd.cli.root import main
from omlxd.history import History
from omlxd.storage.journal import Journal, StoreChange
from scripts.daemon_process import DaemonProcess

SIZE = 8
PROMPT = list(range(5 * SIZE + 3))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), ram_size="64MiB", ssd_size="256MiB") as process:
        yield process


@pytest.fixture
def cache(daemon: DaemonProcess) -> Iterator[omlxd.Cache]:
    with omlxd.connect(daemon.socket) as cache:
        yield cache


def run(daemon: DaemonProcess, *arguments: str, text: str | None = None) -> Result:
    env = {name: "" for name in os.environ if name.startswith("OMLXD_")} | {"OMLXD_SOCKET": str(daemon.socket)}
    return CliRunner().invoke(main, ["explain", *arguments], env=env | {"COLUMNS": "80"}, input=text)


def space_of(cache: omlxd.Cache, model: str, *, salt: str | None = None) -> omlxd.Space:
    return cache.namespace(model=model, fingerprint="f", block_tokens=SIZE, salt=salt)


def states(result: Result) -> list[str]:
    assert result.exit_code == 0, (result.output, result.exception)
    document: dict[str, Any] = json.loads(result.stdout)
    (one,) = document["namespaces"]
    return [block["state"] for block in one["blocks"]]


def test_hot_blocks_then_those_that_left_and_why(daemon: DaemonProcess, cache: omlxd.Cache) -> None:
    space = space_of(cache, "told/hot")
    space.store(PROMPT, [bytes(100)] * 5)
    cache.call("remove", keys=space.hashes(PROMPT)[3] + bytes(4))
    result = run(daemon, "--model", "told/hot", "--tokens", "-", "--json", text=json.dumps(PROMPT))
    assert states(result) == ["hot", "hot", "hot", "evicted", "hot"]
    (one,) = json.loads(result.stdout)["namespaces"]
    assert one["restorable_tokens"] == 3 * SIZE
    assert one["tail_tokens"] == 3
    assert one["blocks"][3]["cause"] == "removed"
    assert one["blocks"][3]["at"] > 0
    text = run(daemon, "--model", "told/hot", "--tokens", "-", text=json.dumps(PROMPT)).stdout
    assert "24 of 43 tokens could be restored now" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_branch_says_where_it_leaves_the_stored_prompt(daemon: DaemonProcess, cache: omlxd.Cache) -> None:
    space_of(cache, "told/branch").store(PROMPT, [bytes(100)] * 5)
    branch = [*PROMPT[:20], 999, *PROMPT[21:]]
    result = run(daemon, "--model", "told/branch", "--tokens", "-", "--json", text=json.dumps(branch))
    (one,) = json.loads(result.stdout)["namespaces"]
    assert one["divergence"] == {"start": 16, "stop": 24, "others": 1, "text": ""}
    text = run(daemon, "--model", "told/branch", "--tokens", "-", text=json.dumps(branch)).stdout
    assert "between tokens 16 and 24" in text


def test_blocks_of_another_salt_are_told_apart(daemon: DaemonProcess, cache: omlxd.Cache) -> None:
    space_of(cache, "told/salted", salt="alice").store(PROMPT, [bytes(100)] * 5)
    space_of(cache, "told/salted")
    document = json.loads(
        run(daemon, "--model", "told/salted", "--tokens", "-", "--json", text=json.dumps(PROMPT)).stdout
    )
    theirs, plain = document["namespaces"]
    assert theirs["restorable_tokens"] == 5 * SIZE
    assert {block["state"] for block in plain["blocks"]} == {"other namespace"}
    assert "another salt" in plain["blocks"][0]["cause"]


def test_refused_blocks_say_so(daemon: DaemonProcess, cache: omlxd.Cache) -> None:
    space = space_of(cache, "told/refused")
    result = space.store(PROMPT[:SIZE], [bytes(80 << 20)], timeout=0.0)  # the RAM tier has 64 MiB
    assert result.declined
    shown = run(daemon, "--model", "told/refused", "--tokens", "-", "--json", text=json.dumps(PROMPT))
    assert states(shown)[0] == "refused"
    assert json.loads(shown.stdout)["namespaces"][0]["blocks"][0]["cause"] in result.declined


def test_blocks_on_the_ssd_after_a_restart(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "daemon") as process:
        with omlxd.connect(process.socket) as cache:
            space_of(cache, "told/ssd").store(PROMPT, [bytes(100)] * 5)
        process.stop()
        process.start()
        assert (
            states(run(process, "--model", "told/ssd", "--tokens", "-", "--json", text=json.dumps(PROMPT)))
            == ["SSD"] * 5
        )


@pytest.mark.parametrize(
    ("arguments", "text", "code", "message"),
    [
        ([], "", Exit.USAGE, "either as text"),
        (["--prompt", "-"], "hello", Exit.USAGE, "--model FOLDER"),
        (["--model", "nobody/knows", "--tokens", "-"], "1 2 3", Exit.NOT_FOUND, "a model named nobody/knows"),
        (["--model", "x", "--tokens", "-"], "1 two 3", Exit.FAILED, "'two' is not a token id"),
    ],
)
def test_what_cannot_be_explained(
    daemon: DaemonProcess, arguments: list[str], text: str, code: Exit, message: str
) -> None:
    result = run(daemon, *arguments, text=text)
    assert result.exit_code == code, result.output
    assert message in result.output


def change(event: str, key: bytes, *, gone: bool) -> StoreChange:
    return StoreChange(event, "ram", key, bytes(32), 1, None, 0, "evicted", gone)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.sampled_from(["stored", "gone", "moved"]), st.integers(0, 9)), max_size=60))
def test_history_knows_the_last_departures_and_no_more_than_it_may(steps: list[tuple[str, int]]) -> None:
    journal = Journal(lambda key, tier: False)
    history = History(journal, most=4, clock=lambda: 1.0)
    expected: list[bytes] = []
    for what, number in steps:
        key = bytes([number]) * 36
        event = change("stored" if what == "stored" else "removed", key, gone=what == "gone")
        for listener in journal.listeners:
            listener(event)
        if what != "moved" and key in expected:
            expected.remove(key)
        if what == "gone":
            expected = [*expected, key][-4:]
        assert len(history) == len(expected)
        assert all((history.get(bytes([n]) * 36) is not None) == (bytes([n]) * 36 in expected) for n in range(10))
