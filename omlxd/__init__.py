"""omlxd keeps the KV cache of local language models: hot in shared memory, spilled to the SSD.

Engines use `connect()`:

    import omlxd
    cache = omlxd.connect()
    space = cache.namespace(model="org/name", fingerprint="...", block_tokens=64, layout=layout)

Names are looked up when they are first used, so `import omlxd` alone costs an engine next to
nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omlxd.client import Cache, Lease, Space, connect
    from omlxd.errors import LeaseEnded, OmlxdError, Refused, Unavailable
    from omlxd.results import Hit, StoreResult
    from omlxd.storage.layout import Layout, TensorSpec

__version__ = "0.1.0"

_HOME = {
    "Cache": "omlxd.client",
    "Hit": "omlxd.results",
    "Layout": "omlxd.storage.layout",
    "Lease": "omlxd.client",
    "LeaseEnded": "omlxd.errors",
    "OmlxdError": "omlxd.errors",
    "Refused": "omlxd.errors",
    "Space": "omlxd.client",
    "StoreResult": "omlxd.results",
    "TensorSpec": "omlxd.storage.layout",
    "Unavailable": "omlxd.errors",
    "connect": "omlxd.client",
}

__all__ = [
    "Cache",
    "Hit",
    "Layout",
    "Lease",
    "LeaseEnded",
    "OmlxdError",
    "Refused",
    "Space",
    "StoreResult",
    "TensorSpec",
    "Unavailable",
    "__version__",
    "connect",
]


def __getattr__(name: str) -> object:
    if name == "aio":
        return import_module("omlxd.aio")
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'omlxd' has no attribute {name!r}") from None
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
