"""Property tests of the storage: no deadline for an example, since a test says nothing about time."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
