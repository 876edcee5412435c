"""How the servers of the remote tier are: who may be used, who is probed, and which node has what.

Loop thread only; probes run on workers of their own, so that nothing waits behind a server that hangs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor

from omlxd.storage.remote_cluster import Cluster, Node, read_slots
from omlxd.storage.remote_server import Moved
from omlxd.storage.tier import Trouble

log = logging.getLogger(__name__)

WRITE_PAUSE_SECONDS = 2.0
"""How long a node that refuses writes is left alone with them."""
LOOK_SECONDS = 0.1
IDLE_PING_SECONDS = 5.0
SLOTS_SECONDS = 1.0


class Servers:
    """The nodes and their state."""

    def __init__(
        self,
        cluster: Cluster,
        counts: Counter[str],
        clock: Callable[[], float],
        *,
        deadline: Callable[[], float],
        on_other_map: Callable[[], None],
    ) -> None:
        """``deadline``: seconds in which a probe must be answered; ``on_other_map``: names have moved to other nodes."""
        self.cluster = cluster
        self._counts = counts
        self._clock = clock
        self._deadline = deadline
        self._on_other_map = on_other_map
        self._probes = ThreadPoolExecutor(4, "omlxd-remote-probe")
        self._tasks: set[asyncio.Task[object]] = set()
        self._slots_at = 0.0

    def start(self) -> None:
        """Begin to look after them, on the running loop."""
        self.background(self._look_after())

    async def stop(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.cluster.close()
        self._probes.shutdown(wait=False, cancel_futures=True)

    def any_well(self) -> bool:
        """Is there anybody to ask?"""
        return any(node.breaker.closed for node in self.cluster.nodes.values())

    def may_write(self) -> bool:
        """Is there anybody to send to?"""
        now = self._clock()
        return any(node.writable(now) for node in self.cluster.nodes.values())

    def well(self, node: Node, *, probe: bool = False) -> None:
        """It has answered in time; a ``probe`` shows less than a question that was meant."""
        if not node.breaker.closed:
            log.info("the remote tier's server %s is used again", node.server.address)
        node.breaker.succeeded(probe=probe)
        node.heard = self._clock()

    def failed(self, node: Node, trouble: Trouble) -> None:
        """It has not."""
        self._counts[f"trouble_{trouble.state}"] += 1
        if isinstance(trouble, Moved):
            self.cluster.stale = True
            return
        if node not in self.cluster.nodes.values():
            return  # it has left the cluster meanwhile
        if node.breaker.failed(trouble.state, trouble.reason):
            log.warning("the remote tier's server is not used for now: %s", trouble.reason)

    def written(self, node: Node) -> None:
        """It has taken a block."""
        if node.write_state != "ok":
            log.info("the remote tier's server %s is written again", node.server.address)
            node.write_state, node.write_reason = "ok", ""
        self.well(node)

    def refused_write(self, node: Node, trouble: Trouble) -> None:
        """A write failed: is it only writing that does not work?"""
        if isinstance(trouble, Moved) or trouble.state not in ("full", "read-only", "refused"):
            self.failed(node, trouble)
            return
        self._counts[f"trouble_{trouble.state}"] += 1
        if node.write_state == "ok":
            log.warning("the remote tier is not written for now: %s", trouble.reason)
        node.write_state, node.write_reason = trouble.state, trouble.reason
        node.write_again = self._clock() + WRITE_PAUSE_SECONDS
        self.cluster.stale |= self.cluster.target.cluster  # a primary that has become a replica

    async def _look_after(self) -> None:
        """Probe what is in trouble, and what has not been heard of for long; keep the map of the cluster."""
        while True:
            now = self._clock()
            for node in list(self.cluster.nodes.values()):
                silent = node.breaker.closed and now - node.heard > IDLE_PING_SECONDS
                if silent:
                    node.heard = now
                if silent or node.breaker.probe_due():
                    self.background(self._probe(node))
            cluster = self.cluster
            unwell = any(not node.breaker.closed for node in cluster.nodes.values())
            if self.cluster.target.cluster and (cluster.stale or unwell) and now - self._slots_at > SLOTS_SECONDS:
                self._slots_at = now
                self.background(self._read_map())
            await asyncio.sleep(LOOK_SECONDS)

    async def _probe(self, node: Node) -> None:
        begun = self._clock()
        try:
            await asyncio.get_running_loop().run_in_executor(self._probes, node.server.ping)
        except Trouble as error:
            self.failed(node, error)
            return
        if self._clock() - begun > self._deadline():
            self.failed(node, Trouble("slow", f"{node.server.address}: it answers later than [remote] deadline allows"))
        else:
            self.well(node, probe=True)

    async def _read_map(self) -> None:
        servers = self.cluster.to_ask_for_slots()
        try:
            slots = await asyncio.get_running_loop().run_in_executor(self._probes, read_slots, servers)
        except Trouble as error:
            log.debug("the cluster's map cannot be read: %s", error)
            return
        if self.cluster.adopt(slots):
            self._on_other_map()
            log.info("the remote tier's cluster has %d nodes", len(self.cluster.nodes))

    def background(self, work: Coroutine[object, object, object]) -> None:
        """Have it done until all is stopped."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the remote tier's upkeep failed", exc_info=error)

    # -- for people

    def state(self) -> tuple[str, str]:
        """One word for all of them, and why."""
        nodes = self.cluster.nodes.values()
        for node in nodes:
            if not node.breaker.closed:
                return node.breaker.state, node.breaker.reason
        for node in nodes:
            if node.write_state != "ok":
                return node.write_state, node.write_reason
        return "ok", ""

    def rows(self) -> list[dict[str, object]]:
        """One for each."""
        return [
            {
                "address": str(node.server.address),
                "state": node.breaker.state,
                "writes": node.write_state,
                "opened": node.breaker.opened,
            }
            for node in self.cluster.nodes.values()
        ]

    def troubles(self) -> list[str]:
        """What is wrong, a sentence for each node."""
        found = []
        for node in self.cluster.nodes.values():
            if node.breaker.state not in ("ok", "connecting"):
                found.append(
                    f"the remote tier is not used for now: {node.breaker.reason}; "
                    "it is tried again by itself, and local tiers work as ever"
                )
            elif node.write_state != "ok":
                found.append(
                    f"the remote tier is read but not written: {node.write_reason}; it is tried again by itself"
                )
        return found
