"""What the arena asks of the kernel about pages: make them present, give them back.

``mmap.madvise`` of the standard library keeps the GIL while the kernel works (measured: 155 ms for
256 MiB, in which no other thread of the engine ran), so these few calls go through ctypes, which
lets go of it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from functools import cache
from typing import Protocol

import numpy as np

PAGE_BYTES = mmap.PAGESIZE
"""4,096 on most Linux systems, 16,384 on macOS on Apple silicon."""

# <linux/mman.h>; the standard library does not name the two newer ones.
_MADV_REMOVE = 9
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23


def round_up(nbytes: int, page_bytes: int = PAGE_BYTES) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // page_bytes) * page_bytes


def populate(view: memoryview, *, write: bool) -> bool:
    """Make the pages of a page-aligned mapped view present, so that touching them faults no more.

    ``write`` prepares them for writing (and backs holes with memory). Returns False where the
    kernel cannot do it (Linux before 5.14, macOS): the pages then fault one by one when used.
    Raises ``OSError`` when the kernel can and fails, for lack of memory say.
    """
    if sys.platform != "linux":
        return False
    return _madvise(view, _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ)


def punch(view: memoryview) -> bool:
    """Give the memory behind a page-aligned writable view of shared memory back to the system.

    The bytes read as zeros afterwards, in every process that maps them. Returns False where the
    kernel cannot do it (macOS).
    """
    if sys.platform != "linux":
        return False
    return _madvise(view, _MADV_REMOVE)


def advise_huge(mapped: mmap.mmap) -> bool:
    """Ask for huge pages behind a mapping, where the system allows them for shared memory: fewer faults, fewer TLB misses.

    Returns whether the kernel took the advice; it may still not follow it.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return False
    try:
        mapped.madvise(advice)
    except OSError:
        return False
    return True


@cache
def can_punch() -> bool:
    """Tell whether ``punch`` works on this system; tried once, on one page."""
    if sys.platform != "linux":
        return False
    fd = os.memfd_create("omlxd-probe", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, PAGE_BYTES)
        return punch(memoryview(mmap.mmap(fd, PAGE_BYTES)))
    finally:
        os.close(fd)


class _Madvise(Protocol):
    def __call__(self, address: int, nbytes: int, advice: int, /) -> int: ...


@cache
def _libc_madvise() -> _Madvise:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    madvise: _Madvise = function
    return madvise


def _madvise(view: memoryview, advice: int) -> bool:
    held = np.frombuffer(view, np.uint8)  # keeps the mapping while the kernel works on it
    if held.size == 0:
        return True
    if _libc_madvise()(held.ctypes.data, held.size, advice) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
        if held.ctypes.data % PAGE_BYTES:
            raise ValueError(f"a view that starts at {held.ctypes.data:#x}: not on a page of {PAGE_BYTES} bytes")
        return False
    raise OSError(code, f"madvise({advice}) over {held.size} bytes: {os.strerror(code)}")
