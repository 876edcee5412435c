"""Tiers that are shared with other machines, as the store works with them: asked for what local tiers lack, offered what is new.

Loop thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from omlxd.storage.asking import Asking
from omlxd.storage.blocks import BlockMeta
from omlxd.storage.leasing import ASK_SECONDS
from omlxd.storage.lower import Lowers
from omlxd.storage.tier import OuterTier, Payload

if TYPE_CHECKING:
    from omlxd.storage.ram import RamTier
    from omlxd.storage.ssd import SsdTier


class Outer:
    """All of them."""

    def __init__(self, ram: RamTier, ssd: SsdTier | None, lower: Lowers, *, on_progress: Callable[[], None]) -> None:
        """``lower``: all tiers below RAM, these included; ``on_progress`` is called when something may go on."""
        self.tiers: list[OuterTier] = []
        self.asking = Asking(self.tiers, on_answer=on_progress)
        self._ram = ram
        self.ssd = ssd
        """None where there is none, or none yet."""
        self._lower = lower
        self._on_progress = on_progress

    def start(self) -> None:
        """Begin, on the running loop."""
        for tier in self.tiers:
            tier.start()

    async def stop(self) -> None:
        """End, within seconds; what waits to be sent still needs RAM and SSD meanwhile."""
        self.asking.stop()
        for tier in self.tiers:
            await tier.stop()

    def to_ask_for(self, keys: Sequence[bytes], *, prefix: bool) -> list[bytes]:
        """Keys that no tier is known to have, where asking may change that.

        ``prefix``: nobody needs to know of what comes after the first miss.
        """
        if not self.tiers:
            return []
        blocks, lower, asking = self._ram.blocks, self._lower, self.asking
        missing: list[bytes] = []
        for key in keys:
            if key in blocks or lower.having(key) is not None:
                continue
            if prefix and not missing and key not in asking and not any(tier.unasked([key]) for tier in self.tiers):
                return []
            missing.append(key)
        return missing

    async def find(self, keys: Sequence[bytes]) -> None:
        """Have the tiers say what they have of ``keys``; within their deadlines."""
        if self.asking.begin(keys, ASK_SECONDS):
            await self.asking.wait(keys, ASK_SECONDS)

    def offer(self, meta: BlockMeta) -> None:
        """A new block is readable."""
        for tier in self.tiers:
            tier.offer(meta)

    def forget(self, keys: Sequence[bytes]) -> None:
        """An operator removes these blocks."""
        for tier in self.tiers:
            tier.forget(keys)

    def register_namespace(self, namespace: bytes, descriptor: Mapping[str, object]) -> None:
        """Blocks of this namespace may come and go."""
        for tier in self.tiers:
            tier.register_namespace(namespace, descriptor)

    def payload(self, key: bytes) -> Payload | None:
        """A block's bytes, kept in place until they are released; None when neither RAM nor SSD has it."""
        ram, ssd = self._ram, self.ssd
        block = ram.blocks.get(key)
        if block is not None and block.chunk.ref_cnt >= 0:
            pinned = block
            ram.pin_block(pinned)
            view = ram.view(pinned)

            def unpin() -> None:
                ram.complete_read(pinned)
                self._on_progress()

            return Payload(pinned.meta, lambda: view, unpin)
        entry = ssd.meta(key) if ssd is not None else None
        if ssd is None or entry is None or not ssd.pin(key):
            return None
        disk, record = ssd, entry

        def read() -> memoryview:
            out = memoryview(bytearray(record.nbytes))
            disk.read_into(key, out)
            return out

        meta = BlockMeta(key, record.namespace, record.nbytes, record.parent, record.position, record.layout)
        return Payload(meta, read, lambda: disk.unpin(record))
