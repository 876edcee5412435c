"""One committed state of the store's file, by databases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from omlxd.storage.ssd_errors import Damaged
from omlxd.storage.ssd_pages import BadFile, FileHeader, Tree
from omlxd.storage.ssd_structure import batches
from omlxd.storage.ssd_tree import Extent, Snapshot

if TYPE_CHECKING:
    import lmdb

    Database: TypeAlias = lmdb._Database


class Reading:
    """A snapshot whose trees are asked for by their handles (``Environment.blocks``, ...). See ``Snapshot``."""

    def __init__(self, descriptor: int, header: FileHeader, names: Mapping[Database, bytes]) -> None:
        self.header = header
        self._descriptor = descriptor
        self._names = names
        self._snapshot = Snapshot(descriptor, header)
        self._trees = self._snapshot.trees()

    def tree(self, database: Database) -> Tree | None:
        """Its root and counts; None for a database that this file does not have."""
        return self._trees.get(self._names[database])

    def get(self, database: Database, key: bytes) -> bytes | None:
        """The value of ``key``; None where there is none."""
        return self._snapshot.get(self.tree(database), key)

    def items(self, database: Database, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Keys and values from ``start`` on, in the order of the keys."""
        return self._snapshot.items(self.tree(database), start)

    def batches(self, database: Database) -> Iterator[list[tuple[bytes, bytes]]]:
        """As ``items``, for very many of them: some thousand at a time."""
        tree = self.tree(database)
        if tree is None:
            return
        try:
            yield from batches(self._descriptor, self.header, self._names[database].decode(), tree)
        except BadFile as error:
            raise Damaged(str(error)) from error

    def places(self, database: Database, prefix: bytes) -> Iterator[Extent | bytes]:
        """For each key with that prefix: where its value is in the file, or the value where it has no pages of its own."""
        return self._snapshot.places(self.tree(database), prefix)

    def used_pages(self) -> int:
        """All pages in use, those of the free list and the meta pages too."""
        header = self.header
        return 2 + header.free.pages + header.main.pages + sum(tree.pages for tree in self._trees.values())
