from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from omlxd.engines.fingerprint import NoWeightsError, fingerprint, model_id


def save_weights(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file, written by the format's description."""
    header, blobs, end = {}, [], 0
    for name, tensor in tensors.items():
        blob = tensor.tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + len(blob)]}
        blobs.append(blob)
        end += len(blob)
    packed = json.dumps(header).encode()
    path.write_bytes(len(packed).to_bytes(8, "little") + packed + b"".join(blobs))


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {f"layers.{i}.weight": random.normal(size=(64, 64)).astype(np.float32) for i in range(4)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "rope_scaling": None, "hidden_size": 64}))
    save_weights(path / "model.safetensors", weights())
    return path


def test_a_copy_of_a_folder_has_its_fingerprint(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "elsewhere")
    (other / "README.md").write_text("hello")
    assert fingerprint(other) == fingerprint(folder)


def one_layer_trained(folder: Path) -> None:
    changed = weights()
    changed["layers.2.weight"] = changed["layers.2.weight"] + np.float32(1e-3)
    save_weights(folder / "model.safetensors", changed)


def another_order(folder: Path) -> None:
    save_weights(folder / "model.safetensors", dict(reversed(weights().items())))


def a_second_file(folder: Path) -> None:
    save_weights(folder / "model-2.safetensors", weights(1))


def renamed_file(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")


def setting(name: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, name: value}))

    return change


@pytest.mark.parametrize(
    "change",
    [
        one_layer_trained,
        another_order,
        a_second_file,
        renamed_file,
        setting("rope_scaling", {"type": "linear", "factor": 2.0}),
        setting("layer_types", ["full_attention"]),
        setting("quantization", {"bits": 4, "group_size": 64}),
    ],
)
def test_what_changes_the_computation_changes_the_fingerprint(folder: Path, change: Callable[[Path], None]) -> None:
    before = fingerprint(folder)
    change(folder)
    assert fingerprint(folder) != before


@pytest.mark.parametrize("change", [setting("transformers_version", "9.9"), setting("_name_or_path", "/somewhere")])
def test_what_says_nothing_about_the_computation_does_not(folder: Path, change: Callable[[Path], None]) -> None:
    before = fingerprint(folder)
    change(folder)
    assert fingerprint(folder) == before


def test_an_adapter_makes_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    adapters = []
    for seed in (1, 2):
        adapter = tmp_path / f"adapter{seed}"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text('{"rank": 8}')
        save_weights(adapter / "adapters.safetensors", weights(seed))
        adapters.append(adapter)
    found = {fingerprint(folder), *(fingerprint(folder, adapter_path=adapter) for adapter in adapters)}
    assert len(found) == 3


def test_a_folder_of_the_hub_is_known_by_its_revision(tmp_path: Path) -> None:
    snapshots = tmp_path / "models--org--some-model" / "snapshots"
    one, other = snapshots / ("a" * 40), snapshots / ("b" * 40)
    for path in (one, other):
        path.mkdir(parents=True)
        save_weights(path / "model.safetensors", weights())
    assert fingerprint(one) != fingerprint(other)
    assert model_id(one) == "org/some-model"


def test_a_plain_folder_is_known_by_its_name(folder: Path) -> None:
    assert model_id(folder) == "model"


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_folder_without_weights_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoWeightsError, match=name):
        fingerprint(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x10" + bytes(7) + b"{}", b"\x02" + bytes(7) + b"xx"])
def test_a_damaged_file_has_a_fingerprint_or_a_clear_error(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    try:
        found = fingerprint(folder)
    except ValueError as error:
        assert "model.safetensors" in str(error)
    else:
        assert len(found) == 64
