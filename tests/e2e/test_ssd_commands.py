"""`omlxd gc`, `verify`, `compact`, `export` and `import`, with a daemon and on its stopped store."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import omlxd
from omlxd.cli.root import main
from omlxd.schema import SsdStats
from scripts.daemon_process import CHECKOUT
from tests.e2e.blocks import chain, payload
from tests.omlxd.configured import ConfiguredDaemon, stats_of, wait_for

NBYTES = 100_000
BLOCKS = 12
MODEL = "org/model"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ConfiguredDaemon]:
    made = ConfiguredDaemon(tmp_path / "daemon")
    made.tables["ssd"]["codec"] = '"raw"'
    made.write()
    made.start()
    yield made
    made.kill()
    made.close()


def run(daemon: ConfiguredDaemon, *command: str) -> Result:
    env = {name: "" for name in os.environ if name.startswith("OMLXD_")} | {
        "OMLXD_CONFIG": str(daemon.file),
        "OMLXD_SOCKET": str(daemon.socket),
        "COLUMNS": "120",
    }
    return CliRunner().invoke(main, list(command), env=env, prog_name="omlxd")


def answer(daemon: ConfiguredDaemon, *command: str, code: int = 0) -> Any:
    result = run(daemon, *command, "--json")
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return json.loads(result.stdout)


def ssd_of(daemon: ConfiguredDaemon) -> SsdStats:
    with daemon.connect() as cache:
        ssd = stats_of(cache)["ssd"]
    assert ssd is not None
    return ssd


def store(daemon: ConfiguredDaemon, chains: int = 1, model: str = MODEL) -> list[list[bytes]]:
    """Some chains, on the SSD when this returns."""
    kept = [chain(number, BLOCKS) for number in range(chains)]
    with omlxd.connect(daemon.socket) as cache:
        space = cache.namespace(model=model, fingerprint="f")
        for keys in kept:
            space.store_keys(keys, [payload(key, NBYTES) for key in keys])
        cache.call("flush", timeout=60)
    return kept


def assert_restored(daemon: ConfiguredDaemon, keys: list[bytes], model: str = MODEL) -> None:
    with omlxd.connect(daemon.socket) as cache:
        space = cache.namespace(model=model, fingerprint="f")
        with space.load_keys(keys, timeout=30) as lease:
            got = [bytes(block.view) for block in lease]
    assert got == [payload(key, NBYTES) for key in keys]


def flip(daemon: ConfiguredDaemon, key: bytes, at: int = 5_000) -> None:
    """Change one byte of a block's stored payload, in the file."""
    file = daemon.directory / "store" / "data.mdb"
    data = file.read_bytes()
    where = data.index(payload(key, NBYTES)[at : at + 64])
    with file.open("r+b") as stream:
        stream.seek(where)
        stream.write(bytes([data[where] ^ 1]))


@pytest.mark.parametrize("running", [True, False])
def test_verify_says_that_all_is_well(daemon: ConfiguredDaemon, running: bool) -> None:
    store(daemon, 2)
    if not running:
        daemon.stop()
    done = answer(daemon, "verify", "--rate", "0")
    assert done["blocks"] == 2 * BLOCKS
    assert done["damaged"] == []
    assert done["after"] == ""


@pytest.mark.parametrize("running", [True, False])
def test_verify_finds_the_damaged_block_removes_it_and_ends_with_4(daemon: ConfiguredDaemon, running: bool) -> None:
    [keys] = store(daemon)
    if running:
        run(daemon, "clear", "--tier", "ram", "--yes")
    else:
        daemon.stop()
    flip(daemon, keys[7])
    done = answer(daemon, "verify", "--rate", "0", code=4)
    assert [one["key"][:64] for one in done["damaged"]] == [keys[7].hex()]
    again = answer(daemon, "verify", "--rate", "0")
    assert again["blocks"] == BLOCKS - 1
    if not running:
        daemon.start()
    assert_restored(daemon, keys[:7])
    with omlxd.connect(daemon.socket) as cache:
        assert cache.namespace(model=MODEL, fingerprint="f").match_keys(keys).blocks == 7


@pytest.mark.parametrize("running", [True, False])
def test_verify_goes_on_where_it_is_told_to(daemon: ConfiguredDaemon, running: bool) -> None:
    [keys] = store(daemon)
    if not running:
        daemon.stop()
    middle = sorted(keys)[4]
    done = answer(daemon, "verify", "--rate", "0", "--after", (middle + bytes(4)).hex())
    assert done["blocks"] == BLOCKS - 5


def test_an_interrupted_verify_says_how_to_go_on(daemon: ConfiguredDaemon) -> None:
    store(daemon)
    daemon.stop()
    slow = subprocess.Popen(
        [sys.executable, "-m", "omlxd", "verify", "--rate", "50KB"],
        env=daemon.environment,
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    owner = daemon.directory / "store" / "owner"
    wait_for(lambda: owner.read_text().startswith(f"{slow.pid}\n"))
    slow.send_signal(2)
    _, told = slow.communicate(timeout=60)
    assert slow.returncode == 130, told
    assert "interrupted" in told
    assert "Traceback" not in told
    assert answer(daemon, "verify", "--rate", "0")["blocks"] == BLOCKS


@pytest.mark.parametrize("running", [True, False])
def test_gc_dry_run_shows_what_a_lower_limit_costs_and_changes_nothing(daemon: ConfiguredDaemon, running: bool) -> None:
    store(daemon, 10)
    held = ssd_of(daemon)["blocks"]
    if running:
        done = answer(daemon, "gc", "--dry-run")
        assert done["blocks"] == 0
    else:
        daemon.stop()
        daemon.tables["ssd"]["size"] = '"6MiB"'
        daemon.write()
        done = answer(daemon, "gc", "--dry-run")
        assert 0 < done["blocks"] < held
        assert done["stored_bytes"] == sum(done["namespaces"].values())
        assert set(done["models"].values()) == {MODEL}
        assert done["models"].keys() == done["namespaces"].keys()
        again = answer(daemon, "gc", "--dry-run")
        assert abs(again["blocks"] - done["blocks"]) <= 2, "it was only a look (that opened the store: some pages)"
        assert answer(daemon, "verify", "--rate", "0")["blocks"] == held
        after = answer(daemon, "gc")
        assert after["used_after"] <= 6 << 20
        assert answer(daemon, "verify", "--rate", "0")["blocks"] <= held - done["blocks"]


def test_a_start_with_a_lower_limit_says_first_what_leaves(daemon: ConfiguredDaemon) -> None:
    store(daemon, 10)
    daemon.stop()
    daemon.tables["ssd"]["size"] = '"6MiB"'
    daemon.write()
    forecast = answer(daemon, "gc", "--dry-run")
    daemon.start()
    wait_for(lambda: ssd_of(daemon)["used"] <= 6 << 20)
    lines = daemon.log.read_text().splitlines()
    [line] = [line for line in lines if "its limit is 6.0 MiB" in line]
    assert MODEL in line
    told = re.search(r"(\d+) blocks \(", line)
    assert told is not None
    assert abs(int(told[1]) - forecast["blocks"]) <= 2


@pytest.mark.parametrize("running", [True, False])
def test_compact_gives_the_space_of_removed_blocks_back(daemon: ConfiguredDaemon, running: bool) -> None:
    [keep, *rest] = store(daemon, 10)
    with omlxd.connect(daemon.socket) as cache:
        gone = b"".join(key + bytes(4) for keys in rest for key in keys)
        cache.call("remove", keys=gone)
    if not running:
        daemon.stop()
    done = answer(daemon, "compact", "--rewrite")
    assert done["rewritten"]
    assert done["after"] < 4_000_000
    assert answer(daemon, "verify", "--rate", "0")["blocks"] == BLOCKS
    if not running:
        daemon.start()
    assert_restored(daemon, keep)
    store(daemon, 2)


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("what", ["namespace", "chain"])
def test_an_archive_carries_blocks_to_another_store(
    daemon: ConfiguredDaemon, tmp_path: Path, running: bool, what: str
) -> None:
    first, second = store(daemon, 2)
    file = tmp_path / "blocks.omlxd"
    if not running:
        daemon.stop()
    done = answer(daemon, "export", MODEL if what == "namespace" else first[5].hex()[:16], str(file))
    expected = 2 * BLOCKS if what == "namespace" else 6
    assert (done["blocks"], done["total"]) == (expected, expected)
    assert file.stat().st_mode & 0o777 == 0o600
    assert run(daemon, "export", MODEL, str(file)).exit_code == 1, "it is there already"
    if running:
        daemon.stop()
    other = ConfiguredDaemon(tmp_path / "other")
    try:
        if running:
            other.start()
        else:
            assert not (other.directory / "store" / "data.mdb").exists(), "import begins a store"
        taken = answer(other, "import", str(file))
        assert (taken["blocks"], taken["present"], taken["declined"]) == (expected, 0, 0)
        assert answer(other, "import", str(file))["present"] == expected
        if not running:
            other.start()
        assert_restored(other, first[:6])
        if what == "namespace":
            assert_restored(other, second)
    finally:
        other.kill()
        other.close()


@pytest.mark.parametrize("running", [True, False])
def test_of_an_archive_that_is_not_whole_nothing_is_taken(
    daemon: ConfiguredDaemon, tmp_path: Path, running: bool
) -> None:
    store(daemon)
    file = tmp_path / "blocks.omlxd"
    answer(daemon, "export", MODEL, str(file))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    run(daemon, "clear", "--yes")
    if not running:
        daemon.stop()
    result = run(daemon, "import", str(file))
    assert result.exit_code == 1
    assert "not whole" in result.stderr
    assert answer(daemon, "verify")["blocks"] == 0


def test_a_store_that_somebody_else_has_open_is_left_alone(daemon: ConfiguredDaemon, tmp_path: Path) -> None:
    """A daemon that serves another socket: its pid is named."""
    store(daemon)
    elsewhere = CliRunner().invoke(
        main,
        ["--socket", str(tmp_path / "nobody"), "verify"],
        env={"OMLXD_CONFIG": str(daemon.file), "OMLXD_SOCKET": ""},
    )
    assert elsewhere.exit_code == 1
    assert str(daemon.pid) in elsewhere.stderr
    assert_restored(daemon, chain(0, BLOCKS))
