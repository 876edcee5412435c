from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from omlxd.watching import Watcher, file_signature, model_signature


class Changes:
    """Counts changes; ``wait_for(n)`` returns when there were ``n``."""

    def __init__(self) -> None:
        self.seen = 0
        self._more = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self) -> None:
        self.seen += 1
        task = asyncio.get_running_loop().create_task(self._tell())
        self._tasks.add(task)

    async def _tell(self) -> None:
        async with self._more:
            self._more.notify_all()

    async def wait_for(self, count: int) -> None:
        async with self._more:
            await asyncio.wait_for(self._more.wait_for(lambda: self.seen >= count), 30)


@asynccontextmanager
async def running(*, look: float = 600.0) -> AsyncIterator[Watcher]:
    """A watcher that hears of changes through events alone, unless ``look`` is short."""
    watcher = Watcher(settle=0.02, look=look)
    task = asyncio.create_task(watcher.run())
    try:
        yield watcher
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def armed(watcher: Watcher) -> None:
    """Wait until events of all folders that exist arrive."""
    while not all(w.armed for w in watcher._watched):
        await asyncio.sleep(0.01)


def watch_file(watcher: Watcher, file: Path) -> Changes:
    changes = Changes()
    watcher.watch([file.parent], lambda: file_signature(file), changes, now=file_signature(file))
    return changes


def test_written_replaced_deleted_and_new_files_are_noticed_through_events(tmp_path: Path) -> None:
    async def scenario() -> None:
        file = tmp_path / "config.toml"
        file.write_text("a")
        async with running() as watcher:
            changes = watch_file(watcher, file)
            await armed(watcher)
            file.write_text("written in place")
            await changes.wait_for(1)
            (tmp_path / ".config.toml.swp").write_text("as editors do")
            os.replace(tmp_path / ".config.toml.swp", file)
            await changes.wait_for(2)
            file.unlink()
            await changes.wait_for(3)
            file.write_text("back")
            await changes.wait_for(4)

    asyncio.run(scenario())


def test_burst_of_writes_is_one_change(tmp_path: Path) -> None:
    async def scenario() -> None:
        file = tmp_path / "config.toml"
        file.write_text("a")
        async with running() as watcher:
            changes = watch_file(watcher, file)
            await armed(watcher)
            for index in range(200):
                file.write_text("x" * index)
            await changes.wait_for(1)
            # Another thing that is watched changes later: by the time that is told, a second call would have been.
            other = tmp_path / "other"
            later = watch_file(watcher, other)
            other.write_text("x")
            await later.wait_for(1)
            assert changes.seen == 1

    asyncio.run(scenario())


def test_folder_that_vanishes_and_returns_is_watched_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = tmp_path / "conf"
        folder.mkdir()
        file = folder / "config.toml"
        file.write_text("a")
        async with running(look=0.05) as watcher:
            changes = watch_file(watcher, file)
            await armed(watcher)
            shutil.rmtree(folder)
            await changes.wait_for(1)
            folder.mkdir()
            file.write_text("b")
            await changes.wait_for(2)
            await armed(watcher)
            file.write_text("longer")
            await changes.wait_for(3)

    asyncio.run(scenario())


def test_target_of_a_link_in_another_folder_is_noticed_by_looking(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "dotfiles").mkdir()
        (tmp_path / "conf").mkdir()
        target = tmp_path / "dotfiles" / "omlxd.toml"
        target.write_text("a")
        link = tmp_path / "conf" / "config.toml"
        link.symlink_to(target)
        async with running(look=0.05) as watcher:
            changes = watch_file(watcher, link)
            target.write_text("changed")
            await changes.wait_for(1)

    asyncio.run(scenario())


def test_forgotten_thing_tells_nothing_and_leaves_its_neighbour_watched(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two = tmp_path / "one", tmp_path / "two"
        async with running() as watcher:
            first = Changes()
            watched = watcher.watch([tmp_path], lambda: file_signature(one), first, now=None)
            second = watch_file(watcher, two)
            await armed(watcher)
            watcher.forget(watched)
            one.write_text("x")
            two.write_text("x")
            await second.wait_for(1)
            assert first.seen == 0

    asyncio.run(scenario())


def test_failing_callback_does_not_end_the_watch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        file = tmp_path / "file"
        after = Changes()

        def changed() -> None:
            after()
            if after.seen == 1:
                raise RuntimeError("not now")

        async with running() as watcher:
            watcher.watch([tmp_path], lambda: file_signature(file), changed, now=None)
            await armed(watcher)
            file.write_text("x")
            await after.wait_for(1)
            file.write_text("xy")
            await after.wait_for(2)

    asyncio.run(scenario())
    assert "not now" in caplog.text


def test_signature_of_a_model_changes_with_weights_and_description_only(tmp_path: Path) -> None:
    model = tmp_path / "model"
    assert model_signature(model) is None
    model.mkdir()
    assert model_signature(model) is None
    (model / "model.safetensors").write_bytes(b"1234")
    (model / "config.json").write_text("{}")
    first = model_signature(model)
    (model / "README.md").write_text("hello")
    (model / "dangling.safetensors").symlink_to(tmp_path / "nowhere")
    assert model_signature(model) == first
    (model / "config.json").write_text('{"layers": 3}')
    second = model_signature(model)
    assert second != first
    (model / "model-00002.safetensors").write_bytes(b"5678")
    assert model_signature(model) != second
