"""./scripts/demo --two-machines: a real model's prompt, computed on one machine, is a hit on the other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.daemon_process import CHECKOUT
from tests.storage.valkey_server import BINARY, INSTALL

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.mark.skipif(BINARY is None, reason=INSTALL)
def test_the_other_machine_computes_only_what_fills_no_block_and_answers_alike(smollm_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.demo", "--two-machines", "--json"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["identical"] is True
    assert figures["one"]["reused"] == 0
    assert figures["other"]["reused"] + figures["other"]["computed"] == figures["one"]["computed"]
    assert figures["other"]["computed"] < 64
    assert figures["sent_bytes"] > 1_000_000
