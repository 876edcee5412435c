"""A socket on an event loop: bytes and descriptors arrive whole and in order, a peer that does not read is cut off."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from omlxd.connection import Connection
from omlxd.descriptors import MAX_FDS, receive_into


class End:
    """One end of a connection and what came through it."""

    def __init__(self, sock: socket.socket, max_queued: int = 1 << 30) -> None:
        self.data = bytearray()
        self.fds: list[int] = []
        self.closed: list[str] = []
        self.connection = Connection(sock, asyncio.get_running_loop(), self._take, self.closed.append, max_queued)

    def _take(self, data: memoryview, fds: list[int]) -> None:
        self.data += data
        self.fds += fds


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


@pytest.fixture(params=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> asyncio.Runner:
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
    return asyncio.Runner(loop_factory=factory)


def test_much_more_than_a_socket_buffer_arrives_in_order(runner: asyncio.Runner) -> None:
    async def talk() -> None:
        one, two = map(End, socket.socketpair())
        sent = [os.urandom(size) for size in (1, 3_000_000, 10, 5_000_000, 2)]
        for data in sent:
            one.connection.send(data)
        assert one.connection.queued > 0
        await until(lambda: len(two.data) == sum(map(len, sent)))
        assert two.data == b"".join(sent)
        assert one.connection.queued == 0
        one.connection.close("done")
        await until(lambda: two.closed)
        assert two.closed == ["closed by the peer"]

    with runner:
        runner.run(talk())


def test_descriptors_come_with_their_bytes_and_are_closed_at_the_sender(runner: asyncio.Runner, tmp_path: Path) -> None:
    async def talk() -> None:
        one, two = map(End, socket.socketpair())
        gc.collect()  # what earlier tests have left
        before = len(os.listdir("/proc/self/fd"))
        for index in range(3):
            file = tmp_path / str(index)
            file.write_text(f"file {index}")
            one.connection.send(bytes(500_000), [os.open(file, os.O_RDONLY)])
        await until(lambda: len(two.data) == 1_500_000)
        assert [os.read(fd, 100) for fd in two.fds] == [b"file 0", b"file 1", b"file 2"]
        assert all(not os.get_inheritable(fd) for fd in two.fds)
        for fd in two.fds:
            os.close(fd)
        assert len(os.listdir("/proc/self/fd")) == before

    with runner:
        runner.run(talk())


def test_a_peer_that_does_not_read_is_cut_off_at_the_bound(runner: asyncio.Runner) -> None:
    async def talk() -> None:
        mine, theirs = socket.socketpair()
        end = End(mine, max_queued=1_000_000)
        fd = os.open(os.devnull, os.O_RDONLY)
        for _ in range(30):
            end.connection.send(bytes(100_000))
        end.connection.send(b"late", [fd])
        assert end.connection.closed
        assert not end.closed, "who sends is in the middle of something: it is told later"
        await until(lambda: end.closed)
        assert "unread" in end.closed[0]
        assert len(end.closed) == 1
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        theirs.close()

    with runner:
        runner.run(talk())


def test_a_last_frame_is_sent_before_the_end(runner: asyncio.Runner) -> None:
    async def talk() -> None:
        one, two = map(End, socket.socketpair())
        one.connection.send(bytes(3_000_000))
        one.connection.finish(b"farewell", "told")
        await until(lambda: two.closed)
        assert len(two.data) == 3_000_008
        assert two.data.endswith(b"farewell")
        assert one.closed == ["finished"]

    with runner:
        runner.run(talk())


def test_a_paused_connection_takes_nothing_until_it_is_resumed(runner: asyncio.Runner) -> None:
    async def talk() -> None:
        one, two = map(End, socket.socketpair())
        two.connection.pause_reading()
        one.connection.send(b"x")
        for _ in range(20):
            await asyncio.sleep(0)
        assert not two.data
        two.connection.resume_reading()
        await until(lambda: two.data)

    with runner:
        runner.run(talk())


def test_more_descriptors_than_fit_are_an_error_and_none_stays_open() -> None:
    mine, theirs = socket.socketpair()
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(MAX_FDS + 8)]
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(mine, [b"x"], fds)
    with pytest.raises(OSError, match="descriptors were lost"):
        receive_into(theirs, bytearray(10))
    assert len(os.listdir("/proc/self/fd")) == before
    for fd in fds:
        os.close(fd)
    mine.close()
    theirs.close()


def test_a_client_that_was_cut_off_does_not_look_as_if_it_had_let_go(runner: asyncio.Runner) -> None:
    async def talk() -> None:
        ours, theirs = socket.socketpair()
        daemon, closed = End(ours), []
        client = Connection(
            theirs, asyncio.get_running_loop(), lambda data, fds: None, closed.append, half_closes=False
        )
        daemon.connection.close("cut off")
        await until(lambda: closed)
        assert not daemon.connection.peer_has_let_go, "it may be in the middle of writing"
        client.let_go()
        assert daemon.connection.peer_has_let_go

    with runner:
        runner.run(talk())
