"""What a user of the client can catch."""

from __future__ import annotations


class OmlxdError(Exception):
    """Base of all errors that the client raises."""


class Unavailable(OmlxdError):
    """No daemon answers: none is there, it went away, or it did not answer in time. An engine computes as if uncached."""


class Refused(OmlxdError):
    """The daemon answered with an error.

    ``code`` is one of :class:`omlxd.protocol.Code`'s stable texts.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message


class LeaseEnded(OmlxdError):
    """A block was used after its lease had ended (released, revoked, or the daemon has gone and returned)."""
