"""A short run of what `scripts/fuzz` does for an hour."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from scripts.daemon_process import DaemonProcess
from tests.omlxd.fuzzing import assault, assert_unharmed, connections


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    daemon = DaemonProcess(tmp_path_factory.mktemp("fuzz"), ram_size="32MiB", ssd_size="64MiB")
    with daemon:
        yield daemon.socket
        log = daemon.log.read_text(errors="replace")
    assert "Traceback" not in log
    assert "never retrieved" not in log


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(connections)
def test_no_connection_harms_the_daemon(target: Path, connection: tuple[bool, bool, list[bytes]]) -> None:
    assault(target, *connection)
    assert_unharmed(target)
