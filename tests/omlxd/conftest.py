from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.omlxd.configured import ConfiguredDaemon


@pytest.fixture(autouse=True)
def no_settings_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the shell of whoever runs the tests has set is no business of theirs."""
    for name in [name for name in os.environ if name.startswith("OMLXD_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ConfiguredDaemon]:
    """A running daemon: 64 MiB of RAM, 256 MiB of SSD, and a configuration file that may be changed."""
    made = ConfiguredDaemon(tmp_path / "daemon")
    made.start()
    yield made
    made.kill()
    made.close()
