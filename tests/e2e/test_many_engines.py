"""Eight engine processes at once, three namespaces with blocks of 64 KiB to 5 MiB, more than the RAM tier holds.

A short run of ``scripts/bench ram``'s part with many clients; ``OMLXD_LONG=1`` takes its full 30 seconds.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts import bench_ram_clients

SECONDS = 30.0 if os.environ.get("OMLXD_LONG") else 3.0


@pytest.mark.slow
def test_every_byte_is_right_and_nothing_is_left_behind(tmp_path: Path) -> None:
    figures = bench_ram_clients.run(tmp_path, SECONDS)
    assert figures["wrong_blocks"] == 0
    assert figures["errors"] == 0
    assert figures["leaks"] == dict.fromkeys(
        ("leases", "reservations", "clients", "descriptors", "bytes_over_budget"), 0
    )
    assert figures["loads"], "nothing was loaded"
