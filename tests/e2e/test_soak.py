"""A minute of random clients and random operator commands; `scripts/soak --seconds 3600` is the same for an hour."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from scripts.soak import Soak

SECONDS = 60.0


@pytest.mark.slow
def test_random_clients_and_operators_leave_no_exception_and_nothing_behind(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    report = Soak(tmp_path, SECONDS, seed).run()
    assert report.problems() == [], f"seed {seed}: {report.done}"
    assert report.done["load"] > 20
    assert sum(report.done.values()) > 200
