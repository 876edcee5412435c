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

__version__ = "0.1.0"

__all__ = ["Cache", "Lease", "LeaseEnded", "OmlxdError", "Refused", "Space", "Unavailable", "__version__", "connect"]

_CLIENT = ("Cache", "Lease", "Space", "connect")
_ERRORS = ("LeaseEnded", "OmlxdError", "Refused", "Unavailable")
_HOME = dict.fromkeys(_CLIENT, "omlxd.client") | dict.fromkeys(_ERRORS, "omlxd.errors")


def __getattr__(name: str) -> object:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'omlxd' has no attribute {name!r}") from None
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
