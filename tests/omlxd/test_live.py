"""The file of a running daemon is changed; what it asks for happens, or is refused and said."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import urllib.request
from pathlib import Path

from omlxd.config_sources import load_config
from omlxd.filesystems import disk_bytes
from omlxd.live import APPLIERS, applier_of, changes
from tests.omlxd.configured import ConfiguredDaemon, fill, stats_of, wait_for

MIB = 1 << 20


def test_changes_are_what_differs_in_the_files_order(tmp_path: Path) -> None:
    old = load_config(flags={"ram.size": "1GiB", "ssd.mode": "write_through"})
    new = load_config(flags={"ram.size": "2GiB", "ram.policy": "arc", "ssd.mode": "write_through"})
    assert [(change.key, change.old, change.new) for change in changes(old, new)] == [
        ("ram.size", "1GiB", "2GiB"),
        ("ram.policy", "prefix", "arc"),
    ]


def test_rules_that_appear_and_go_are_changes(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[namespace."a/b"]\nmax_share = "30%"\n')
    ruled, plain = load_config(file), load_config()
    (share,), (gone,) = changes(plain, ruled), changes(ruled, plain)
    assert (share.key, share.old, share.new) == ('namespace."a/b".max_share', None, "30%")
    assert (gone.key, gone.old, gone.new) == ('namespace."a/b".max_share', "30%", None)
    assert applier_of(share.key) is not None


def test_every_setting_is_applied_live_or_is_known_to_need_a_restart() -> None:
    needs_restart = {key for key, _ in load_config().values() if applier_of(key) is None}
    assert needs_restart == {
        "daemon.socket",
        "daemon.group",
        "ram.segment",
        "ssd.path",
        "remote.url",
        "remote.key_file",
        "remote.ca_file",
        "remote.keep",
        "remote.tier",
        "ssd.durability",
        "ssd.any_filesystem",
    }
    assert set(APPLIERS) <= {key for key, _ in load_config().values()}


def test_kept_values_keep_their_origin() -> None:
    old = load_config(flags={"ram.size": "1GiB"})
    new = load_config(flags={"ram.size": "0", "ssd.codec": "raw"})
    kept = new.keeping(old, ["ram.size"])
    assert (kept.ram.size, kept.ssd.codec) == ("1GiB", "raw")


def test_ram_size_shrinks_what_is_held(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        fill(cache, blocks=40)
        cache.call("flush", timeout=60)
        daemon.set("ram.size", '"16MiB"')
        wait_for(lambda: stats_of(cache)["ram"]["limit"] == 16 * MIB)
        wait_for(lambda: stats_of(cache)["ram"]["used"] <= 16 * MIB)
        daemon.set("ram.size", '"96MiB"')
        wait_for(lambda: stats_of(cache)["ram"]["limit"] == 96 * MIB)


def test_ram_policy_changes_and_the_contents_stay(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        fill(cache, blocks=10)
        daemon.set("ram.policy", '"arc"')
        wait_for(lambda: stats_of(cache)["ram"]["policy"] == "arc")
        assert stats_of(cache)["ram"]["blocks"] == 10


def test_ssd_policy_changes_and_the_contents_stay(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        fill(cache, blocks=10)
        cache.call("flush", timeout=60)
        daemon.set("ssd.policy", '"arc"')
        wait_for(lambda: ssd(cache)["policy"] == "arc")
        assert ssd(cache)["blocks"] == 10


def ssd(cache: object) -> dict[str, object]:
    found = stats_of(cache)["ssd"]  # type: ignore[arg-type]
    assert found is not None
    return dict(found)


def test_ssd_size_shrinks_what_is_on_the_disk(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        for model in range(4):
            fill(cache, model=f"org/model-{model}", blocks=30)
        cache.call("flush", timeout=60)
        assert disk_bytes(daemon.directory / "store") > 100 * MIB
        daemon.set("ssd.size", '"48MiB"')
        wait_for(lambda: ssd(cache)["limit"] == 48 * MIB)
        wait_for(lambda: disk_bytes(daemon.directory / "store") <= 48 * MIB)


def test_min_free_is_applied(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        daemon.set("ssd.min_free", '"10MiB"')
        wait_for(lambda: ssd(cache)["min_free"] == 10 * MIB)


def test_write_mode_is_applied_to_what_is_stored_next(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        daemon.set("ssd.mode", '"write_through"')
        wait_for(lambda: ssd(cache)["mode"] == "write_through")
        fill(cache, blocks=4)
        wait_for(lambda: ssd(cache)["blocks"] == 4)


def test_max_dirty_is_applied(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        daemon.set("ssd.max_dirty", '"8MiB"')
        wait_for(lambda: ssd(cache)["max_dirty"] == 8 * MIB)


def test_codec_is_applied_to_what_is_stored_next(daemon: ConfiguredDaemon) -> None:
    daemon.set("ssd.codec", '"raw"')
    with daemon.connect() as cache:
        wait_for(lambda: ssd(cache)["codec"] == "raw")
        fill(cache, model="a", blocks=4, byte=7)
        cache.call("flush", timeout=60)
        assert ssd(cache)["stored_bytes"] == 4 * MIB
        daemon.set("ssd.codec", '"zstd"')
        wait_for(lambda: ssd(cache)["codec"] == "zstd")
        fill(cache, model="b", blocks=4, byte=7)
        cache.call("flush", timeout=60)
        assert int(str(ssd(cache)["stored_bytes"])) < 5 * MIB


def test_share_and_codec_of_a_model_are_applied(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        fill(cache, model="org/small", blocks=1)
        daemon.write('[namespace."org/small"]\nmax_share = "10%"\n')
        wait_for(lambda: 'namespace."org/small".max_share' in cache.call("settings")["values"])
        fill(cache, model="org/small", blocks=40)
        cache.call("flush", timeout=60)
        (row,) = stats_of(cache)["namespaces"]
        assert 0 < row["ssd_bytes"] <= 26 * MIB


def test_log_level_and_format_are_applied(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        daemon.set("daemon.log_level", '"error"')
        wait_for(lambda: stats_of(cache)["daemon"]["log_level"] == "error")
        before = daemon.log.read_text()
        daemon.connect().close()
        wait_for(lambda: len(stats_of(cache)["clients"]) == 1)
        assert daemon.log.read_text() == before
        daemon.tables["daemon"]["log_format"] = '"json"'
        daemon.set("daemon.log_level", '"info"')
        wait_for(lambda: stats_of(cache)["daemon"]["log_level"] == "info")
        daemon.connect().close()
        wait_for(lambda: "has gone" in daemon.log.read_text().removeprefix(before))
        assert daemon.log.read_text().removeprefix(before).startswith('{"time": ')


def test_metrics_are_served_where_the_file_says(daemon: ConfiguredDaemon) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"

    def text() -> str:
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    daemon.set("metrics.listen", f'"{address}"')
    assert "omlxd_tier_used_bytes" in wait_for(text)
    daemon.set("metrics.listen", '"off"')
    wait_for(lambda: not text())


def test_address_that_is_taken_is_said_and_the_rest_is_applied(daemon: ConfiguredDaemon) -> None:
    with socket.socket() as taken, daemon.connect() as cache:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        daemon.tables["ram"]["size"] = '"32MiB"'
        daemon.set("metrics.listen", f'"127.0.0.1:{taken.getsockname()[1]}"')
        wait_for(lambda: "metrics.listen" in (stats_of(cache)["daemon"]["config_problem"] or ""))
        assert stats_of(cache)["ram"]["limit"] == 32 * MIB
        # It is not said once and then forgotten: each further look at the file names it, and so does the next change.
        assert list(cache.call("reload")["refused"]) == ["metrics.listen"]
        daemon.set("ram.size", '"48MiB"')
        wait_for(lambda: stats_of(cache)["ram"]["limit"] == 48 * MIB)
        assert "metrics.listen" in stats_of(cache)["daemon"]["config_problem"]


def test_invalid_file_changes_nothing_and_status_says_why_until_it_is_mended(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        daemon.tables["ram"]["size"] = '"32MiB"'
        daemon.set("ssd.mode", '"sometimes"')
        problem = wait_for(lambda: stats_of(cache)["daemon"]["config_problem"])
        assert "ssd.mode = 'sometimes'" in problem
        assert "write_through" in problem
        stats = stats_of(cache)
        assert stats["ram"]["limit"] == 64 * MIB
        assert stats["health"] == "trouble"
        assert any("ssd.mode" in warning for warning in stats["warnings"])
        assert "ssd.mode = 'sometimes'" in daemon.log.read_text()
        daemon.set("ssd.mode", '"write_back"')
        wait_for(lambda: stats_of(cache)["ram"]["limit"] == 32 * MIB)
        assert stats_of(cache)["daemon"]["config_problem"] is None


def test_setting_that_needs_a_restart_is_named_and_the_others_are_applied(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        daemon.tables["ram"]["segment"] = '"8MiB"'
        daemon.set("ram.size", '"32MiB"')
        wait_for(lambda: stats_of(cache)["daemon"]["needs_restart"] == ["ram.segment"])
        assert stats_of(cache)["ram"]["limit"] == 32 * MIB
        assert cache.call("settings")["values"]["ram.segment"]["value"] == "1GiB"


def test_tier_cannot_be_switched_off_live_and_the_reason_is_said(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        daemon.set("ram.size", "0")
        problem = wait_for(lambda: stats_of(cache)["daemon"]["config_problem"])
        assert "ram.size" in problem
        assert "restart" in problem
        assert stats_of(cache)["ram"]["limit"] == 64 * MIB


def test_reload_applies_at_once_and_tells_what_became_of_it(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        daemon.tables["ram"]["segment"] = '"8MiB"'
        daemon.set("ram.size", '"32MiB"')
        outcome = cache.call("reload")
        told = {*outcome["applied"], *outcome["needs_restart"]}
        assert told == {"ram.size", "ram.segment"} or stats_of(cache)["ram"]["limit"] == 32 * MIB


def test_file_replaced_as_editors_do_is_read(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        beside = daemon.file.with_suffix(".swp")
        beside.write_text(daemon.file.read_text().replace("64MiB", "48MiB"))
        os.replace(beside, daemon.file)
        wait_for(lambda: stats_of(cache)["ram"]["limit"] == 48 * MIB)


def test_weights_that_change_retire_what_was_computed_with_them(daemon: ConfiguredDaemon, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"old weights")
    with daemon.connect() as cache:
        for name, fingerprint in (("org/one", "old"), ("org/two", "else")):
            path = model if name == "org/one" else None
            space = cache.namespace(model=name, fingerprint=fingerprint, block_tokens=16, model_path=path)
            space.store(list(range(32)), [b"x" * 1000, b"y" * 1000])
        with cache.namespace(model="org/one", fingerprint="old", block_tokens=16).load(list(range(32))) as lease:
            assert lease.wait().tokens == 32
        before = {row["model"]: row["retired"] for row in stats_of(cache)["namespaces"]}
        assert before == {"org/one": False, "org/two": False}
        wait_for(lambda: any(row["watched"] for row in stats_of(cache)["namespaces"]))
        (model / "model.safetensors").write_bytes(b"new and longer weights")
        assert wait_for(lambda: [row["model"] for row in stats_of(cache)["namespaces"] if row["retired"]]) == [
            "org/one"
        ]
        with daemon.connect() as again:
            again.namespace(model="org/one", fingerprint="old", block_tokens=16)
            assert not any(row["retired"] for row in stats_of(again)["namespaces"] if row["model"] == "org/one")


def test_folder_that_goes_retires_what_was_computed_with_it(daemon: ConfiguredDaemon, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    with daemon.connect() as cache:
        space = cache.namespace(model="org/one", fingerprint="f", block_tokens=16, model_path=model)
        space.store(list(range(16)), [b"x" * 1000])
        wait_for(lambda: any(row["watched"] for row in stats_of(cache)["namespaces"]))
        shutil.rmtree(model)
        wait_for(lambda: any(row["retired"] for row in stats_of(cache)["namespaces"]))


def test_hangup_reads_the_file_again(daemon: ConfiguredDaemon) -> None:
    with daemon.connect() as cache:
        daemon.set("ram.size", '"32MiB"')
        os.kill(daemon.pid, signal.SIGHUP)
        wait_for(lambda: stats_of(cache)["ram"]["limit"] == 32 * MIB)


def test_retirement_and_weights_are_remembered_over_restarts(daemon: ConfiguredDaemon, tmp_path: Path) -> None:
    changing, steady = tmp_path / "changing", tmp_path / "steady"
    for model in (changing, steady):
        model.mkdir()
        (model / "model.safetensors").write_bytes(b"weights")

    def retired() -> dict[str, bool]:
        with daemon.connect() as cache:
            return {row["model"]: row["retired"] for row in stats_of(cache)["namespaces"]}

    with daemon.connect() as cache:
        for name, path in (("org/changing", changing), ("org/steady", steady), ("org/by-hand", None)):
            space = cache.namespace(model=name, fingerprint="f", block_tokens=16, model_path=path)
            space.store(list(range(16)), [b"x" * 1000])
        wait_for(lambda: sum(row["watched"] for row in stats_of(cache)["namespaces"]) == 2)
        cache.call("retire", namespace="org/by-hand")
    daemon.stop()
    (changing / "model.safetensors").write_bytes(b"weights of another length")
    daemon.start()
    wait_for(lambda: retired()["org/changing"])
    assert retired() == {"org/changing": True, "org/steady": False, "org/by-hand": True}
