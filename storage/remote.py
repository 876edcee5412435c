"""The remote tier: blocks on a Valkey server or cluster, shared by several machines.

Blocks are immutable and named by their content, so there is nothing to keep coherent; the server may lose any of them at
any time. It is asked for many keys in one round trip per node, bounded by a deadline, and only when it is known to be
well: a server in trouble costs nobody any time but its prober (``remote_breaker``).

Satisfies ``tier.OuterTier``. State belongs to the event loop's thread; the client library runs on worker threads, because
sockets there move 2 MiB values with little of the interpreter's lock (measured, see docs/remote.md).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from omlxd.policy.base import RequestContext
from omlxd.storage.blocks import BlockMeta
from omlxd.storage.codec_choice import CodecChoice
from omlxd.storage.remote_cluster import Cluster, Node
from omlxd.storage.remote_health import Servers
from omlxd.storage.remote_known import Known, Memory
from omlxd.storage.remote_records import Header, Stranger, unpack_header
from omlxd.storage.remote_seal import Keyed, Plain, Seal, piece_name, read_key_file, tag_of
from omlxd.storage.remote_server import Patience, Server
from omlxd.storage.remote_settings import RemoteSettings
from omlxd.storage.remote_transfer import LinkRate, fetch, write
from omlxd.storage.remote_writer import Allowance, WriteQueue, block_tokens_of
from omlxd.storage.tier import Damaged, Held, Missing, Payload, TierHost, Trouble

log = logging.getLogger(__name__)

ASK_MOST = 4096
"""Keys of one ``ask``."""
ASKS_PER_NODE = 8
"""Workers that may wait for one node at once: a node that hangs must not take them all."""
SLICE = 128
"""Headers that are checked before other threads get a turn."""
LOOK_AGAIN_SECONDS = 600.0
"""How often it is looked whether the server still has a prefix that is in use."""
PREFIXES_SEEN_TO = 4096
STOP_SECONDS = 3.0


class RemoteTier:
    """See the module."""

    name = "remote"

    def __init__(
        self,
        options: Mapping[str, object],
        host: TierHost,
        *,
        memory: Memory | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``options``: the configuration's ``[remote]``. Connects to nothing before ``start``.

        ``wall``: seconds since the epoch. Raises ``ValueError`` for what cannot be used, in words that name the setting.
        """
        self.settings = RemoteSettings.from_options(options)
        secret = self.settings.secret_path()
        try:
            self._seal: Seal = Keyed(read_key_file(secret)) if secret is not None else Plain()
        except ImportError:
            raise ValueError("remote.key_file: sealing needs a library: pip install 'omlxd[valkey]'") from None
        except ValueError as error:
            raise ValueError(f"remote.key_file: {error}") from None
        self.counts: Counter[str] = Counter()
        self.link = LinkRate()
        self._host = host
        self._clock = host.clock
        self._wall = wall
        self._known = Known(host.clock, memory or Memory())
        try:
            cluster = Cluster(self.settings.target, Patience(), self.settings.ca_file, host.clock)
        except Trouble as error:
            raise ValueError(f"remote.url: {error}") from None
        self._servers = Servers(
            cluster,
            self.counts,
            host.clock,
            deadline=lambda: self.settings.deadline,
            on_other_map=self._known.forget_all,
        )
        self._codecs = CodecChoice("auto", fetch_rate=lambda: self.link.bytes_per_second, timer=time.perf_counter)
        self._allowance = Allowance(float(self.settings.max_rate), host.clock)
        self._queue = WriteQueue(send=self._send, ready=self._servers.may_write, counts=self.counts)
        self._block_tokens: dict[bytes, int] = {}
        self._ttls: dict[bytes, float] = {}
        self._pinned: dict[bytes, tuple[Header, Node]] = {}
        self._writer = os.urandom(4).hex()
        self._asks = ThreadPoolExecutor(3 * ASKS_PER_NODE, "omlxd-remote-ask")
        self._sends = ThreadPoolExecutor(1, "omlxd-remote-send")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._seen_to: OrderedDict[bytes, float] = OrderedDict()

    # -- life

    def start(self) -> None:
        """Loop. Connect, and begin to send what is offered."""
        self._loop = asyncio.get_running_loop()
        self._servers.start()
        self._queue.start()

    async def stop(self) -> None:
        """Loop. Send what waits for a few seconds at most, and end all connections."""
        await self._queue.stop(STOP_SECONDS)
        self._stopping = True
        await self._servers.stop()  # what still waits for an answer ends with its connection
        for pool in (self._asks, self._sends):
            pool.shutdown(wait=False, cancel_futures=True)

    # -- what is there

    def __contains__(self, key: bytes) -> bool:
        """Loop. Is the block known to be on the server, and is the server well?"""
        if self._known.header(key) is None:
            return False
        node = self._node_of(key)
        return node is not None and node.breaker.closed

    def meta(self, key: bytes) -> Header | None:
        """Loop. The block's header, where it is known to be there."""
        return self._known.header(key)

    def unasked(self, keys: Sequence[bytes]) -> list[bytes]:
        """Loop. Keys that are worth asking for, at most ``ASK_MOST``; none while no server is well."""
        if self._stopping or not self._servers.any_well():
            return []
        found: list[bytes] = []
        for key in keys:
            if key not in self._known and (node := self._node_of(key)) is not None and node.breaker.closed:
                found.append(key)
                if len(found) == ASK_MOST:
                    break
        return found

    async def ask(self, keys: Sequence[bytes], timeout: float) -> None:
        """Loop. One round trip to each node that has some of ``keys``; at most ``timeout`` and the deadline."""
        loop = asyncio.get_running_loop()
        by_node: dict[int, tuple[Node, list[bytes]]] = {}
        for key in keys:
            node = self._node_of(key)
            if node is not None:
                by_node.setdefault(id(node), (node, []))[1].append(key)
        asked: dict[asyncio.Future[_Found], _Question] = {}
        self.counts["asked_keys"] += len(keys)
        for node, mine in by_node.values():
            self._known.absent(mine, answered=False)  # nobody asks for these again while they are under way
            if not node.breaker.closed or node.asking >= ASKS_PER_NODE or self._stopping:
                self.counts["not_asked_busy"] += len(mine)
                continue
            node.asking += 1
            self.counts["asks"] += 1
            question = _Question(node, mine, self._clock())
            future = loop.run_in_executor(
                self._asks, self._get_headers, node.server, mine, frozenset(self._block_tokens)
            )
            future.add_done_callback(partial(self._answered, question))
            asked[future] = question
        if not asked:
            return
        _, late = await asyncio.wait(asked, timeout=min(timeout, self.settings.deadline))
        for future in late:
            question = asked[future]
            if timeout >= self.settings.deadline:  # else it was not given the time that it may take
                question.late = True
                self.counts["asks_late"] += 1
                self._servers.failed(question.node, Trouble("slow", f"{question.node.server.address}: it answers late"))

    # -- restoring

    def pin(self, key: bytes) -> bool:
        """Loop. See ``LowerTier``."""
        header, node = self._known.header(key), self._node_of(key)
        if header is None or node is None or not node.breaker.closed:
            return False
        self._pinned[key] = (header, node)
        return True

    def unpin(self, entry: Held) -> None:
        """Loop. See ``LowerTier``."""
        self._pinned.pop(entry.key, None)

    def read_ahead(self, keys: Sequence[bytes]) -> None:
        """Worker. Nothing to do: the server's blocks are in its memory."""

    def read_into(self, key: bytes, out: memoryview) -> int:
        """Worker. Fetch a pinned block into ``out``; see ``LowerTier``."""
        pinned = self._pinned.get(key)
        if pinned is None:
            raise Missing("not known to be on the server")
        header, node = pinned
        try:
            begun = time.perf_counter()
            fetch(node.server, header, self._seal, out)
            self.link.note(header.stored_bytes, time.perf_counter() - begun)
            self._keep_alive(node.server, header)
        except Trouble as error:
            self._soon(self._servers.failed, node, error)
            raise
        except Missing:
            self._soon(self._known.absent, [key])
            raise
        self._soon(self._servers.well, node)
        return header.nbytes

    def damaged(self, key: bytes, reason: str) -> None:
        """Loop. What stands there is not what was stored: a miss."""
        self.counts["strangers"] += 1
        self._known.absent([key])

    def touch(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> None:
        """Loop. Nothing: a block's life on the server is prolonged when it is fetched."""

    # -- filling

    def register_namespace(self, namespace: bytes, descriptor: Mapping[str, object]) -> None:
        """Loop. See ``OuterTier``."""
        self._block_tokens[namespace] = block_tokens_of(descriptor)

    def set_ttl(self, namespace: bytes, seconds: float | None) -> None:
        """Loop. See ``OuterTier``."""
        if seconds is None:
            self._ttls.pop(namespace, None)
        else:
            self._ttls[namespace] = seconds

    def offer(self, meta: BlockMeta) -> None:
        """Loop. Send the block when its turn comes, if it is admitted and not there yet."""
        if not self._admit(meta, asked_again=False):
            self.counts["not_admitted"] += 1

    def offer_again(self, metas: Sequence[BlockMeta]) -> None:
        """Loop. See to it that the server has them still; a prefix that was looked at lately is left alone."""
        if not metas or self._stopping:
            return
        now, last = self._clock(), metas[-1].key
        if now - self._seen_to.get(last, -LOOK_AGAIN_SECONDS) < LOOK_AGAIN_SECONDS:
            return
        self._seen_to[last] = now
        self._seen_to.move_to_end(last)
        if len(self._seen_to) > PREFIXES_SEEN_TO:
            self._seen_to.popitem(last=False)
        for meta in metas:
            self._admit(meta, asked_again=True)

    def _admit(self, meta: BlockMeta, *, asked_again: bool) -> bool:
        """Queue a block that is worth it; False for one that is not."""
        block_tokens = self._block_tokens.get(meta.namespace, 1)
        if not meta.nbytes or not self.settings.admission.takes(meta, block_tokens, asked_again=asked_again):
            return False
        if not self._stopping and self._known.header(meta.key) is None:
            self._queue.add(meta.key)
        return True

    def forget(self, keys: Sequence[bytes]) -> None:
        """Loop. Take these off the server too, in the background; a server in trouble keeps them until their time is over."""
        for key in keys:
            self._queue.discard(key)
        self._servers.background(self._forget(list(keys)))

    # -- settings and numbers

    def configure(self, options: Mapping[str, object]) -> None:
        """Loop. See ``OuterTier``."""
        new = RemoteSettings.from_options(options)
        if fixed := self.settings.fixed_changes(new):
            raise ValueError(f"remote.{', remote.'.join(fixed)}: only a restart changes that")
        self.settings = new
        self._allowance.rate = float(new.max_rate)

    def stats(self) -> dict[str, object]:
        """Loop. Numbers for ``status`` and metrics."""
        state, reason = self._servers.state()
        return {
            "state": state,
            "reason": reason,
            "url": str(self.settings.target),
            "sealed": self.settings.key_file != "",
            "nodes": self._servers.rows(),
            "known_blocks": len(self._known),
            "queue": len(self._queue),
            "link_bytes_per_second": self.link.bytes_per_second,
            "counts": dict(self.counts),
        }

    def troubles(self) -> list[str]:
        """Loop. What is wrong, a sentence for each node."""
        return self._servers.troubles()

    # -- inside: asking

    def _node_of(self, key: bytes) -> Node | None:
        if not self.settings.target.cluster:
            return self._servers.cluster.node_of(0)
        return self._servers.cluster.node_of(tag_of(self._seal.name(key)))

    def _get_headers(self, server: Server, keys: Sequence[bytes], namespaces: frozenset[bytes]) -> _Found:
        names = [self._seal.name(key) for key in keys]
        groups: dict[int, list[bytes]] = {}
        for name in names:
            groups.setdefault(tag_of(name) if self.settings.target.cluster else 0, []).append(name)
        found = _Found()
        for index, (key, stored) in enumerate(zip(keys, server.get_headers(names, list(groups.values())), strict=True)):
            if stored is None:
                found.absent.append(key)
                continue
            try:
                found.present.append(unpack_header(key, namespaces, stored, self._seal))
            except Stranger as error:
                found.strangers.append((key, str(error)))
            if index % SLICE == SLICE - 1:
                time.sleep(0)
        return found

    def _answered(self, question: _Question, future: asyncio.Future[_Found]) -> None:
        node = question.node
        node.asking -= 1
        if future.cancelled():
            return
        error = future.exception()
        if isinstance(error, Trouble):
            if not question.late:
                self._servers.failed(node, error)
            return
        if error is not None:
            log.error("asking %s failed", node.server.address, exc_info=error)
            self._servers.failed(node, Trouble("refused", f"{node.server.address}: {type(error).__name__}: {error}"))
            return
        found = future.result()
        self._known.present(found.present)
        self._known.absent(found.absent)
        self._known.absent([key for key, _ in found.strangers])
        if found.strangers:
            key, why = found.strangers[0]
            log.warning("what %s has for block %s is not ours: %s", node.server.address, key[:8].hex(), why)
            self.counts["strangers"] += len(found.strangers)
        self.counts["found_keys"] += len(found.present)
        self.counts["ask_microseconds"] += round(1e6 * (self._clock() - question.since))
        if not question.late:
            self._servers.well(node)

    # -- inside: writing

    async def _send(self, batch: Sequence[bytes]) -> None:
        if unknown := self.unasked(batch):
            await self.ask(unknown, self.settings.deadline)
        for index, key in enumerate(batch):
            if self._known.header(key) is not None:
                self.counts["present"] += 1
                continue
            node = self._node_of(key)
            if node is None or not node.writable(self._clock()):
                if not self._servers.may_write():
                    self._queue.put_back(batch[index:])
                    return
                self.counts["dropped_node_unwell"] += 1
                continue
            if (owed := self._allowance.owed()) > 0:
                await asyncio.sleep(owed)
            await self._send_one(key, node)

    async def _send_one(self, key: bytes, node: Node) -> None:
        payload = self._host.payload(key)
        if payload is None:
            self.counts["dropped_gone"] += 1
            return
        ttl = self._ttls.get(payload.meta.namespace, self.settings.ttl)
        try:
            header = await asyncio.get_running_loop().run_in_executor(
                self._sends, self._write, node.server, payload, ttl
            )
        except Trouble as error:
            self._servers.refused_write(node, error)
            self._queue.put_back([key])
        except (Missing, Damaged):
            self.counts["dropped_gone"] += 1
        except Exception:
            log.exception("block %s could not be sent", key[:8].hex())
            self.counts["dropped_error"] += 1
        else:
            self.counts["written"] += 1
            self.counts["written_bytes"] += header.nbytes
            self.counts["sent_bytes"] += header.stored_bytes
            self._allowance.spend(header.stored_bytes)
            self._known.present([header])
            self._servers.written(node)
        finally:
            payload.release()

    def _write(self, server: Server, payload: Payload, ttl: float) -> Header:
        view = payload.read()
        codec = self._codecs.codec_for(payload.meta.namespace, view)
        begun = time.perf_counter()
        header = write(
            server, payload.meta, view, codec, self._seal, ttl=ttl, stored_at=self._wall(), writer=self._writer
        )
        self.link.note(header.stored_bytes, time.perf_counter() - begun)
        return header

    def _keep_alive(self, server: Server, header: Header) -> None:
        """Worker. Blocks that are fetched in the second half of their life get a new one."""
        ttl = self._ttls.get(header.namespace, self.settings.ttl)
        if self._wall() - header.stored_at < ttl / 2:
            return
        name = self._seal.name(header.key)
        names = [name, *(piece_name(name, header.write_id, number) for number in range(header.pieces))]
        server.extend(names, round(1000 * ttl))

    async def _forget(self, keys: list[bytes]) -> None:
        if unknown := self.unasked(keys):
            await self.ask(unknown, self.settings.deadline)
        for key in keys:
            header, node = self._known.header(key), self._node_of(key)
            self._known.absent([key])
            if header is None or node is None:
                continue
            name = self._seal.name(key)
            names = [name, *(piece_name(name, header.write_id, number) for number in range(header.pieces))]
            try:
                await asyncio.get_running_loop().run_in_executor(self._sends, node.server.remove, names)
                self.counts["removed"] += 1
            except Trouble as error:
                self._servers.refused_write(node, error)

    # -- inside: tasks

    def _soon(self, call: Callable[..., object], *args: object) -> None:
        """Worker. Have the loop's thread call it."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)


class _Question:
    """An ask under way."""

    __slots__ = ("keys", "late", "node", "since")

    def __init__(self, node: Node, keys: list[bytes], since: float) -> None:
        self.node = node
        self.keys = keys
        self.since = since
        self.late = False


class _Found:
    """What one node has answered."""

    __slots__ = ("absent", "present", "strangers")

    def __init__(self) -> None:
        self.present: list[Header] = []
        self.absent: list[bytes] = []
        self.strangers: list[tuple[bytes, str]] = []
