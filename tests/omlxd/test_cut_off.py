"""Clients that the daemon cuts off while they use its memory, stopped meanwhile or not: nobody else gets that memory too early."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from omlxd.server import Server, ServerSettings
from omlxd.storage.arena import Arena
from omlxd.storage.blocks import BlockMeta, block_key
from omlxd.storage.ram import RamTier
from omlxd.storage.tiers import Store, StoreSettings

NBYTES = 64 << 10
BLOCKS = 8
SEIZE_SECONDS = 0.05

PROLOGUE = f"""
import asyncio, gc, os, signal, sys
import numpy as np
import omlxd
import omlxd.aio
NBYTES, BLOCKS = {NBYTES}, {BLOCKS}
GARBAGE = b"\\xff" * 4  # a frame of 4 GiB: the daemon ends the connection
keys = [f"child-{{i}}".encode().ljust(32, b".") for i in range(BLOCKS)]
def say(what):
    print(what, flush=True)
"""

WRITER = """
from omlxd import storing
copy = storing.np.copyto
def stopped_before_the_first(out, source):
    storing.np.copyto = copy
    cache._link._sock.send(GARBAGE)
    os.kill(os.getpid(), signal.SIGSTOP)
    copy(out, source)
storing.np.copyto = stopped_before_the_first
cache = omlxd.connect(sys.argv[1])
space = cache.namespace(model="m", fingerprint="f")
try:
    space.store_keys(keys, [b"C" * NBYTES] * BLOCKS)
except omlxd.Unavailable:
    say("written")
sys.stdin.read()
"""

ASYNC_WRITER = """
from omlxd import storing
copy = storing.np.copyto
def stopped_before_the_first(out, source):
    storing.np.copyto = copy
    cache._link._connection.sock.send(GARBAGE)
    os.kill(os.getpid(), signal.SIGSTOP)
    copy(out, source)
storing.np.copyto = stopped_before_the_first
async def work():
    global cache
    cache = await omlxd.aio.connect(sys.argv[1])
    space = await cache.namespace(model="m", fingerprint="f")
    try:
        await space.store_keys(keys, [b"C" * NBYTES] * BLOCKS)
    except omlxd.Unavailable:
        say("written")
    await asyncio.to_thread(sys.stdin.read)
asyncio.run(work())
"""

READER = """
cache = omlxd.connect(sys.argv[1])
space = cache.namespace(model="m", fingerprint="f")
assert space.store_keys(keys, [b"C" * NBYTES] * BLOCKS).stored == BLOCKS
lease = space.load_keys(keys)
held = [np.frombuffer(block.view, np.uint8) for block in lease]
cache._link._sock.send(GARBAGE)
os.kill(os.getpid(), signal.SIGSTOP)
assert all((array == ord("C")).all() for array in held)
try:
    lease.check()
except omlxd.LeaseEnded:
    pass
assert all((array == ord("C")).all() for array in held)
del held
gc.collect()
say("read")
sys.stdin.read()
"""

ASYNC_READER = """
async def work():
    cache = await omlxd.aio.connect(sys.argv[1])
    space = await cache.namespace(model="m", fingerprint="f")
    assert (await space.store_keys(keys, [b"C" * NBYTES] * BLOCKS)).stored == BLOCKS
    lease = await space.load_keys(keys)
    held = [np.frombuffer(block.view, np.uint8) async for block in lease]
    cache._link._connection.sock.send(GARBAGE)
    os.kill(os.getpid(), signal.SIGSTOP)
    await asyncio.sleep(0.1)
    try:
        lease.check()
    except omlxd.LeaseEnded:
        pass
    assert all((array == ord("C")).all() for array in held)
    del held
    gc.collect()
    say("read")
    await asyncio.to_thread(sys.stdin.read)
asyncio.run(work())
"""


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.01)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


async def fill(store: Store, salt: str) -> list[bytes]:
    """Store as many blocks of others' as there is room for; their keys."""
    keys = [block_key(f"{salt}-{index}".encode().ljust(32, b".")) for index in range(2 * BLOCKS)]
    metas = [BlockMeta(key, b"n" * 32, NBYTES, None, 0) for key in keys]
    offer = await store.prepare_store("other", [], metas, block_tokens=64, timeout=0.0)
    for one in offer.reserved:
        store.ram.view(one.block)[:] = b"O" * NBYTES
    store.complete_store("other", [one.reservation for one in offer.reserved], success=True)
    return [one.block.meta.key for one in offer.reserved]


@pytest.mark.skipif(sys.platform != "linux", reason="whether a process is stopped is read from /proc")
@pytest.mark.parametrize("script", [WRITER, ASYNC_WRITER, READER, ASYNC_READER], ids=["w", "aio-w", "r", "aio-r"])
@pytest.mark.parametrize("ends", ["goes on", "is killed"])
def test_memory_of_a_client_that_was_cut_off_and_stopped_is_kept_from_others(
    tmp_path: Path, script: str, ends: str
) -> None:
    async def work() -> None:
        ram = RamTier(Arena(2 * BLOCKS * NBYTES, segment_bytes=2 * BLOCKS * NBYTES))
        store = Store(ram, None, StoreSettings(seize_seconds=SEIZE_SECONDS), clock=time.monotonic)
        store.start()
        server = Server(store, ServerSettings(), on_shutdown=lambda: None)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        server.listen([listening])
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROLOGUE + script, str(tmp_path / "s")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert child.stdout is not None
            await until(lambda: is_stopped(child.pid))
            await until(lambda: not server.sessions)
            assert store.held()["seized_blocks"] == BLOCKS
            await asyncio.sleep(5 * SEIZE_SECONDS)
            for key in list(ram.blocks):
                ram.detach(ram.blocks[key])
            others = await fill(store, "one")
            assert len(others) == BLOCKS, "all the room that the child has not got"
            if ends == "goes on":
                os.kill(child.pid, signal.SIGCONT)
                assert await asyncio.wait_for(child.stdout.readline(), 30) in (b"written\n", b"read\n")
            else:
                child.kill()
            await until(lambda: not store.held()["seized_blocks"])
            assert (child.returncode is None) == (ends == "goes on"), "it is not its end that gave the memory back"
            for key in others:
                assert bytes(ram.view(ram.blocks[key])) == b"O" * NBYTES
            assert len(await fill(store, "two")) == 2 * BLOCKS
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()
            server.close_sessions("the test is over")
            server.stop_listening()
            await store.stop()

    asyncio.run(work())
