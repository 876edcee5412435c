"""The data file's pages: how many are in use, how the free ones lie, giving them back. Writer's thread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omlxd.storage.environment import Environment
from omlxd.storage.ssd_pages import punch, runs_of
from omlxd.storage.ssd_tree import free_pages

MOST_FREE_TO_LOOK_AT = 1 << 16
"""Free pages; with more of them runs are long enough anyway, and to list them would take long."""
KEPT_FREE_BYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class Pages:
    """The file in pages: ever used, and used now (trees and values, free list included)."""

    total: int
    live: int
    in_runs: int | None = None
    """Free pages in runs that are as long as a whole piece; None where there are too many to look."""


def count_pages(environment: Environment) -> Pages:
    """Recount from the trees' own statistics. Raises ``DiskTrouble``."""
    environment.refresh_header()
    with environment.reading() as reading:
        live = reading.used_pages()
    if environment.header.pages - live > MOST_FREE_TO_LOOK_AT:
        return Pages(environment.header.pages, live)
    return Pages(
        environment.header.pages, live, _usable(environment, _free_runs(environment), environment.piece_page_bytes)
    )


def longest_piece(environment: Environment, need_pages: int) -> int:
    """File bytes of the largest piece of which ``need_pages`` find room for sure, as the free pages lie now.

    Writer's thread only. A page where even that is not sure.
    """
    runs = _free_runs(environment)
    page_bytes, size = environment.header.page_bytes, environment.piece_page_bytes
    growth = environment.map_bytes // page_bytes - environment.header.pages
    while size > page_bytes and 4 * (_usable(environment, runs, size) + growth) < 5 * need_pages:
        size //= 2
    return size


def punch_free_pages(environment: Environment) -> int | None:
    """Give free pages back to the file system; returns the bytes by which the file shrank on the disk.

    A few stay, so that records can be removed when the disk has no room at all. None where the file system cannot
    make holes. Writer's thread only.
    """
    environment.sync()  # the free list is true of the last commit, which must not be undone by a power cut
    with environment.map_gate.exclusive():
        pass  # readers of an older state have left; later ones see the last commit
    before = environment.allocated_bytes()
    environment.refresh_header()
    page_bytes = environment.header.page_bytes
    free = free_pages(environment.descriptor, environment.header)
    with environment.changing():
        for first, count in runs_of(free[: max(0, free.size - KEPT_FREE_BYTES // page_bytes)]):
            if not punch(environment.descriptor, first * page_bytes, count * page_bytes):
                return None
    return before - environment.allocated_bytes()


def _free_runs(environment: Environment) -> npt.NDArray[np.int64]:
    """Lengths in pages."""
    return np.array([count for _, count in runs_of(free_pages(environment.descriptor, environment.header))], np.int64)


def _usable(environment: Environment, runs: npt.NDArray[np.int64], piece_page_bytes: int) -> int:
    pages = piece_page_bytes // environment.header.page_bytes
    return int((runs // pages).sum()) * pages
