"""The contract of the MLX seam. It runs where MLX copies and where it does not; what differs is asked of the seam."""

from __future__ import annotations

import gc
import mmap
import weakref

import mlx.core as mx
import numpy as np
import pytest

from omlxd.storage import metal

PAGE = mmap.PAGESIZE


def slot(nbytes: int) -> tuple[np.ndarray, memoryview]:
    """Page-aligned shared memory, as a slot of the arena is, with something in it; the writable bytes and a view."""
    memory = np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)[:nbytes]
    memory[:] = np.arange(nbytes, dtype=np.uint8)
    return memory, memoryview(memory).toreadonly()


@pytest.mark.parametrize("nbytes", [0, 1, 64, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 7])
def test_an_adopted_view_is_a_flat_array_of_its_bytes(nbytes: int) -> None:
    memory, view = slot(nbytes)
    array = metal.adopt(view)
    assert array.dtype == mx.uint8
    assert array.shape == (nbytes,)
    assert np.array(array).tobytes() == memory.tobytes()


def test_bytes_and_views_that_start_inside_a_page_are_adopted_too() -> None:
    _, view = slot(2 * PAGE)
    assert metal.adopt(b"abc").tolist() == [97, 98, 99]
    assert metal.adopt(view[5:300]).tolist() == [i % 256 for i in range(5, 300)]


def test_the_seam_says_truly_whether_memory_is_shared() -> None:
    memory, view = slot(PAGE)
    array = metal.adopt(view)
    mx.eval(array)
    memory[0] = 200
    assert (array[0].item() == 200) == metal.is_zero_copy()


def test_tensors_of_an_adopted_array_are_slices_views_and_reshapes_of_it() -> None:
    memory, view = slot(PAGE)
    flat = metal.adopt(view)
    tensor = flat[128 : 128 + 24].view(mx.float16).reshape(3, 4)
    expected = memory[128 : 128 + 24].view(np.float16).reshape(3, 4)
    assert np.array(tensor).tobytes() == expected.tobytes()


def test_memory_is_held_for_as_long_as_the_last_array_over_it_is_and_no_longer() -> None:
    memory, view = slot(PAGE)
    anchor = weakref.ref(memory)
    del memory
    flat = metal.adopt(view)
    part = flat[64:128].view(mx.uint32)
    del view, flat
    gc.collect()
    assert (anchor() is not None) == metal.is_zero_copy()
    assert np.array(part).tobytes() == bytes(range(64, 128))
    del part
    gc.collect()
    assert anchor() is None


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1])
def test_whole_pages_stretch_to_the_end_of_the_last_page_and_hold_the_memory(nbytes: int) -> None:
    memory, view = slot(nbytes)
    held = np.frombuffer(view, np.uint8)
    stretched = metal.whole_pages(held)
    assert stretched.size == -(-nbytes // PAGE) * PAGE
    assert stretched.ctypes.data == held.ctypes.data
    assert bytes(stretched[:nbytes]) == memory.tobytes()
    assert not stretched.flags.writeable
    anchor = weakref.ref(memory)
    del memory, view, held
    gc.collect()
    assert anchor() is not None
    del stretched
    assert anchor() is None


def test_an_array_that_does_not_start_on_a_page_is_not_stretched() -> None:
    _, view = slot(PAGE)
    held = np.frombuffer(view[1:], np.uint8)
    assert metal.whole_pages(held) is held


@pytest.mark.parametrize(
    "make",
    [
        lambda a: a,
        lambda a: a[:, 1:3],
        lambda a: a.T,
        lambda a: a[::2, ::3],
        lambda a: mx.broadcast_to(a[:1], (5, 6)),
        lambda a: a + 1,
        lambda a: a[0, 0],
        lambda a: a[:0],
    ],
    ids=["whole", "slice", "transpose", "steps", "broadcast", "lazy", "scalar", "empty"],
)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32, mx.uint8, mx.bool_])
def test_a_host_view_has_the_bytes_of_the_array_in_row_major_order(make: object, dtype: mx.Dtype) -> None:
    array = make(mx.arange(24).reshape(4, 6).astype(dtype))  # type: ignore[operator]
    host = metal.host_view(array)
    bits = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[dtype.size]
    expected = np.array(mx.contiguous(array).view(bits)) if array.ndim else np.array(array.reshape(1).view(bits))
    assert np.ascontiguousarray(host).tobytes() == expected.tobytes()


def test_a_host_view_of_a_contiguous_array_shares_its_memory() -> None:
    array = mx.zeros((4, 4), mx.bfloat16)
    mx.eval(array)
    one, other = metal.host_view(array), metal.host_view(array)
    assert one.ctypes.data == other.ctypes.data


def test_every_dtype_name_leads_to_the_dtype_and_back() -> None:
    for name in ("bool", "bfloat16", "float16", "float32", "uint8", "int8", "uint32", "int32", "int64", "complex64"):
        assert metal.dtype_name(metal.dtype_of(name)) == name
    with pytest.raises(KeyError):
        metal.dtype_of("float8")
