from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.omlxd.configured import ConfiguredDaemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ConfiguredDaemon]:
    """A running daemon: 64 MiB of RAM, 256 MiB of SSD, and a configuration file that may be changed."""
    made = ConfiguredDaemon(tmp_path / "daemon")
    made.start()
    yield made
    made.kill()
    made.close()
