from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from omlxd.config import GIB, auto_ram, auto_ssd, known_keys
from omlxd.config_example import example
from omlxd.config_problems import ConfigError
from omlxd.config_sources import load_config


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return file


def test_defaults_are_a_valid_configuration() -> None:
    config = load_config()
    assert config.ram.size == "auto"
    assert config.ssd.mode == "write_back"
    assert config.metrics.listen == ""
    assert config.origin("ram.size") == "default"


def test_missing_file_counts_as_empty(tmp_path: Path) -> None:
    assert load_config(tmp_path / "none.toml") == load_config()


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path, '[ram]\nsize = "1GiB"\npolicy = "arc"\n[ssd]\nsize = "3GiB"\nmode = "write_through"\n')
    env = {"OMLXD_RAM_SIZE": "2GiB", "OMLXD_SSD_SIZE": "4GiB", "HOME": "/nowhere"}
    config = load_config(file, env, {"ram.size": "5GiB", "ssd.path": None})
    assert (config.ram.size, config.ssd.size, config.ram.policy) == ("5GiB", "4GiB", "arc")
    assert config.origin("ram.size") == "flag --ram-size"
    assert config.origin("ssd.size") == "environment OMLXD_SSD_SIZE"
    assert config.origin("ssd.mode") == str(file)
    assert config.origin("ssd.codec") == "default"


def test_socket_has_a_short_variable() -> None:
    config = load_config(env={"OMLXD_SOCKET": "/tmp/s"})
    assert config.daemon.socket == "/tmp/s"
    assert config.origin("daemon.socket") == "environment OMLXD_SOCKET"


def test_configuration_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config().ram.size = "1GiB"  # type: ignore[misc]


def test_values_from_the_environment_are_typed() -> None:
    config = load_config(env={"OMLXD_SSD_ANY_FILESYSTEM": "true", "OMLXD_MODELS_GRACE_SECONDS": "2.5"})
    assert config.ssd.any_filesystem is True
    assert config.models.grace_seconds == 2.5


def test_variable_that_means_nothing_is_noted() -> None:
    (note,) = load_config(env={"OMLXD_RMA_SIZE": "1GiB", "OMLXD_CONFIG": "/x"}).notes
    assert note.startswith("OMLXD_RMA_SIZE is set and means nothing")


def test_namespace_rules_are_found_by_model(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, '[namespace."org/name"]\nmax_share = "30%"\ncodec = "raw"\n'))
    assert config.rules("org/name").max_share == "30%"
    assert config.rules("org/name").codec == "raw"
    assert config.rules("other/one").max_share == "100%"
    assert 'namespace."org/name".max_share' in dict(config.values())
    assert config.origin('namespace."org/name".codec') == str(tmp_path / "config.toml")


INVALID = [
    ('[ram]\nsize = "-5GB"', "ram.size", "'-5GB'", "negative"),
    ('[ram]\nsize = ""', "ram.size", "''", "8GiB"),
    ('[ram]\nsize = "lots"', "ram.size", "'lots'", "8GiB"),
    ("[ram]\nsize = 1.5", "ram.size", "1.5", "neither a whole number nor text"),
    ("[ram]\nsize = true", "ram.size", "True", "neither a whole number nor text"),
    ('[ram]\nsize = "120%"', "ram.size", "'120%'", "more than 100%"),
    ('[ram]\npolicy = "mru"', "ram.policy", "'mru'", "lru"),
    ('[ram]\nsegment = "0"', "ram.segment", "'0'", "cannot be 0"),
    ('[ram]\nsegment = "20%"', "ram.segment", "'20%'", "no total"),
    ('[ssd]\npath = "here/there"', "ssd.path", "'here/there'", "absolute"),
    ('[ssd]\npath = ""', "ssd.path", "''", "a path is needed"),
    ('[ssd]\nmode = "sometimes"', "ssd.mode", "'sometimes'", "'write_through'"),
    ("[ssd]\ndurability = 1", "ssd.durability", "1", "'interval'"),
    ('[ssd]\ncodec = "gzip"', "ssd.codec", "'gzip'", "'zstd-planes'"),
    ('[ssd]\nmax_dirty = "0"', "ssd.max_dirty", "'0'", "cannot be 0"),
    ('[ssd]\nsise = "1GiB"', "ssd.sise", "'1GiB'", "did you mean ssd.size"),
    ('[sdd]\nsize = "1GiB"', "[sdd]", "", "no such table; did you mean ssd"),
    ('[daemon]\nlog_level = "loud"', "daemon.log_level", "'loud'", "'warning'"),
    (f'[daemon]\nsocket = "/tmp/{"x" * 120}"', "daemon.socket", "xxx", "allows 103"),
    ('[metrics]\nlisten = "0.0.0.0:9464"', "metrics.listen", "'0.0.0.0:9464'", "loopback"),
    ('[metrics]\nlisten = "127.0.0.1:99999"', "metrics.listen", "99999", "loopback"),
    ("[models]\ngrace_seconds = -1", "models.grace_seconds", "-1", "greater than or equal to 0"),
    ('[models]\nwatch = "perhaps"', "models.watch", "'perhaps'", "boolean"),
    ('[namespace."a/b"]\nmax_share = "130%"', 'namespace."a/b".max_share', "'130%'", "more than 100%"),
    ('[namespace."a/b"]\nmax_shere = "30%"', 'namespace."a/b".max_shere', "'30%'", "max_share"),
    ('[daemon]\ngroup = "no-such-group-here"', "daemon.group", "'no-such-group-here'", "no such group"),
    ("ram = 3", "ram", "3", "[ram]"),
    ('namespace = "x"', "namespace", "'x'", '[namespace."org/name"]'),
    ("[ram]\nsize = 8GiB", "config.toml", "", "not valid TOML"),
]


@pytest.mark.parametrize(
    ("text", "key", "value", "allowed"), INVALID, ids=[row[1] + str(i) for i, row in enumerate(INVALID)]
)
def test_invalid_file_is_refused_with_key_value_and_what_is_allowed(
    tmp_path: Path, text: str, key: str, value: str, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    (line,) = str(caught.value).splitlines()
    head, _, tail = line.partition(": ")
    assert key in head
    assert value in head
    assert allowed in tail
    assert caught.value.exit_code == 78


def test_all_problems_are_told_at_once_each_with_its_origin(tmp_path: Path) -> None:
    file = write(tmp_path, '[ram]\nsize = "x"\n[ssd]\nmode = "y"\n')
    with pytest.raises(ConfigError) as caught:
        load_config(file, {"OMLXD_SSD_CODEC": "z", "OMLXD_RAM_SISE": "1"}, {"daemon.log_level": "w"})
    told = {problem.key: problem.origin for problem in caught.value.problems}
    assert told == {
        "ram.size": str(file),
        "ssd.mode": str(file),
        "ssd.codec": "environment OMLXD_SSD_CODEC",
        "ram.sise": "environment OMLXD_RAM_SISE",
        "daemon.log_level": "flag --daemon-log-level",
    }


def test_unreadable_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "latin").write_bytes(b"# caf\xe9\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(tmp_path / "latin")


def test_example_file_is_valid_with_and_without_its_comments(tmp_path: Path) -> None:
    assert list(load_config(write(tmp_path, example())).values()) == list(load_config().values())
    lines = example().splitlines()
    settings = [line.removeprefix("# ") for line in lines if line.startswith(("[", "# [")) or " = " in line]
    live = "\n".join(line for line in settings if ":" not in line.split("=")[0])
    assert set(tomllib.loads(live)) == {"daemon", "ram", "ssd", "remote", "metrics", "models", "namespace"}
    config = load_config(write(tmp_path, live))
    assert dict(config.values()).items() > dict(load_config().values()).items()


def test_every_setting_is_in_the_example_and_in_the_values() -> None:
    values = [key for key, _ in load_config().values()]
    assert values == known_keys()
    for key in values:
        assert f"# {key.split('.')[1]} = " in example()


@pytest.mark.parametrize(("gib", "auto"), [(8, 1), (16, 2), (32, 4), (64, 12), (128, 28), (512, 124)])
def test_automatic_ram_suits_small_and_big_machines(gib: int, auto: int) -> None:
    assert auto_ram(gib * GIB) == auto * GIB
    assert load_config().ram_bytes(gib * GIB) == auto * GIB


@pytest.mark.parametrize(("available", "limit"), [(4, 0), (5, 0), (10, 2.5), (105, 50), (2000, 256)])
def test_automatic_ssd_leaves_the_floor_and_half_of_the_rest(available: int, limit: float) -> None:
    assert auto_ssd(available * GIB, 5 * GIB) == limit * GIB
    assert load_config().ssd_bytes(4000 * GIB, available * GIB) == limit * GIB


def test_sizes_mean_shares_of_the_machine() -> None:
    config = load_config(flags={"ram.size": "25%", "ssd.size": "50%", "ssd.min_free": "10%", "ssd.max_dirty": "10%"})
    assert config.ram_bytes(64 * GIB) == 16 * GIB
    assert config.ssd_bytes(1000 * GIB, 1 * GIB) == 500 * GIB
    assert config.min_free_bytes(1000 * GIB) == 100 * GIB
    assert config.max_dirty_bytes(10 * GIB) == GIB
    assert load_config().max_dirty_bytes(8 * GIB) == 2 * GIB
    assert load_config(flags={"ram.size": 0}).ram_bytes(64 * GIB) == 0
