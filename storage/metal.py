"""The seam to MLX: all that differs between Metal and the CPU build, and all that MLX must be asked.

On Metal an array can live in memory that MLX did not allocate: `adopt` gives an array over the
caller's bytes. On the CPU build the same call copies. Nothing else in this project needs to know.

Who keeps the memory alive: the array holds the DLPack capsule, the capsule the NumPy array, the
NumPy array the memoryview it was made of, and that one the mapping (and whatever the memoryview was
made over: a lease's anchor). All of it goes when the last MLX array that shares the buffer goes;
slices, views and reshapes share it.

MLX is imported when a function needs it, not before: the daemon and the command line start without.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import mlx.core as mx

Bytes: TypeAlias = NDArray[np.uint8]
HostBytes: TypeAlias = "memoryview | bytes | bytearray | Bytes"

BFLOAT16 = "bfloat16"
"""The one dtype that MLX has and NumPy has not; it travels as its bytes."""


@cache
def is_zero_copy() -> bool:
    """Tell whether ``adopt`` shares memory here (Metal) or copies (CPU build). Tried once, on one page.

    An MLX that shares memory but would also write to it counts as one that copies: some reuse the
    buffer of an input that nobody else refers to for their output ("donation"), and it is a block's.
    """
    import mlx.core as mx

    page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
    try:
        adopted = mx.from_dlpack(page, copy=False)
    except (AttributeError, TypeError, ValueError):  # no from_dlpack, no copy argument, or it must copy
        return False
    changed = adopted + 1
    del adopted
    mx.eval(changed)
    return not page.any()


def adopt(view: HostBytes) -> mx.array:
    """Return the bytes of ``view`` as a flat ``uint8`` array: in place on Metal, a copy elsewhere.

    In place needs a view that starts on a page, as every slot in the arena does; another one is
    copied there too. MLX operations do not write to an array in place, see `is_zero_copy`; whoever
    writes through its buffer (``np.array(a, copy=False)[0] = 1``) faults, as the pages are read-only.
    """
    import mlx.core as mx

    held = np.frombuffer(view, np.uint8)
    if held.size == 0:
        return mx.zeros((0,), mx.uint8)
    if not is_zero_copy():
        return mx.array(held)
    return mx.from_dlpack(whole_pages(held))[: held.size]


def whole_pages(held: Bytes) -> Bytes:
    """Return ``held`` stretched to the end of its last page, since Metal takes whole pages only.

    Reading there is safe: memory is mapped by the page, so the rest of a mapped page is mapped. An
    array that does not start on a page is returned as it is.
    """
    if held.ctypes.data % mmap.PAGESIZE:
        return held
    stretched = -(-held.size // mmap.PAGESIZE) * mmap.PAGESIZE
    return np.lib.stride_tricks.as_strided(held, (stretched,), (1,), writeable=False)


def host_view(array: mx.array) -> NDArray[np.generic]:
    """Return an MLX array as a NumPy array over the same memory, without a copy.

    A contiguous array comes as its flat bytes; another one (a slice, a transpose) in its shape and
    strides, bfloat16 as ``uint16``. What is lazy is computed on the calling thread.
    """
    try:
        flat: Bytes = np.frombuffer(array, np.uint8)  # type: ignore[call-overload]  # MLX's stubs leave the buffer protocol out
        return flat
    except BufferError:
        return np.array(_in_host_dtype(array), copy=False)


def _in_host_dtype(array: mx.array) -> mx.array:
    import mlx.core as mx

    return array.view(mx.uint16) if array.dtype == mx.bfloat16 else array


def evaluate(arrays: Iterable[mx.array]) -> None:
    """Compute what is still lazy, all at once, on the calling thread. Releases the GIL."""
    import mlx.core as mx

    mx.eval(list(arrays))


def dtype_name(dtype: mx.Dtype) -> str:
    """Return the name that layouts use: ``bfloat16``, ``uint32``, ``bool``, ..."""
    return _names()[dtype]


def dtype_of(name: str) -> mx.Dtype:
    """Return the MLX dtype of a layout's name; ``KeyError`` for a name that MLX does not have."""
    return _dtypes()[name]


@cache
def _dtypes() -> dict[str, mx.Dtype]:
    import mlx.core as mx

    plain = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
    floats = ("float16", BFLOAT16, "float32", "float64", "complex64")
    return {"bool": mx.bool_, **{name: getattr(mx, name) for name in (*plain, *floats)}}


@cache
def _names() -> dict[mx.Dtype, str]:
    return {dtype: name for name, dtype in _dtypes().items()}
