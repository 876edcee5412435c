"""The namespaces that this daemon knows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from omlxd.protocol import Code, RequestError
from omlxd.storage.chain import Namespace


@dataclass(slots=True, eq=False)
class NamespaceInfo:
    """One namespace: what an engine said of it."""

    id: bytes
    namespace: Namespace
    descriptor: Mapping[str, object]
    seen: float = field(default_factory=time.time)
    """When an engine last registered it (seconds since the epoch)."""
    model_path: str | None = None
    """The model's folder, where an engine has told it."""
    retired: str = ""
    """Why its blocks leave first; empty while they do not."""
    weights: str | None = None
    """A digest of the folder's signature when an engine last registered it; None: not known (yet)."""

    def record(self) -> dict[str, object]:
        """What is written down of it: the descriptor, and what restarts should not forget."""
        extra = {"model_path": self.model_path, "retired": self.retired, "weights": self.weights}
        return {**self.descriptor, **{name: value for name, value in extra.items() if value}}

    def recall(self, record: Mapping[str, object]) -> None:
        """Take over what an earlier run has written down."""
        path, weights = record.get("model_path"), record.get("weights")
        self.model_path = path if isinstance(path, str) else None
        self.weights = weights if isinstance(weights, str) else None

    @property
    def model(self) -> str:
        """The model's id."""
        return self.namespace.model

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self.namespace.block_tokens


class Namespaces:
    """All of them, by id."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, NamespaceInfo] = {}

    def __iter__(self) -> Iterator[NamespaceInfo]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, namespace_id: bytes) -> NamespaceInfo | None:
        """The namespace, or None."""
        return self._by_id.get(namespace_id)

    def add(self, descriptor: object) -> NamespaceInfo:
        """Register what an engine or the store describes. The id is computed here, never taken on trust.

        Raises:
            RequestError: the descriptor is not one.
        """
        if not isinstance(descriptor, dict):
            raise RequestError(Code.BAD_REQUEST, f"descriptor is {type(descriptor).__name__}; a map is needed")
        try:
            namespace = Namespace.from_descriptor(descriptor)
        except (ValueError, TypeError, KeyError) as error:
            raise RequestError(Code.BAD_REQUEST, f"descriptor describes no namespace: {error}") from None
        info = self._by_id.get(namespace.id)
        if info is None:
            info = self._by_id[namespace.id] = NamespaceInfo(namespace.id, namespace, namespace.descriptor())
        info.seen = time.time()
        return info

    def find(self, text: str) -> list[NamespaceInfo]:
        """Those whose model is ``text``, or whose id begins with it (hexadecimal, 4 digits or more)."""
        exact = [info for info in self if info.model == text]
        if exact or len(text) < 4:
            return exact
        return [info for info in self if info.id.hex().startswith(text.lower())]
