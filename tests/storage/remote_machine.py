"""A remote tier with blocks to send, without the rest of a store: what one machine is to the server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from omlxd.storage.blocks import BlockMeta
from omlxd.storage.remote import RemoteTier
from omlxd.storage.remote_known import Memory
from omlxd.storage.tier import Payload, TierHost
from tests.storage.ssd_store import NAMESPACE, payload_of

PATIENCE = 60.0


class Machine:
    """The tier, and the blocks that are readable on this machine."""

    def __init__(self, url: str, *, memory: Memory | None = None, **options: object) -> None:
        self.blocks: dict[bytes, tuple[BlockMeta, bytes]] = {}
        self.held = 0
        self.tier = RemoteTier(
            {"url": url, "deadline": "500ms", **options}, TierHost(self._payload, time.monotonic), memory=memory
        )
        self.tier.register_namespace(NAMESPACE, {"block_tokens": 16})

    def _payload(self, key: bytes) -> Payload | None:
        if key not in self.blocks:
            return None
        meta, payload = self.blocks[key]
        self.held += 1
        return Payload(meta, lambda: memoryview(payload), self._release)

    def _release(self) -> None:
        self.held -= 1

    def offer(self, metas: Sequence[BlockMeta], *, asked_again: bool = False) -> None:
        for meta in metas:
            self.blocks[meta.key] = (meta, payload_of(meta.key, meta.nbytes))
        if asked_again:
            self.tier.offer_again(list(metas))
        else:
            for meta in metas:
                self.tier.offer(meta)

    async def sent(self, blocks: int) -> None:
        await until(lambda: self.tier.counts["written"] >= blocks, f"{blocks} blocks to be sent: {self.tier.stats()}")

    async def well(self) -> None:
        await until(lambda: self.tier.stats()["state"] == "ok", f"the server to be well: {self.tier.stats()}")

    async def find(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those that the server has, as far as this machine finds out now."""
        keys = list(keys)
        await self.tier.ask(self.tier.unasked(keys), 5.0)
        return [key for key in keys if key in self.tier]

    async def fetch(self, key: bytes) -> bytes:
        """The payload, read on a worker as a restore does."""
        header = self.tier.meta(key)
        assert header is not None
        assert self.tier.pin(key)
        out = bytearray(header.nbytes)
        try:
            await asyncio.to_thread(self.tier.read_into, key, memoryview(out))
        finally:
            self.tier.unpin(header)
        return bytes(out)


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def machine(url: str, *, memory: Memory | None = None, **options: object) -> AsyncIterator[Machine]:
    """Started, and stopped at the end."""
    found = Machine(url, memory=memory, **options)
    found.tier.start()
    try:
        yield found
    finally:
        await found.tier.stop()
    assert not found.held, "what was held to be sent is given back"
