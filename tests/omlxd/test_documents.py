"""The pages in docs/ say what the program has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from omlxd.cli.context import Exit
from omlxd.cli.root import MODULES
from omlxd.config import NamespaceRules, known_keys
from omlxd.config_sources import load_config
from omlxd.live import applier_of
from omlxd.metrics import prometheus_text
from tests.omlxd.stats_examples import example

DOCS = Path(__file__).resolve().parents[2] / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text()


@pytest.mark.parametrize("command", sorted(MODULES))
def test_every_command_is_in_the_manual(command: str) -> None:
    assert f"`{command}" in page("cli.md")


def test_every_exit_code_is_in_the_manual() -> None:
    told = set(re.findall(r"^\| (\d+) \|", page("cli.md"), re.MULTILINE))
    assert told == {str(int(code)) for code in Exit}


@pytest.mark.parametrize("key", known_keys())
def test_every_setting_is_documented_with_its_default_and_how_it_is_applied(key: str) -> None:
    row = [line for line in page("configuration.md").splitlines() if line.startswith(f"| `{key}` |")][-1]
    _, _, default, applied, _, *_ = (cell.strip() for cell in row.split("|"))
    assert applied == ("live" if applier_of(key) else "restart")
    value = dict(load_config().values())[key]
    if key != "ssd.path":  # that depends on whose home it is
        shown = json.dumps(int(value) if isinstance(value, float) else value)
        assert default == f"`{shown}`"


def test_every_rule_of_a_namespace_is_documented() -> None:
    for name in NamespaceRules.model_fields:
        assert f'`namespace."org/name".{name}`' in page("configuration.md")


def test_dashboard_asks_only_for_metrics_that_exist() -> None:
    stats = example()
    stats["namespaces"] = stats["namespaces"][:1]
    stats["namespaces"][0]["counts"] = {
        "hits_ram": 1, "hits_ssd": 1, "misses": 1, "hit_bytes_ram": 1, "stored_bytes": 1, "declined_no_room": 1,
    }  # fmt: skip
    names = ("load_seconds", "restore_seconds", "ram_eviction_age_seconds", "ram_reuse_gap_seconds")
    stats["histograms"] = dict.fromkeys(names, stats["histograms"]["load_seconds"])
    text = prometheus_text(stats).decode()
    served = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    dashboard = json.loads(page("grafana.json"))
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"omlxd_\w+", target["expr"])
    }
    assert asked
    assert asked <= served


def test_metrics_that_are_named_in_the_manual_exist() -> None:
    stats = example()
    text = prometheus_text(stats).decode()
    for name in ("omlxd_ram_pinned_bytes", "omlxd_ssd_dirty_bytes", "omlxd_ssd_life_years", "omlxd_events_total"):
        assert name in page("operating.md")
        assert f"\n{name}" in text


@pytest.mark.parametrize("name", ["cli.md", "configuration.md", "operating.md", "security.md"])
def test_links_between_pages_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page(name)):
        if "://" not in target:
            assert (DOCS / target).exists(), target
