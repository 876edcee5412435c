"""Eight engine processes at once, three namespaces with blocks of 64 KiB to 5 MiB, more than the RAM tier holds.

A short run of ``scripts/bench ram``'s part with many clients; ``OMLXD_LONG=1`` takes its full 30 seconds.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import omlxd
from scripts import bench_ram_clients
from scripts.daemon_process import DaemonProcess
from tests.e2e.blocks import chain

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


@pytest.mark.slow
def test_blocks_from_50_kb_to_540_mb_live_side_by_side(tmp_path: Path) -> None:
    """A block larger than a segment gets one of its own; one that can never fit is declined with that reason."""
    sizes = (50_000, 3_000_000, 64 << 20, 540_000_000)
    daemon = DaemonProcess(tmp_path, ram_size="1GiB", ssd_size="0", ram_segment="256MiB")
    with daemon, omlxd.connect(daemon.socket) as cache:
        spaces = [cache.namespace(model=f"size-{size}", fingerprint="f") for size in sizes]
        stored = []
        for number, (space, size) in enumerate(zip(spaces, sizes, strict=True)):
            (key,) = chain(number, 1)
            content = np.full(size, number + 1, np.uint8)
            content[-1] = 99
            assert space.store_keys([key], [memoryview(content)], timeout=30.0).stored == 1
            stored.append((space, key, content))
        for space, key, content in reversed(stored):
            with space.load_keys([key], timeout=30.0) as lease:
                (block,) = lease
                assert np.array_equal(np.frombuffer(block.view, np.uint8), content)
        too_large = memoryview(bytes(1 << 20) * 1030)
        result = spaces[0].store_keys(chain(9, 1), [too_large], timeout=5.0)
        assert result.declined == {"too_large": 1}
        stats = cache.stats()
        assert stats["ram"]["used"] <= stats["ram"]["limit"]
        assert stats["counts"]["declined_too_large"] == 1
