"""A tier as somebody else could write it: blocks as files in a folder that several daemons share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgpack

from omlxd.policy.base import RequestContext
from omlxd.storage.blocks import BlockMeta
from omlxd.storage.tier import Held, Missing, TierHost


class FileTier:
    """``[remote] ca_file`` names the folder. Small and synchronous: an example, not for use."""

    name = "remote"

    def __init__(self, options: Mapping[str, object], host: TierHost) -> None:
        self._folder = Path(str(options["ca_file"]))
        self._host = host
        self._known: dict[bytes, BlockMeta] = {}

    def _file(self, key: bytes) -> Path:
        return self._folder / key.hex()

    def start(self) -> None: ...

    async def stop(self) -> None: ...

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def meta(self, key: bytes) -> BlockMeta | None:
        return self._known.get(key)

    def unasked(self, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in keys if key not in self._known and self._file(key).exists()]

    async def ask(self, keys: Sequence[bytes], timeout: float) -> None:
        for key in keys:
            self._known[key] = BlockMeta(*msgpack.unpackb(self._file(key).read_bytes())[:-1])

    def pin(self, key: bytes) -> bool:
        return key in self._known

    def unpin(self, entry: Held) -> None: ...

    def read_ahead(self, keys: Sequence[bytes]) -> None: ...

    def read_into(self, key: bytes, out: memoryview) -> int:
        try:
            payload = msgpack.unpackb(self._file(key).read_bytes())[-1]
        except OSError as error:
            raise Missing(str(error)) from None
        out[: len(payload)] = payload
        return len(payload)

    def damaged(self, key: bytes, reason: str) -> None:
        self._known.pop(key, None)

    def touch(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> None: ...

    def offer(self, meta: BlockMeta) -> None:
        held = self._host.payload(meta.key)
        if held is not None:
            fields = [meta.key, meta.namespace, meta.nbytes, meta.parent, meta.position, meta.layout]
            self._file(meta.key).write_bytes(msgpack.packb([*fields, bytes(held.read())]))
            held.release()

    def offer_again(self, metas: Sequence[BlockMeta]) -> None: ...

    def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._file(key).unlink(missing_ok=True)

    def register_namespace(self, namespace: bytes, descriptor: Mapping[str, object]) -> None: ...

    def configure(self, options: Mapping[str, object]) -> None: ...

    def set_ttl(self, namespace: bytes, seconds: float | None) -> None: ...

    def stats(self) -> dict[str, object]:
        return {"state": "ok", "reason": "", "url": str(self._folder)}

    def troubles(self) -> list[str]:
        return []
