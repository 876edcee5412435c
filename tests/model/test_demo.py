"""./scripts/demo, as a person runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.daemon_process import CHECKOUT
from scripts.demo import identical
from scripts.demo_engine import BLOCK_TOKENS, Answer

pytestmark = [pytest.mark.model, pytest.mark.slow]


def test_ram_and_ssd_runs_reuse_every_whole_block_and_answer_alike(smollm_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.demo", "--json"], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert list(figures) == ["cold", "ram", "ssd", "identical"]
    assert figures["identical"] is True
    assert figures["cold"]["reused"] == 0
    prompt = figures["cold"]["computed"]
    whole = prompt // BLOCK_TOKENS * BLOCK_TOKENS
    for run in ("ram", "ssd"):
        assert (figures[run]["reused"], figures[run]["computed"]) == (whole, prompt - whole)
        assert set(figures[run]) == {"ttft_s", "computed", "reused"}
    assert "cold: done" in done.stderr


def answer(tokens: list[int]) -> Answer:
    return Answer(1.0, 1, 0, 0, 0, tokens, "")


def test_answers_that_differ_or_are_too_short_to_tell_are_not_identical() -> None:
    long, other = list(range(30)), [*range(29), 99]
    assert identical({"cold": answer(long), "ram": answer(long), "ssd": answer(long)})
    assert not identical({"cold": answer(long), "ram": answer(long), "ssd": answer(other)})
    assert not identical({"cold": answer(long[:8]), "ram": answer(long[:8]), "ssd": answer(long[:8])})
