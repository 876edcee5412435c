"""How much memory there is for this process."""

from __future__ import annotations

import psutil

from omlxd.storage import control_group


def memory() -> tuple[int, int]:
    """Bytes in all, and bytes that can be had without swapping: the machine's, or what the control group allows of it."""
    now = psutil.virtual_memory()
    return control_group.within(now.total, now.available)
