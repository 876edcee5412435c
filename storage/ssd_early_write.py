"""Having the disk write while LMDB is still handing over.

LMDB's commit copies all new pages into the page cache and then waits for them to reach the disk: the disk does nothing in the
first part and the processor nothing in the second. Asked every millisecond to begin with what is there already, the
kernel does both at once (measured: a quarter off a spill). It promises nothing about what has arrived;
the commit's own sync does that as ever.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Protocol

WORTHWHILE = 4 << 20
"""Bytes of a commit; what is smaller is over before the disk has begun."""
_PAUSE = 0.001  # seconds; a commit of 256 MiB in groups took 220 ms plainly written, so 245, with 2 ms 251, 5 ms 283, without 330
_WRITE = 2  # SYNC_FILE_RANGE_WRITE of <fcntl.h>: begin, and wait for nothing


@contextmanager
def writing_early(descriptor: int, nbytes: int) -> Iterator[None]:
    """While the block runs, have the kernel begin to write what is dirty of the file.

    Does nothing for fewer than ``WORTHWHILE`` bytes, and where the system cannot (macOS). Errors are left for who syncs.
    """
    call = _sync_file_range() if nbytes >= WORTHWHILE else None
    if call is None:
        yield
        return
    over = threading.Event()

    def ask() -> None:
        while not over.wait(_PAUSE):
            call(descriptor, 0, 0, _WRITE)

    asker = threading.Thread(target=ask, name="omlxd-early-write")
    with suppress(RuntimeError):  # no thread to be had: the commit does without
        asker.start()
    try:
        yield
    finally:
        over.set()
        if asker.ident is not None:
            asker.join()


class _SyncFileRange(Protocol):
    def __call__(self, descriptor: int, offset: int, nbytes: int, flags: int, /) -> int: ...


@cache
def _sync_file_range() -> _SyncFileRange | None:
    """Through ctypes, which lets go of the GIL."""
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    function.restype = ctypes.c_int
    call: _SyncFileRange = function
    return call
