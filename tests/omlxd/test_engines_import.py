from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("mlx_lm", "transformers", "tokenizers", "huggingface_hub", "mlx")


@pytest.mark.parametrize("module", ["omlxd.engines.mlx_lm", "omlxd.engines.mlx_lm_server", "omlxd.engines.explain"])
def test_importing_an_adapter_imports_no_engine(module: str) -> None:
    script = f"import sys, {module}\nprint([n for n in sys.modules if n in {HEAVY!r}])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
