"""Commands against a real daemon: what they print, what they do, how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from omlxd.cli.context import Exit
from omlxd.cli.root import MODULES, main
from scripts.daemon_process import CHECKOUT
from tests.omlxd.configured import ConfiguredDaemon, fill, stats_of, wait_for

INSPECTING = ["status", "ls", "doctor", "config show", "config check", "config show --running"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConfiguredDaemon]:
    """A daemon with two models' blocks, for tests that only look."""
    made = ConfiguredDaemon(tmp_path_factory.mktemp("shared") / "daemon")
    made.start()
    with made.connect() as cache:
        fill(cache, model="org/one", blocks=6)
        fill(cache, model="org/two", blocks=3, nbytes=4096)
        cache.call("flush", timeout=60)
    yield made
    made.kill()
    made.close()


def run(daemon: ConfiguredDaemon, command: str, *, text: str | None = None) -> Result:
    """Run a command in this process, as a pipe would see it."""
    env = {name: "" for name in os.environ if name.startswith("OMLXD_")} | {
        "OMLXD_CONFIG": str(daemon.file),
        "OMLXD_SOCKET": str(daemon.socket),
        "COLUMNS": "80",
    }
    return CliRunner().invoke(main, command.split(), env=env, input=text, prog_name="omlxd")


def done(daemon: ConfiguredDaemon, command: str, *, text: str | None = None) -> str:
    result = run(daemon, command, text=text)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def answer(daemon: ConfiguredDaemon, command: str) -> Any:
    return json.loads(done(daemon, f"{command} --json"))


def first_key(daemon: ConfiguredDaemon, model: str = "org/one", position: int = 0) -> str:
    rows = answer(daemon, f"ls --namespace {model}")["blocks"]
    return str(next(row["key"] for row in rows if row["position"] == position))


@pytest.mark.parametrize("command", INSPECTING)
def test_inspecting_command_prints_json_and_a_table_of_80_columns_without_colours(
    shared: ConfiguredDaemon, command: str
) -> None:
    assert isinstance(json.loads(run(shared, f"{command} --json").stdout), dict)
    shown = run(shared, command).stdout
    assert shown
    assert "\x1b" not in shown
    assert max([len(line) for line in shown.splitlines() if "/" not in line], default=0) <= 80, (
        "only paths may be longer"
    )


@pytest.mark.parametrize("command", sorted(MODULES))
def test_help_of_every_command_says_what_it_does(shared: ConfiguredDaemon, command: str) -> None:
    text = done(shared, f"{command} --help")
    assert text.startswith(f"Usage: omlxd {command}")
    assert max(map(len, text.splitlines())) <= 80
    summary = text.split("\n\n")[1].strip()
    assert summary.endswith((".", ":"))


def test_overview_lists_every_command_on_one_line(shared: ConfiguredDaemon) -> None:
    text = done(shared, "--help")
    for command in MODULES:
        assert any(line.strip().startswith(f"{command} ") for line in text.splitlines()), command
    assert "..." not in text.split("Options:")[1]


def test_status_shows_tiers_models_and_clients(shared: ConfiguredDaemon) -> None:
    shown = done(shared, "status")
    assert "all is well" in shown
    assert "org/one" in shown
    assert "RAM " in shown
    assert answer(shared, "status")["ssd"]["blocks"] == 9


def test_status_with_leases_names_who_holds_them(shared: ConfiguredDaemon) -> None:
    with shared.connect() as cache:
        space = cache.namespace(model="org/one", fingerprint="f", block_tokens=16)
        with space.load(list(range(96))) as lease:
            lease.wait()
            shown = done(shared, "status --leases")
            assert "held for" in shown
            assert "test" in shown
            (row,) = answer(shared, "status --leases")["leases"]
            assert (row["blocks"], row["client"]) == (6, "test")


def test_ls_filters_and_sorts(shared: ConfiguredDaemon) -> None:
    assert answer(shared, "ls")["matching"] == 9
    two = answer(shared, "ls --namespace org/two")
    assert [row["position"] for row in two["blocks"]] == [0, 1, 2]
    assert {row["model"] for row in two["blocks"]} == {"org/two"}
    sizes = [row["bytes"] for row in answer(shared, "ls --sort size")["blocks"]]
    assert sizes == sorted(sizes, reverse=True)
    assert answer(shared, "ls --dirty")["matching"] == 0
    assert answer(shared, "ls --leased")["matching"] == 0
    assert len(answer(shared, "ls --limit 2")["blocks"]) == 2
    assert "2 are shown" in done(shared, "ls --limit 2")


def test_show_tells_everything_of_one_block(shared: ConfiguredDaemon) -> None:
    key = first_key(shared, position=1)
    row = answer(shared, f"show {key[:16]}")
    assert (row["key"], row["position"], row["model"], row["bytes"]) == (key, 1, "org/one", 1 << 20)
    assert row["parent"] == first_key(shared)
    assert f"key           {key}\n" in done(shared, f"show {key[:16]}"), "in one line, to be copied"


def test_key_that_is_not_there_ends_with_4_and_an_ambiguous_one_with_1(shared: ConfiguredDaemon) -> None:
    missing = run(shared, "show ffffffffffffffffffffffff")
    assert missing.exit_code == Exit.NOT_FOUND
    assert "no block's key begins with" in missing.stderr
    keys = [row["key"] for row in answer(shared, "ls")["blocks"]]
    common = next(d for d in "0123456789abcdef" if sum(key.startswith(d) for key in keys) != 1)
    several = run(shared, f"show {common}") if any(key.startswith(common) for key in keys) else None
    if several is not None:
        assert several.exit_code == Exit.FAILED
        assert "give more digits" in several.stderr


@pytest.mark.parametrize("command", ["show nope", "rm --yes nope", "pin nope", "prefetch nope", "get nope"])
def test_what_can_be_no_key_is_wrong_usage(shared: ConfiguredDaemon, command: str) -> None:
    result = run(shared, command)
    assert result.exit_code == Exit.USAGE
    assert "hexadecimal digits are needed" in result.stderr


def test_namespace_that_is_not_there_names_those_that_are(shared: ConfiguredDaemon) -> None:
    result = run(shared, "ls --namespace nobody")
    assert result.exit_code == Exit.NOT_FOUND
    assert "org/one" in result.stderr


def test_get_writes_the_very_bytes(shared: ConfiguredDaemon, tmp_path: Path) -> None:
    key = first_key(shared, "org/two")
    done(shared, f"get {key[:16]} -o {tmp_path / 'block'}")
    with shared.connect() as cache:
        space = cache.namespace(model="org/two", fingerprint="f", block_tokens=16)
        assert space.get(bytes.fromhex(key)[:32]) == (tmp_path / "block").read_bytes()


def test_prefetch_brings_a_chain_from_the_ssd(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        fill(cache, model="org/one", blocks=6)
        cache.call("clear", tier="ram", timeout=60)
        assert stats_of(cache)["ram"]["blocks"] == 0
        assert "6 blocks on the way" in done(daemon, f"prefetch {first_key(daemon, position=5)[:16]}")
        wait_for(lambda: all(row.get("ref_cnt", -1) >= 0 for row in answer(daemon, "ls")["blocks"]))
        again = done(daemon, f"prefetch {first_key(daemon, position=5)[:16]}")
        assert again == "all of it is in RAM already (6 blocks)\n"


def test_pin_holds_a_chain_until_it_is_unpinned(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        fill(cache, model="org/one", blocks=4)
        last = first_key(daemon, position=3)[:16]
        assert "pinned 4 blocks (4.0 MiB) for 12 h" in done(daemon, f"pin {last} --ttl 12h")
        (pin,) = answer(daemon, "status")["pins"]
        assert (pin["blocks"], pin["bytes"]) == (4, 4 << 20)
        assert stats_of(cache)["ram"]["pinned_bytes"] >= 4 << 20
        assert last in done(daemon, "status")
        assert "RAM dirty pinned\n" in done(daemon, f"show {last}") or "RAM+SSD pinned\n" in done(
            daemon, f"show {last}"
        )
        assert answer(daemon, "ls --leased")["matching"] == 0, "no engine holds what is pinned"
        assert "ended 1 pin" in done(daemon, f"unpin {first_key(daemon)[:16]}")
        assert run(daemon, f"unpin {last}").exit_code == Exit.NOT_FOUND
        assert run(daemon, "unpin").exit_code == Exit.USAGE


def test_pins_may_hold_half_of_the_ram_tier_and_end_by_themselves(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        fill(cache, model="org/one", blocks=40)
        refused = run(daemon, f"pin {first_key(daemon, position=39)[:16]}")
        assert refused.exit_code == Exit.FAILED
        assert "at most 32.0 MiB" in refused.stderr
        done(daemon, f"pin {first_key(daemon, position=0)[:16]} --ttl 0.2s")
        wait_for(lambda: not stats_of(cache)["pins"])
        assert "no time" in run(daemon, "pin 00 --ttl soon").output


def test_rm_asks_and_removes(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        fill(cache, model="org/one", blocks=3)
        key = first_key(daemon, position=2)[:16]
        assert run(daemon, f"rm {key}", text="n\n").exit_code == Exit.FAILED
        assert answer(daemon, "ls")["matching"] == 3
        assert "removed 1 block\n" in done(daemon, f"rm {key}", text="y\n")
        assert answer(daemon, "ls")["matching"] == 2


def test_clear_takes_one_model_and_leaves_the_other(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        fill(cache, model="org/one", blocks=3)
        fill(cache, model="org/two", blocks=2)
        cache.call("flush", timeout=60)
        assert "removed 3 blocks (3.0 MiB) from RAM, 3 (3.0 MiB) from the SSD" in done(
            daemon, "clear --namespace org/one --yes"
        )
        assert {row["model"] for row in answer(daemon, "ls")["blocks"]} == {"org/two"}


def two_groups(daemon: ConfiguredDaemon) -> None:
    """A model in two namespaces of three blocks each, as one with two KV groups has them, and a third that is empty."""
    with daemon.connect() as cache:
        for fingerprint in ("one", "two"):
            space = cache.namespace(model="org/groups", fingerprint=fingerprint, block_tokens=16)
            space.store(list(range(48)), [bytes(4096)] * 3)
        cache.namespace(model="org/groups", fingerprint="none", block_tokens=16)
        fill(cache, model="org/other", blocks=1)


def test_model_names_all_of_its_namespaces(daemon: ConfiguredDaemon, tmp_path: Path) -> None:
    two_groups(daemon)
    assert answer(daemon, "ls --namespace org/groups")["matching"] == 6
    made = answer(daemon, f"export org/groups {tmp_path / 'archive'}")
    assert (made["blocks"], made["total"]) == (6, 6)
    assert answer(daemon, "clear --namespace org/groups --yes")["ssd_blocks"] == 6
    assert {row["model"] for row in answer(daemon, "ls")["blocks"]} == {"org/other"}
    assert answer(daemon, f"import {tmp_path / 'archive'}")["blocks"] == 6
    assert answer(daemon, "ls --namespace org/groups")["matching"] == 6


def test_digits_of_one_namespace_name_only_that(daemon: ConfiguredDaemon) -> None:
    two_groups(daemon)
    first = next(r for r in answer(daemon, "status")["namespaces"] if r["model"] == "org/groups" and r["ram_blocks"])
    assert answer(daemon, f"ls --namespace {first['id'][:16]}")["matching"] == 3


def test_status_only_counts_namespaces_that_are_empty_and_that_nobody_uses(daemon: ConfiguredDaemon) -> None:
    two_groups(daemon)
    wait_for(lambda: all(not row["clients"] for row in answer(daemon, "status")["namespaces"]))
    assert "1 namespace without blocks and clients (--all)" in done(daemon, "status")
    assert done(daemon, "status --all").count("org/groups") == 3


def test_put_goes_into_a_namespace_that_is_there(daemon: ConfiguredDaemon, tmp_path: Path) -> None:
    two_groups(daemon)
    (tmp_path / "payload").write_bytes(b"x" * 5000)
    put = f"put --hash {'ab' * 32} {tmp_path / 'payload'}"
    space = next(row for row in answer(daemon, "status")["namespaces"] if row["model"] == "org/other")
    assert answer(daemon, f"{put} --namespace {space['id'][:12]}")["stored"]
    assert answer(daemon, f"show {'ab' * 32}")["namespace"] == space["id"]
    assert run(daemon, f"{put} --namespace org/groups").exit_code == Exit.FAILED
    assert run(daemon, f"{put} --namespace org/nobody").exit_code == Exit.NOT_FOUND
    assert run(daemon, put).exit_code == Exit.USAGE
    assert run(daemon, f"{put} --namespace org/other --model org/other").exit_code == Exit.USAGE


@pytest.mark.parametrize("command", ["events", "top", "status --watch 0.2"])
def test_ctrl_c_ends_what_runs_until_then_with_130_and_no_words(daemon: ConfiguredDaemon, command: str) -> None:
    started = [sys.executable, "-m", "omlxd", *command.split()]
    with subprocess.Popen(
        started, env=daemon.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as follower:
        wait_for(lambda: any(row["pid"] == follower.pid for row in answer(daemon, "status")["clients"]))
        follower.send_signal(signal.SIGINT)
        _, told = follower.communicate(timeout=60)
    assert (follower.returncode, told) == (Exit.INTERRUPTED, "")


def test_status_names_settings_that_wait_for_a_restart(daemon: ConfiguredDaemon) -> None:
    daemon.set("ram.segment", '"2GiB"')
    wait_for(lambda: "in effect after a restart: ram.segment" in done(daemon, "status"))
    findings = answer(daemon, "doctor")["findings"]
    assert any("after a restart: ram.segment" in one["found"] for one in findings)


def test_doctor_says_that_the_daemon_was_started_with_other_settings(daemon: ConfiguredDaemon, tmp_path: Path) -> None:
    def told(**variables: str) -> list[str]:
        env = {**daemon.environment, **variables}
        findings = json.loads(CliRunner().invoke(main, ["doctor", "--json"], env=env).stdout)["findings"]
        return [one["found"] for one in findings if "other settings" in one["found"]]

    assert told() == []
    path = answer(daemon, "status")["ssd"]["path"]
    (found,) = told(OMLXD_SSD_PATH=str(tmp_path / "elsewhere"))
    assert f"ssd.path = {path}" in found
    assert "ram.size" not in found


def test_one_problem_of_the_configuration_is_told_once(daemon: ConfiguredDaemon) -> None:
    daemon.file.write_text('[ram]\nsise = "1GiB"\n')
    reload = run(daemon, "config reload")
    assert reload.exit_code == Exit.CONFIG
    assert (reload.stdout + reload.stderr).count("ram.sise") == 1
    assert run(daemon, "status").stderr == ""
    told = [one for one in json.loads(run(daemon, "doctor --json").stdout)["findings"] if "ram.sise" in one["found"]]
    assert [one["remedy"] for one in told] == [f"correct it in {daemon.file}"]


def test_file_that_was_named_and_is_not_there_ends_with_78(shared: ConfiguredDaemon, tmp_path: Path) -> None:
    for command in ("status", "serve", "config check", "doctor"):
        result = run(shared, f"--config {tmp_path / 'none.toml'} {command}")
        assert result.exit_code == Exit.CONFIG
        assert "there is no such file" in result.stderr


def test_doctor_leaves_shared_folders_alone(shared: ConfiguredDaemon, tmp_path: Path) -> None:
    shared_folder = tmp_path / "everybody's"
    shared_folder.mkdir()
    shared_folder.chmod(0o1777)
    env = {"OMLXD_CONFIG": str(shared.file), "OMLXD_SOCKET": str(shared_folder / "s")}
    result = CliRunner().invoke(main, ["doctor", "--json"], env=env)
    (socket,) = (one for one in json.loads(result.stdout)["findings"] if one["check"] == "socket")
    assert socket["verdict"] == "note"
    assert "chmod" not in socket["remedy"]


def test_log_tells_of_clients_in_plain_words_and_of_commands_only_on_debug(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        cache.call("stats")
        done(daemon, "status")
    wait_for(lambda: re.search(r"\(test, pid \d+\) has gone", daemon.log.read_text()))
    log = daemon.log.read_text()
    assert re.search(r"client \d+ \(test, pid \d+\) has gone: closed by the peer", log)
    assert "omlxd command" not in log
    assert re.search(r"RAM 64.0 MiB, SSD 256.0 MiB at .*store \(0 blocks", log)


def test_clear_of_ram_keeps_what_is_on_the_ssd(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        fill(cache, model="org/one", blocks=3)
        done(daemon, "clear --tier ram --yes")
        assert (stats_of(cache)["ram"]["blocks"], answer(daemon, "ls --tier ssd")["matching"]) == (0, 3)


def test_clear_of_retired_models_takes_only_those(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        fill(cache, model="org/one", blocks=3)
        fill(cache, model="org/two", blocks=2)
        cache.call("retire", namespace="org/one")
        assert next(r for r in stats_of(cache)["namespaces"] if r["model"] == "org/one")["retired"]
        done(daemon, "clear --retired --yes")
        assert {row["model"] for row in answer(daemon, "ls")["blocks"]} == {"org/two"}


def test_clear_by_age_takes_only_what_is_older(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        fill(cache, model="org/one", blocks=3)
        cache.call("flush", timeout=60)
        done(daemon, "clear --older-than 1h --yes")
        assert answer(daemon, "ls")["matching"] == 3
        done(daemon, "clear --older-than 0.001s --yes")
        assert answer(daemon, "ls")["matching"] == 0


def test_flush_writes_what_is_dirty(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        fill(cache, model="org/one", blocks=3)
        assert "wrote" in done(daemon, "flush")
        assert answer(daemon, "ls --dirty")["matching"] == 0
        assert answer(daemon, "ls --tier ssd")["matching"] == 3


def test_put_stores_and_refuses_nonsense(daemon: ConfiguredDaemon, tmp_path: Path) -> None:
    (tmp_path / "payload").write_bytes(b"x" * 5000)
    put = f"put --model org/one --fingerprint f --hash {'ab' * 32} {tmp_path / 'payload'}"
    assert answer(daemon, put) == {"stored": True, "bytes": 5000}
    assert first_key(daemon).startswith("ab" * 32)
    assert run(daemon, put.replace("ab" * 32, "abc")).exit_code == Exit.USAGE
    assert run(daemon, f"{put} --position 3").exit_code == Exit.USAGE


def test_events_tell_what_happens(daemon: ConfiguredDaemon) -> None:
    command = [sys.executable, "-m", "omlxd", "events", "--json"]
    with subprocess.Popen(command, env=daemon.environment, stdout=subprocess.PIPE, text=True) as follower:
        with daemon.connect() as cache:
            wait_for(lambda: any(row["name"] == "omlxd events" for row in stats_of(cache)["clients"]))
            wait_for(lambda: cache.call("stats")["counts"].get("accepted", 0) >= 2)
            fill(cache, model="org/one", blocks=2)
            cache.call("flush", timeout=60)
            cache.call("clear", timeout=60)
            cache.call("retire", namespace="org/one")
            assert follower.stdout is not None
            seen: list[dict[str, Any]] = []
            while not seen or seen[-1]["event"] != "retired":
                seen.append(json.loads(follower.stdout.readline()))
        follower.terminate()
    kinds = [event["event"] for event in seen]
    assert kinds.count("stored") >= 1
    assert kinds.count("spilled") == 2
    removed = [event for event in seen if event["event"] == "removed"]
    assert {event["tier"] for event in removed} <= {"ram", "ssd"}
    assert any(event["gone"] for event in removed)
    assert {event["position"] for event in seen if "position" in event} == {0, 1}


def test_stop_drains_and_everything_is_there_again(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        fill(cache, model="org/one", blocks=10)
    stopped = answer(daemon, "stop")
    assert stopped["stopped"] is True
    daemon.reap()
    daemon.start()
    assert answer(daemon, "ls --tier ssd")["matching"] == 10


def test_without_a_daemon_the_store_is_shown_and_the_exit_code_is_3(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        fill(cache, model="org/one", blocks=3)
    done(daemon, "stop")
    daemon.reap()
    result = run(daemon, "status")
    assert result.exit_code == Exit.NO_DAEMON
    assert str(daemon.directory / "store") in result.stdout.replace("\n", "")
    told = json.loads(run(daemon, "status --json").stdout)
    assert told["running"] is False
    assert told["store_bytes"] > 3 << 20
    assert (told["blocks"], told["payload_bytes"], told["problem"]) == (3, 3 << 20, None)
    assert [row["model"] for row in told["namespaces"]] == ["org/one"]
    assert "org/one" in result.stdout
    for command in ("clear --yes", "flush", "stop", "top", "events"):
        refused = run(daemon, command)
        assert refused.exit_code == Exit.NO_DAEMON
        assert "no daemon listens" in refused.stderr


def test_second_daemon_names_the_first_ones_pid(daemon: ConfiguredDaemon) -> None:
    command = [sys.executable, "-m", "omlxd", "serve"]
    second = subprocess.run(command, env=daemon.environment, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == Exit.FAILED
    assert f"pid {daemon.pid}" in second.stderr
    elsewhere = {**daemon.environment, "OMLXD_SOCKET": str(daemon.socket) + "2"}
    same_store = subprocess.run(command, env=elsewhere, capture_output=True, text=True, timeout=60, check=False)
    assert same_store.returncode == Exit.FAILED
    assert str(daemon.pid) in same_store.stderr


def test_configuration_that_cannot_be_used_ends_serve_with_78(daemon: ConfiguredDaemon, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('[ram]\nsize = "-1"\n[ssd]\nmode = "never"\n')
    environment = {**daemon.environment, "OMLXD_CONFIG": str(tmp_path / "bad.toml")}
    command = [sys.executable, "-m", "omlxd", "serve"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == Exit.CONFIG
    lines = ended.stderr.strip().splitlines()
    assert [line.split(" = ")[0] for line in lines] == ["ram.size", "ssd.mode"]


def test_reader_that_stops_reading_is_no_error(shared: ConfiguredDaemon) -> None:
    shell = f"{sys.executable} -m omlxd ls --json | head -c 10; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", shell], env=shared.environment, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_config_init_writes_a_private_file_once(shared: ConfiguredDaemon, tmp_path: Path) -> None:
    file = tmp_path / "new" / "omlxd.toml"
    done(shared, f"--config {file} config init")
    assert file.stat().st_mode & 0o077 == 0
    assert "fine" in done(shared, f"--config {file} config check")
    assert run(shared, f"--config {file} config init").exit_code == Exit.FAILED
    done(shared, f"--config {file} config init --force")


def test_config_check_tells_problems_as_json_too(shared: ConfiguredDaemon, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[ram]\nsise = 3\n")
    result = run(shared, f"--config {file} config check --json")
    assert result.exit_code == Exit.CONFIG
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem["key"] == "ram.sise"
    assert "ram.size" in problem["allowed"]


def test_config_show_names_origins(shared: ConfiguredDaemon) -> None:
    values = answer(shared, "config show --origin")["values"]
    assert values["ram.size"] == {"value": "64MiB", "origin": str(shared.file)}
    assert values["daemon.socket"]["origin"] == "environment OMLXD_SOCKET"
    assert values["ssd.codec"]["origin"] == "default"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_is_for_the_shell(shared: ConfiguredDaemon, shell: str) -> None:
    assert "_OMLXD_COMPLETE" in done(shared, f"completion {shell}")


def test_install_that_fails_leaves_nothing(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("systemd's units are Linux's; the LaunchAgent is tested in test_service.py")
    fake = tmp_path / "bin" / "systemctl"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'Failed to connect to bus' >&2; exit 1\n")
    fake.chmod(0o755)
    environment = {
        "PATH": f"{fake.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
        "PYTHONPATH": str(CHECKOUT),
    }
    command = [sys.executable, "-m", "omlxd", "install"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == Exit.FAILED
    assert "Failed to connect to bus" in ended.stderr
    assert "nothing of it is left" in ended.stderr
    assert not [file for file in (tmp_path / "config").rglob("*") if file.is_file()]


def test_install_writes_units_that_start_this_installation(tmp_path: Path) -> None:
    """With a `systemctl` that says yes to everything: what is asked of it is tested in test_service.py."""
    fake = tmp_path / "bin" / "systemctl"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexit 0\n")
    fake.chmod(0o755)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OMLXD_")},
        "PATH": f"{fake.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
        "PYTHONPATH": str(CHECKOUT),
        "OMLXD_RAM_SIZE": "2GiB",
    }

    def omlxd(*arguments: str) -> Any:
        command = [sys.executable, "-m", "omlxd", *arguments, "--json"]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    if sys.platform != "linux":
        pytest.skip("systemd's units are Linux's; the LaunchAgent is tested in test_service.py")
    made = omlxd("install")
    unit, sock = (Path(file) for file in made["files"])
    assert f"ExecStart={sys.executable} -m omlxd serve" in unit.read_text()
    assert f"MemoryHigh={3 << 30}" in unit.read_text()
    assert f"ListenStream={made['socket']}" in sock.read_text()
    assert sorted(omlxd("uninstall")["removed"]) == sorted(made["files"])
    assert not unit.exists()


def test_revoke_ends_a_lease_of_another_client(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        fill(cache, model="org/one", blocks=3)
        lease = cache.namespace(model="org/one", fingerprint="f", block_tokens=16).load(list(range(48))).wait()
        (row,) = answer(daemon, "status --leases")["leases"]
        assert "has ended" in done(daemon, f"revoke {row['lease']}")
        wait_for(lambda: all(left["revoked"] for left in answer(daemon, "status --leases")["leases"]))
        assert run(daemon, "revoke 999999").exit_code == Exit.FAILED
        lease.release()


def test_store_of_a_stopped_daemon_can_be_looked_at_and_is_not_changed(
    daemon: ConfiguredDaemon, tmp_path: Path
) -> None:
    with daemon.connect() as cache:
        fill(cache, model="org/one", blocks=4)
        fill(cache, model="org/two", blocks=2, nbytes=5000)
    running = answer(daemon, "ls --namespace org/one")["blocks"]
    key = first_key(daemon, "org/two")
    payload = run(daemon, f"get {key[:16]}").stdout_bytes
    done(daemon, "stop")
    daemon.reap()
    store = daemon.directory / "store"
    before = {path.name: path.read_bytes() for path in store.iterdir() if path.is_file()}
    result = run(daemon, "ls --namespace org/one --json")
    assert result.exit_code == 0
    assert "as it lies on the disk" in result.stderr
    stopped = json.loads(result.stdout)["blocks"]
    assert [(row["key"], row["position"], row["bytes"]) for row in stopped] == [
        (row["key"], row["position"], row["bytes"]) for row in running
    ]
    assert answer(daemon, f"show {key[:16]}")["model"] == "org/two"
    assert run(daemon, f"get {key[:16]}").stdout_bytes == payload
    assert run(daemon, "show ffffffffffffffffffff").exit_code == Exit.NOT_FOUND
    assert run(daemon, "ls --namespace nobody").exit_code == Exit.NOT_FOUND
    assert {path.name: path.read_bytes() for path in store.iterdir() if path.is_file()} == before
    daemon.start()
    assert answer(daemon, "ls --tier ssd")["matching"] == 6


def test_broken_store_of_a_stopped_daemon_is_said_to_be_so(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        fill(cache, model="org/one", blocks=1)
    done(daemon, "stop")
    daemon.reap()
    (daemon.directory / "store" / "data.mdb").write_bytes(b"\0" * 100_000)
    refused = run(daemon, "ls")
    assert refused.exit_code == Exit.NO_DAEMON
    assert "cannot be read" in refused.stderr
    assert json.loads(run(daemon, "status --json").stdout)["problem"]
