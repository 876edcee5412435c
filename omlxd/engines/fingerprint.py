"""What stands for a model's weights in a namespace.

Reading a model of 100 GB to name it would take longer than most prefills. A fingerprint is taken
over what changes when weights change: the revision where the model comes from the hub's cache
(whose files never change), else each safetensors file's size, its header (tensor names, types,
shapes, offsets) and a sample of each tensor's bytes. The configuration is part of it, since rope scaling,
layer types and quantisation decide what a KV cache means.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

#: Raise when the way below changes: old blocks must not be taken for new ones.
VERSION: Final = b"omlxd-fingerprint-1"
#: Bytes read of each tensor, and of at most how many tensors of a file.
SAMPLE_BYTES: Final = 512
MAX_SAMPLES: Final = 2048
#: Of a safetensors header; real ones are far below 100 MB, the format's own limit.
MAX_HEADER_BYTES: Final = 100 << 20
WEIGHT_SUFFIXES: Final = (".safetensors", ".npz", ".gguf")
CONFIG: Final = "config.json"
#: Keys of config.json that say nothing about the computation.
IRRELEVANT: Final = frozenset({"_name_or_path", "transformers_version", "architectures"})


class NoWeightsError(FileNotFoundError):
    """The folder holds no weights that could be fingerprinted."""


def fingerprint(model_path: str | os.PathLike[str], *, adapter_path: str | os.PathLike[str] | None = None) -> str:
    """A model folder's fingerprint (64 hex digits): equal folders, equal fingerprints.

    ``adapter_path`` is a LoRA folder; with it the result stands for both. Reads at most
    1 MiB and the header of each weight file. Raises :class:`NoWeightsError` when there is nothing to read.
    """
    digest = hashlib.sha256(VERSION)
    _add_folder(digest, Path(model_path))
    if adapter_path is not None:
        digest.update(b"adapter")
        _add_folder(digest, Path(adapter_path))
    return digest.hexdigest()


def model_id(model_path: str | os.PathLike[str]) -> str:
    """The name a person knows the model by: ``org/name`` from the hub, else the folder's name."""
    path = Path(model_path)
    hub = _hub_snapshot(path)
    return hub[0] if hub else path.resolve().name


def _hub_snapshot(path: Path) -> tuple[str, str] | None:
    """``(org/name, revision)`` of a folder in the hub's cache: models--org--name/snapshots/<40 hex>."""
    parts = path.absolute().parts
    if len(parts) < 3 or parts[-2] != "snapshots" or not re.fullmatch(r"[0-9a-f]{40}", parts[-1]):
        return None
    kind, _, name = parts[-3].partition("--")
    return (name.replace("--", "/"), parts[-1]) if kind == "models" and name else None


def _add_folder(digest: hashlib._Hash, folder: Path) -> None:
    for name in (CONFIG, "adapter_config.json"):
        if (folder / name).is_file():
            _add(digest, name.encode(), _settings(folder / name))
    hub = _hub_snapshot(folder)
    if hub is not None:
        _add(digest, b"revision", hub[1].encode())
        return
    files = sorted(file for file in folder.iterdir() if file.suffix in WEIGHT_SUFFIXES) if folder.is_dir() else []
    if not files:
        raise NoWeightsError(
            f"no weights ({', '.join('*' + suffix for suffix in WEIGHT_SUFFIXES)}) in {folder}: "
            "give the folder that the model was loaded from"
        )
    for file in files:
        _add(digest, b"file", file.name.encode())
        for part in _weights(file):
            _add(digest, b"bytes", part)


def _add(digest: hashlib._Hash, kind: bytes, value: bytes) -> None:
    """Framed, so that no two lists of parts are the same bytes."""
    digest.update(b"%d:%b%d:" % (len(kind), kind, len(value)))
    digest.update(value)


def _settings(path: Path) -> bytes:
    settings = json.loads(path.read_text(encoding="utf-8"))
    relevant = {key: value for key, value in settings.items() if key not in IRRELEVANT}
    return json.dumps(relevant, sort_keys=True, separators=(",", ":")).encode()


def _weights(file: Path) -> Iterator[bytes]:
    """Size, header, and samples: from the middle of each tensor, or over the file where its tensors are not known."""
    size = file.stat().st_size
    yield size.to_bytes(8, "little")
    with file.open("rb") as stream:
        header = _safetensors_header(stream, size) if file.suffix == ".safetensors" else b""
        yield header
        try:
            places = _tensor_middles(header) if header else _even(size, MAX_SAMPLES // 16)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} has no header of the safetensors format: {error}") from error
        for at in places:
            stream.seek(at)
            yield stream.read(SAMPLE_BYTES)


def _safetensors_header(stream: BinaryIO, size: int) -> bytes:
    length = int.from_bytes(stream.read(8), "little")
    return stream.read(length) if 0 < length <= min(size, MAX_HEADER_BYTES) else b""


def _tensor_middles(header: bytes) -> list[int]:
    """A place in each tensor; of very many tensors, every second, third, ..."""
    tensors = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
    tensors = sorted(tensors)[:: 1 + len(tensors) // MAX_SAMPLES]
    start = 8 + len(header)
    return [start + begin + max(0, (end - begin - SAMPLE_BYTES) // 2) for begin, end in tensors]


def _even(size: int, count: int) -> list[int]:
    room = max(size - SAMPLE_BYTES, 0)
    return [room * index // (count - 1) for index in range(count)]
