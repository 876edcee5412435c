"""When to try again to reach a daemon that was not there."""

from __future__ import annotations

FIRST_SECONDS = 0.05
LAST_SECONDS = 5.0


class Backoff:
    """Doubles with each failure, ends with a success. Seconds of any clock that never goes back."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._until = 0.0
        self._why = ""

    def refusal(self, now: float) -> str | None:
        """Why not to try now: how the last attempt failed; None when it is time."""
        return self._why if now < self._until else None

    def failed(self, now: float, why: str) -> None:
        """An attempt has failed."""
        self._seconds = min(LAST_SECONDS, self._seconds * 2 or FIRST_SECONDS)
        self._until = now + self._seconds
        self._why = why

    def succeeded(self) -> None:
        """An attempt has succeeded."""
        self._seconds = self._until = 0.0
