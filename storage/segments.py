"""One piece of anonymous shared memory, and how the two systems make it.

Nothing here has a name that could outlive the processes: the memory goes with the last descriptor
and the last mapping of it.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import sys

from omlxd.storage import pages
from omlxd.storage.extents import ExtentAllocator


class Segment:
    """One piece of shared memory; ``id``, ``fd`` and ``nbytes`` are what a client needs to map it."""

    __slots__ = ("extents", "fd", "id", "memory", "nbytes", "readied")

    def __init__(self, segment_id: int, nbytes: int) -> None:
        self.id = segment_id
        self.readied = 0
        """Bytes from the start that were made present ahead, or used: none of them needs to be made so again."""
        self.nbytes = nbytes
        self.fd = open_shared_memory(nbytes)
        try:
            # Only ever let go of, never closed: views of it may be in use, and the last one unmaps it.
            mapped = mmap.mmap(self.fd, nbytes)
            pages.advise_huge(mapped)
            self.memory = memoryview(mapped)
        except BaseException:
            os.close(self.fd)
            raise
        self.extents = ExtentAllocator(nbytes)

    @property
    def used(self) -> int:
        """Bytes in extents handed out."""
        return self.extents.used

    @property
    def resident(self) -> int:
        """Bytes that the system backs with memory; the whole segment where it does not say (macOS)."""
        return os.fstat(self.fd).st_blocks * 512 if sys.platform == "linux" else self.nbytes

    def close(self) -> None:
        """Close the descriptor and let go of the mapping."""
        os.close(self.fd)
        self.memory = memoryview(b"")


def open_shared_memory(nbytes: int) -> int:
    """Return the descriptor of ``nbytes`` of anonymous shared memory, closed on exec. Raises ``OSError``.

    Where the system has seals (Linux), the size is sealed: no client can take memory away from under
    the daemon, which would kill it at the next touch.
    """
    if sys.platform != "linux":
        fd = unlinked_shared_memory()
    else:
        fd = os.memfd_create("omlxd-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        if sys.platform == "linux":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def unlinked_shared_memory() -> int:
    """Return the descriptor of a POSIX shared memory object whose name is gone already (macOS has no memfd).

    Names there are short (31 bytes), so ours are made of the pid and a counter; one that is taken,
    by a process that died between the two calls, is passed over.
    """
    # The standard library's own binding, under multiprocessing.shared_memory.
    import _posixshmem  # type: ignore[import-not-found]

    for attempt in itertools.count():
        name = f"/omlxd-{os.getpid()}-{attempt}"
        try:
            fd: int = _posixshmem.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
        except FileExistsError:
            continue
        _posixshmem.shm_unlink(name)
        return fd
    raise AssertionError("unreachable: the loop ends by returning or raising")
