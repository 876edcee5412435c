from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.daemon_process import DaemonProcess

# The models are built here; nothing may ask a hub for them.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A real daemon with an empty store."""
    with DaemonProcess(tmp_path_factory.mktemp("daemon")) as process:
        yield process


@pytest.fixture(scope="session")
def smollm_folder() -> Path:
    """SmolLM2-135M as mlx-lm reads it."""
    from scripts.smollm import SmolLMMissingError, model_folder

    try:
        return model_folder()
    except SmolLMMissingError as error:
        pytest.fail(str(error))


@pytest.fixture(scope="session")
def smollm(smollm_folder: Path) -> tuple[Any, Any]:
    """The loaded model and its tokenizer."""
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(smollm_folder))[:2]
    return model, tokenizer
