from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from omlxd.storage import pages
from omlxd.storage.arena import Arena, Extent
from omlxd.storage.mapping import SegmentMap
from omlxd.storage.pages import PAGE_BYTES

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(4 * MIB, segment_bytes=2 * MIB)
    yield made
    made.close()


@pytest.fixture
def mapped(arena: Arena) -> Iterator[SegmentMap]:
    """A map that has every segment of the arena, as a client has."""
    with SegmentMap() as made:
        arena.on_segment(lambda s, added: made.add(s.id, os.dup(s.fd), s.nbytes) if added else made.drop(s.id))
        yield made


def block(arena: Arena, content: bytes) -> Extent:
    extent = arena.allocate(len(content))
    assert extent is not None
    arena.view(extent)[: len(content)] = content
    return extent


def open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/dev/fd"))


def in_a_child(code: str, fd: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); fd = {fd}\n{code}"
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        pass_fds=(fd,),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_what_the_daemon_wrote_is_read_without_a_copy(arena: Arena, mapped: SegmentMap) -> None:
    extent = block(arena, b"hot block")
    view = mapped.view(extent.segment, extent.offset, 9)
    assert bytes(view) == b"hot block"
    arena.view(extent)[:3] = b"HOT"
    assert bytes(view) == b"HOT block"


def test_what_a_client_stores_is_read_by_the_daemon_and_by_loads(arena: Arena, mapped: SegmentMap) -> None:
    extent = block(arena, bytes(9))
    view = mapped.view(extent.segment, extent.offset, 9)
    mapped.writable(extent.segment, extent.offset, 9)[:] = b"new block"
    assert bytes(arena.view(extent, 9)) == b"new block"
    assert bytes(view) == b"new block"


def test_a_view_for_a_load_cannot_be_written(arena: Arena, mapped: SegmentMap) -> None:
    extent = block(arena, b"block")
    view = mapped.view(extent.segment, extent.offset, 5)
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1
    array = np.frombuffer(view, np.uint8)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


def test_a_stray_write_through_a_load_dies_in_the_writer_and_changes_nothing(arena: Arena) -> None:
    extent = block(arena, b"block")
    segment = arena.segments[extent.segment]
    child = in_a_child(
        "import ctypes, numpy as np\n"
        "from omlxd.storage.mapping import SegmentMap\n"
        f"segments = SegmentMap(); segments.add(1, fd, {segment.nbytes})\n"
        f"address = np.frombuffer(segments.view(1, {extent.offset}, 5), np.uint8).ctypes.data\n"
        "print(ctypes.string_at(address, 5), flush=True)\n"
        "ctypes.memset(address, 0, 5)\n"
        "print('written')\n",
        segment.fd,
    )
    assert child.stdout == "b'block'\n"
    assert -child.returncode in (signal.SIGSEGV, signal.SIGBUS)
    assert bytes(arena.view(extent, 5)) == b"block"


def test_another_process_loads_and_stores_through_the_same_memory(arena: Arena) -> None:
    source, target = block(arena, b"from the daemon"), block(arena, bytes(15))
    segment = arena.segments[source.segment]
    child = in_a_child(
        "from omlxd.storage.mapping import SegmentMap\n"
        f"with SegmentMap() as segments:\n"
        f"    segments.add({segment.id}, fd, {segment.nbytes})\n"
        f"    read = segments.view({segment.id}, {source.offset}, 15)\n"
        f"    segments.writable({segment.id}, {target.offset}, 15)[:] = read[::-1]\n",
        segment.fd,
    )
    assert child.returncode == 0, child.stderr
    assert bytes(arena.view(target, 15)) == b"from the daemon"[::-1]


def test_a_view_stays_readable_after_its_segment_was_dropped(arena: Arena, mapped: SegmentMap) -> None:
    extent = block(arena, b"still here")
    view = mapped.view(extent.segment, extent.offset, 10)
    mapped.drop(extent.segment)
    assert extent.segment not in mapped
    mapped.close()
    arena.close()
    gc.collect()
    assert bytes(view) == b"still here"
    assert np.frombuffer(view, np.uint8)[0] == ord("s")


def test_memory_and_descriptors_go_with_the_last_view(arena: Arena) -> None:
    before = open_descriptors()
    segments = SegmentMap()
    extent = block(arena, b"block")
    segment = arena.segments[extent.segment]
    with_segment = open_descriptors()
    segments.add(segment.id, os.dup(segment.fd), segment.nbytes)
    view = segments.view(segment.id, 0, 5)
    writable = segments.writable(segment.id, 0, 5)
    segments.close()
    assert bytes(view) == bytes(writable) == b"block"
    assert open_descriptors() > with_segment
    del view, writable
    assert open_descriptors() == with_segment
    arena.close()
    assert open_descriptors() == before


def test_dropping_twice_or_what_was_never_there_is_nothing(mapped: SegmentMap, arena: Arena) -> None:
    extent = block(arena, b"x")
    assert len(mapped) == 1
    mapped.drop(extent.segment)
    mapped.drop(extent.segment)
    mapped.drop(99)
    assert len(mapped) == 0
    with pytest.raises(KeyError, match="segment 1 is not mapped"):
        mapped.view(extent.segment, 0, 1)


@pytest.mark.parametrize("populated", [False, True])
@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 5), (0, 2 * MIB + 1), (2 * MIB, 1), (0, -1), (3 * MIB, 0)])
def test_bytes_outside_the_segment_are_refused(
    arena: Arena, mapped: SegmentMap, offset: int, nbytes: int, populated: bool
) -> None:
    extent = block(arena, b"x")
    for get in (mapped.view, mapped.writable):
        with pytest.raises(ValueError, match="outside segment"):
            get(extent.segment, offset, nbytes)
    if populated:
        with pytest.raises(ValueError, match="outside segment"):
            mapped.populate(extent.segment, offset, nbytes)


def test_a_descriptor_with_less_behind_it_than_announced_is_refused_and_closed(arena: Arena) -> None:
    extent = block(arena, b"x")
    segment = arena.segments[extent.segment]
    before = open_descriptors()
    with SegmentMap() as segments:
        with pytest.raises(ValueError, match="behind the descriptor"):
            segments.add(1, os.dup(segment.fd), segment.nbytes + PAGE_BYTES)
        with pytest.raises(ValueError, match="nothing to map"):
            segments.add(1, os.dup(segment.fd), 0)
        segments.add(1, os.dup(segment.fd), segment.nbytes)
        with pytest.raises(ValueError, match="mapped already"):
            segments.add(1, os.dup(segment.fd), segment.nbytes)
        assert len(segments) == 1
    assert open_descriptors() == before


@pytest.mark.parametrize("write", [False, True])
def test_populate_makes_the_pages_of_a_slot_present_and_keeps_their_bytes(
    arena: Arena, mapped: SegmentMap, write: bool
) -> None:
    extent = block(arena, b"kept" + bytes(MIB - 4))
    if mapped.populate(extent.segment, extent.offset, MIB, write=write):
        assert (mapped.populated_bytes, mapped.unpopulated_calls) == (MIB, 0)
    else:
        assert sys.platform != "linux"
        assert (mapped.populated_bytes, mapped.unpopulated_calls) == (0, 1)
    assert bytes(mapped.view(extent.segment, extent.offset, 4)) == b"kept"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what is resident, and can populate")
def test_populate_for_a_store_backs_the_slot_with_memory(arena: Arena, mapped: SegmentMap) -> None:
    extent = arena.allocate(MIB)
    assert extent is not None
    assert arena.resident == 0
    assert mapped.populate(extent.segment, extent.offset, MIB, write=True)
    assert arena.resident == MIB


def test_populate_of_bytes_that_start_inside_a_page(arena: Arena, mapped: SegmentMap) -> None:
    extent = block(arena, bytes(MIB))
    mapped.populate(extent.segment, extent.offset + 100, 5000)
    mapped.populate(extent.segment, extent.offset, 0)
    assert mapped.populated_bytes == (5000 if sys.platform == "linux" else 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives single pages back and populates")
def test_what_the_kernel_cannot_do_is_false_and_what_fails_is_an_error() -> None:
    private = mmap.mmap(-1, PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert not pages.punch(memoryview(private)), "there is nothing shared to give back"
    fd = os.memfd_create("cut-off")
    try:
        os.ftruncate(fd, 2 * PAGE_BYTES)
        mapping = mmap.mmap(fd, 2 * PAGE_BYTES)
        os.ftruncate(fd, PAGE_BYTES)
        with pytest.raises(OSError, match=f"madvise.* over {2 * PAGE_BYTES} bytes"):
            pages.populate(memoryview(mapping), write=False)
    finally:
        os.close(fd)


def test_nothing_is_populated_and_punched_at_once() -> None:
    assert pages.populate(memoryview(b""), write=False) == pages.punch(memoryview(b"")) == (sys.platform == "linux")


@pytest.mark.parametrize(("nbytes", "rounded"), [(0, 0), (1, PAGE_BYTES), (PAGE_BYTES, PAGE_BYTES)])
def test_rounding_up_is_to_whole_pages(nbytes: int, rounded: int) -> None:
    assert pages.round_up(nbytes) == rounded
