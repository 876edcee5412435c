from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import omlxd.storage.environment
from omlxd.storage import ssd_early_write
from omlxd.storage.environment import Durability, Environment
from omlxd.storage.ssd_early_write import WORTHWHILE, writing_early
from omlxd.storage.ssd_payload import locate
from tests.storage.ssd_store import key_of, payload_of
from tests.storage.test_environment import put, read


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The descriptor of each request to the kernel."""
    calls: list[int] = []

    def call(descriptor: int, offset: int, nbytes: int, flags: int) -> int:
        calls.append(descriptor)
        return -1  # errors are left for who syncs

    monkeypatch.setattr(ssd_early_write, "_sync_file_range", lambda: call)
    return calls


def wait_for(calls: list[int], count: int) -> None:
    until = time.monotonic() + 10
    while len(calls) < count:
        assert time.monotonic() < until, f"the kernel was asked {len(calls)} times, not {count}"
        time.sleep(0.001)


def test_kernel_is_asked_again_and_again_until_the_block_ends(asked: list[int]) -> None:
    with writing_early(17, WORTHWHILE):
        wait_for(asked, 3)
    before = len(asked)
    time.sleep(0.05)
    assert len(asked) == before
    assert set(asked) == {17}
    assert not any(thread.name == "omlxd-early-write" for thread in threading.enumerate())


def test_small_commits_and_systems_without_it_do_without(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with writing_early(17, WORTHWHILE - 1):
        time.sleep(0.05)
    assert not asked
    monkeypatch.setattr(ssd_early_write, "_sync_file_range", lambda: None)
    with writing_early(17, WORTHWHILE):
        assert not any(thread.name == "omlxd-early-write" for thread in threading.enumerate())


def test_without_a_thread_to_be_had_the_commit_goes_on(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with writing_early(17, WORTHWHILE):
        pass
    assert not asked


@pytest.mark.skipif(sys.platform != "linux", reason="sync_file_range is Linux's; elsewhere nothing is asked")
def test_kernel_begins_to_write_and_says_of_a_closed_file_that_it_cannot(tmp_path: Path) -> None:
    call = ssd_early_write._sync_file_range()
    assert call is not None
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(WORTHWHILE))
        file.flush()
        assert call(file.fileno(), 0, 0, 2) == 0
        descriptor = file.fileno()
    assert call(descriptor, 0, 0, 2) == -1


@pytest.mark.parametrize("durability", ["commit", "interval", "none"])
def test_large_commits_have_it_where_each_is_synced(
    tmp_path: Path, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered: list[int] = []

    @contextmanager
    def note(descriptor: int, nbytes: int) -> Iterator[None]:
        offered.append(nbytes)
        with writing_early(descriptor, nbytes):
            yield

    monkeypatch.setattr(omlxd.storage.environment, "writing_early", note)
    environment = Environment(tmp_path, map_bytes=128 << 20, durability=durability)
    try:
        key, nbytes = key_of(1, 0), 32 << 20
        put(environment, (key, nbytes))
        assert offered == [nbytes if durability == "commit" else 0]
        assert read(environment, locate(environment, key)) == payload_of(key, nbytes)
    finally:
        environment.close()
