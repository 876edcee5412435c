"""An engine's connection to a daemon that may not be there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from omlxd.errors import Unavailable

if TYPE_CHECKING:
    from omlxd.client import Cache

FIRST_BACKOFF_SECONDS: Final = 0.25
LAST_BACKOFF_SECONDS: Final = 30.0


class Daemon:
    """A client, or the socket to get one from. A client reconnects by itself; the first one is made here."""

    def __init__(
        self, client: Cache | str | os.PathLike[str] | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``client``: what ``omlxd.connect()`` returned, a socket's path, or None for the default socket."""
        self._client: Cache | None = None
        self._socket: str | os.PathLike[str] | None = None
        if client is None or isinstance(client, str | os.PathLike):
            self._socket = client
        else:
            self._client = client
        self._clock = clock
        self._backoff = FIRST_BACKOFF_SECONDS
        self._not_before = -float("inf")
        self._why = ""

    def client(self) -> Cache:
        """The client.

        Raises:
            Unavailable: there is no daemon; after a failure at once, until a back-off is over.
        """
        if self._client is None:
            if self._clock() < self._not_before:
                raise Unavailable(self._why)
            from omlxd.client import connect

            try:
                self._client = connect(self._socket)
            except Unavailable as error:
                self._why = str(error)
                self._not_before = self._clock() + self._backoff
                self._backoff = min(LAST_BACKOFF_SECONDS, 2 * self._backoff)
                raise
        return self._client
