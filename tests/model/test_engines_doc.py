"""docs/engines.md: its examples run, its matrix is the one that is tested."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import omlxd
from omlxd.engines import caches
from scripts.daemon_process import CHECKOUT, DaemonProcess
from tests.model.tiny import KINDS

DOC = (CHECKOUT / "docs" / "engines.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", DOC, flags=re.DOTALL)


def run(marker: str, **names: Any) -> dict[str, Any]:
    (source,) = [snippet for snippet in SNIPPETS if marker in snippet]
    scope = {"__name__": "engines_doc", **names}
    exec(compile(source, "docs/engines.md", "exec"), scope)
    return scope


@pytest.mark.model
def test_the_example_for_mlx_lm(
    daemon: DaemonProcess, smollm_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMLXD_SOCKET", str(daemon.socket))
    prompt = "The capital of France is"
    run("stream_generate(", model_path=str(smollm_folder), prompt=prompt)
    assert "Paris" in capsys.readouterr().out


def test_the_example_with_hashes_of_its_own(daemon: DaemonProcess) -> None:
    with omlxd.connect(daemon.socket) as cache:
        engine = run("class OwnHashes")["OwnHashes"](cache, "weights 1")
        tokens = list(range(70))
        payloads = [bytes([index]) * 4096 for index in range(4)]
        memory = bytearray(4 * 4096)
        assert engine.restore(tokens, memory) == 0
        engine.keep(tokens, payloads, 0)
        assert engine.restore(tokens, memory) == 64
        assert memory == b"".join(payloads)
        assert engine.restore(tokens[:20] + tokens, memory) == 16
        assert run("class OwnHashes")["OwnHashes"](cache, "weights 2").restore(tokens, memory) == 0
    assert engine.restore(tokens, memory) == 0, "without a daemon it computes"
    engine.keep(tokens, payloads, 0)


def test_the_matrix_names_every_kind_that_is_tested_and_no_other() -> None:
    matrix = DOC.partition("### The matrix")[2].partition("### ")[0]
    rows = re.findall(r"^\| (.*?) \| exact", matrix, flags=re.MULTILINE)
    assert rows == [kind.name for kind in KINDS]


@pytest.mark.parametrize("name", sorted({*caches.KNOWN, *caches.BATCHED, "CacheList"}))
def test_the_table_of_classes_names_every_class(name: str) -> None:
    assert f"`{name}`" in DOC.partition("### Cache classes")[2].partition("### ")[0]
