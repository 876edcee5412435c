from __future__ import annotations

import pytest
from rich.console import Console, RenderableType

from omlxd.cli import views
from omlxd.counting import counted
from tests.omlxd.stats_examples import example


def lines(renderable: RenderableType, width: int = 80) -> list[str]:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get().splitlines()


def test_status_fits_80_columns_and_cuts_no_number() -> None:
    shown = lines(views.status(example(), service="systemd service, running"))
    assert max(map(len, shown)) <= 80
    text = "\n".join(shown)
    for part in (
        "pid 4711",
        "3 h 25 min",
        "5.0 GiB",
        "8.0 GiB",
        "62 %",
        "97 %",
        "2,345",
        "54,321",
        "78 %",
        "24.0 MiB dirty",
        "! the SSD is full",
    ):
        assert part in text, part
    assert "…" not in "".join(line for line in shown if line.startswith(("RAM", "SSD")))


def test_status_shows_the_biggest_namespaces_and_counts_the_rest() -> None:
    text = "\n".join(lines(views.status(example())))
    assert "and 3 more namespaces (--all)" in text
    assert "more namespaces" not in "\n".join(lines(views.status(example(), everything=True)))
    (retired,) = (line for line in lines(views.namespaces(example()["namespaces"])) if "retired" in line)
    assert retired.startswith("01010101")


def test_status_without_an_ssd_tier_says_so() -> None:
    stats = example()
    stats["ssd"] = None
    (ssd,) = (line for line in lines(views.status(stats)) if line.startswith("SSD"))
    assert "off" in ssd


def test_healthy_daemon_is_said_to_be_well() -> None:
    stats = example()
    stats["health"], stats["warnings"] = "ok", []
    assert "all is well" in lines(views.status(stats))[0]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.44, "0.4 s"), (12.4, "12 s"), (185, "3 min"), (3600, "1 h"), (18_720, "5 h 12 min"), (352_800, "4 d 2 h")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert views.duration(seconds) == text


@pytest.mark.parametrize(("used", "limit", "full"), [(0, 10, 0), (5, 10, 8), (10, 10, 16), (20, 10, 16), (0, 0, 0)])
def test_bar_is_as_full_as_the_tier(used: int, limit: int, full: int) -> None:
    assert views.bar(used, limit).plain.count("█") == full


def test_wear_is_told_once_there_is_something_to_tell() -> None:
    stats = example()
    assert "written a day" in "\n".join(lines(views.status(stats)))
    stats["daemon"]["uptime"] = 60.0
    assert "written a day" not in "\n".join(lines(views.status(stats)))


def test_command_that_asks_is_not_among_the_clients() -> None:
    stats = example()
    stats["clients"][0]["name"], stats["clients"][0]["pid"] = "omlxd command", 77
    assert "omlxd command" in "\n".join(lines(views.status(stats)))
    assert "omlxd command" not in "\n".join(lines(views.status(stats, asking=77)))


def test_pins_and_settings_that_wait_are_shown() -> None:
    stats = example()
    stats["pins"] = [{"pin": 1, "key": b"\xab" * 36, "blocks": 1, "bytes": 1 << 20, "seconds_left": 7200.0}]
    stats["daemon"]["needs_restart"] = ["ssd.path"]
    text = "\n".join(lines(views.status(stats)))
    assert "abababababababab" in text
    assert "2 h" in text
    assert "after a restart: ssd.path" in text


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"ram": True, "ref_cnt": 2, "dirty": True, "pins": 1}, "RAM dirty pinned"),
        ({"ram": True, "ssd": True, "ref_cnt": 3, "pins": 1}, "RAM+SSD pinned 2 read"),
        ({"ram": True, "ref_cnt": -1}, "RAM arriving"),
    ],
)
def test_pins_are_no_readers(row: dict[str, object], told: str) -> None:
    assert views.where(row) == told


def test_columns_are_as_wide_as_what_is_in_them() -> None:
    assert views.columns_of([("a", "bb"), ("ccc", "d" * 100)]) == "a    bb\nccc  " + "d" * 100


@pytest.mark.parametrize(("number", "text"), [(0, "0 blocks"), (1, "1 block"), (2345, "2,345 blocks")])
def test_one_thing_is_not_many(number: int, text: str) -> None:
    assert counted(number, "block") == text
