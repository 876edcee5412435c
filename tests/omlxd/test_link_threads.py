"""One blocking link used by many threads at once: no answer is lost, none reaches the wrong thread, nobody sleeps on."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import omlxd
from omlxd.errors import Refused, Unavailable
from omlxd.link import Link
from omlxd.protocol import FrameReader, Message, encode
from omlxd.storage.mapping import SegmentMap
from omlxd.warming import Warmer

Script = Callable[[Message, Callable[[Message], None]], None]


@contextmanager
def scripted_daemon(path: Path, script: Script) -> Iterator[None]:
    """Greets, then hands each request to ``script(request, send)``, in one thread a connection."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen()
    ends: list[socket.socket] = []

    def serve(sock: socket.socket) -> None:
        reader = FrameReader()
        sending = threading.Lock()

        def send(message: Message) -> None:
            with sending:
                sock.sendall(encode(message))

        while data := _received(sock):
            for request in reader.feed(data):
                if request["v"] == "hello":
                    body = {"version": 1, "boot": "b", "pid": 0, "max_frame": 1 << 20, "max_reserve": 1 << 20}
                    send({"i": request["i"], "ok": body})
                else:
                    script(request, send)

    def accept() -> None:
        while True:
            try:
                sock, _ = listening.accept()
            except OSError:
                return
            ends.append(sock)
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield
    finally:
        for end in ends:
            end.close()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(5)


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except OSError:
        return b""


def linked(path: Path) -> Link:
    link = Link(str(path), name="test", timeout=5.0)
    link.greet(5.0)
    return link


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


def test_answers_in_any_order_reach_who_asked(path: Path) -> None:
    """Sixteen threads; the daemon answers in bursts, shuffled, some in parts."""
    rng = random.Random(1)
    waiting: list[tuple[int, int]] = []
    lock = threading.Lock()

    def answer_all(send: Callable[[Message], None]) -> None:
        with lock:
            burst = waiting[:]
            waiting.clear()
        rng.shuffle(burst)
        for call, number in burst:
            for part in range(number % 3):
                send({"i": call, "more": {"n": number, "part": part}})
            send({"i": call, "ok": {"n": number}})

    def script(request: Message, send: Callable[[Message], None]) -> None:
        with lock:
            waiting.append((request["i"], request["n"]))
            first = len(waiting) == 1
            full = len(waiting) >= rng.randint(1, 8)
        if full:
            answer_all(send)
        elif first:  # nobody is made to wait for company for long
            threading.Timer(0.01, answer_all, (send,)).start()

    wrong: list[object] = []
    with scripted_daemon(path, script):
        link = linked(path)

        def ask(thread: int) -> None:
            try:
                for turn in range(200):
                    number = thread * 1000 + turn
                    call = link.begin("echo", {"n": number})
                    while (answer := link.next(call, 60.0)).kind == "more":
                        if answer.body["n"] != number:
                            wrong.append((number, answer.body))
                    if answer.body["n"] != number:
                        wrong.append((number, answer.body))
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads), "a thread sleeps on"
        assert not wrong
        link.close()


def test_a_lone_answer_wakes_the_thread_that_waits_behind_a_reader(path: Path) -> None:
    """One thread reads for an answer that never comes; the other's arrives through it."""

    def script(request: Message, send: Callable[[Message], None]) -> None:
        if request["v"] == "echo":
            send({"i": request["i"], "ok": {"n": request["n"]}})

    with scripted_daemon(path, script):
        link = linked(path)
        never = link.begin("never", {})
        outcome: list[object] = []

        def wait_for_ever() -> None:
            try:
                link.next(never, 60.0)
            except Unavailable as error:
                outcome.append(error)

        reader = threading.Thread(target=wait_for_ever)
        reader.start()
        for number in range(500):
            assert link.ask("echo", {"n": number}, 30.0) == {"n": number}
        link.close()
        reader.join(20)
        assert not reader.is_alive(), "closing wakes who waits"
        assert len(outcome) == 1


def test_the_reader_hands_over_when_it_has_its_answer(path: Path) -> None:
    """Whoever waits behind a reader that leaves becomes the reader; nobody's patience is used up."""
    slow: list[tuple[int, Callable[[Message], None]]] = []

    def script(request: Message, send: Callable[[Message], None]) -> None:
        if request["v"] == "slow":
            slow.append((request["i"], send))
            send({"i": request["i"], "more": {}})
        elif request["v"] == "release":
            for call, to in slow:
                to({"i": call, "ok": {"slow": True}})
            slow.clear()
        else:
            send({"i": request["i"], "ok": {}})

    with scripted_daemon(path, script):
        link = linked(path)
        for _ in range(50):
            call = link.begin("slow", {})
            assert link.next(call, 30.0).kind == "more"
            got: list[Message] = []
            waiter = threading.Thread(target=lambda call=call, got=got: got.append(link.next(call, 30.0).body))
            waiter.start()
            for _ in range(3):
                link.ask("quick", {}, 30.0)
            link.tell("release", {})
            waiter.join(40)
            assert got == [{"slow": True}]
        link.close()


def test_one_late_answer_does_not_end_a_link_on_which_others_get_theirs(path: Path) -> None:
    def script(request: Message, send: Callable[[Message], None]) -> None:
        if request["v"] == "echo":
            send({"i": request["i"], "ok": {}})

    with scripted_daemon(path, script):
        link = linked(path)
        late = link.begin("never", {})
        stop = threading.Event()

        def chat() -> None:
            while not stop.is_set():
                link.ask("echo", {}, 30.0)

        chatting = threading.Thread(target=chat)
        chatting.start()
        with pytest.raises(Unavailable, match="did not answer within"):
            link.next(late, 0.3)
        assert link.dead is None
        link.ask("echo", {}, 30.0)
        stop.set()
        chatting.join(20)
        link.close()


def test_a_daemon_that_says_nothing_at_all_ends_it(path: Path) -> None:
    with scripted_daemon(path, lambda request, send: None):
        link = linked(path)
        with pytest.raises(Unavailable, match="did not answer within"):
            link.ask("never", {}, 0.1)
        assert link.hung
        with pytest.raises(Unavailable):
            link.ask("never", {}, 0.1)
        link.retire()


def test_what_was_given_to_nobody_is_given_back(path: Path) -> None:
    """A load and a reservation whose askers have gone: the answers that come later are undone."""
    undone: list[Message] = []
    answered = threading.Event()

    def script(request: Message, send: Callable[[Message], None]) -> None:
        if request["v"] in ("release", "complete_store"):
            undone.append(request)
            send({"i": request["i"], "ok": {}})
            if len(undone) == 2:
                answered.set()
        elif request["v"] == "echo":
            send({"i": load.id, "ok": {"lease": 7, "slots": [], "stopped": None}})
            send({"i": store.id, "ok": {"slots": [[0, 31, 1, 0], [1, 32, 1, 4096]], "present": 0, "declined": {}}})
            send({"i": request["i"], "ok": {}})

    with scripted_daemon(path, script):
        link = linked(path)
        load, store = link.begin("load", {}), link.begin("prepare_store", {})
        link.abandon(load)
        link.abandon(store)
        link.ask("echo", {}, 30.0)
        assert answered.wait(20)
        assert [(one["v"], one.get("lease"), one.get("reservations"), one.get("ok")) for one in undone] == [
            ("release", 7, None, None),
            ("complete_store", None, [31, 32], False),
        ]
        link.close()


@pytest.mark.parametrize("garbage", [b"\x05\x00\x00\x00hello", b"\xff\xff\xff\xff", encode({"i": 0})])
def test_what_speaks_another_protocol_is_unavailable(path: Path, garbage: bytes) -> None:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen()

    def answer() -> None:
        sock, _ = listening.accept()
        sock.sendall(garbage)
        while _received(sock):
            pass
        sock.close()

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises((Unavailable, Refused)):
        omlxd.connect(path, timeout=2.0)
    thread.join(20)
    assert not thread.is_alive(), "the client has hung up"
    listening.close()


def test_an_error_answer_is_refused_and_the_link_goes_on(path: Path) -> None:
    def script(request: Message, send: Callable[[Message], None]) -> None:
        send({"i": request["i"], "err": {"code": "too_many", "message": "one too many"}})

    with scripted_daemon(path, script):
        link = linked(path)
        for _ in range(3):
            with pytest.raises(Refused, match="one too many") as caught:
                link.ask("anything", {}, 20.0)
            assert caught.value.code == "too_many"
        link.close()
        deadline = time.monotonic() + 10
        while link.dead is None:
            assert time.monotonic() < deadline


def test_a_lease_may_end_in_the_garbage_collector_of_a_thread_that_is_warming() -> None:
    """What `_steps` allocates may start a collection, which may end a lease."""
    warmer = Warmer(SegmentMap())

    def runs() -> Iterator[tuple[int, int, int, bool, bool]]:
        warmer.forget_slots()
        yield (0, 0, 1, False, False)

    done = threading.Event()

    def work() -> None:
        warmer._add(warmer._urgent, runs())
        done.set()

    threading.Thread(target=work, daemon=True).start()
    assert done.wait(10)
