"""The eviction policy's state on the disk, at a stop in good order. Writer's thread, when nobody else is left."""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping

import lmdb

from omlxd.policy.base import CachePolicy
from omlxd.storage.environment import Environment
from omlxd.storage.ssd_index import Entry
from omlxd.storage.ssd_load import CLEAN, pack_state
from omlxd.storage.ssd_room import Room
from omlxd.storage.ssd_rows import STATE
from omlxd.storage.ssd_transaction import WriteTransaction

log = logging.getLogger(__name__)

_CHUNK = struct.Struct(">I")


def save_state(environment: Environment, policy: CachePolicy, entries: Mapping[bytes, Entry], room: Room) -> None:
    """Replace the log of uses by the policy's state, mark the store as closed in order, make all of it durable.

    Raises ``DiskTrouble``, ``OSError``. Where a full store has no room for the state, the log stays instead.
    """
    state = _pack(policy, entries)
    pages = -(-len(state) // room.page_bytes) + 1
    try:
        with WriteTransaction(environment) as txn:
            if state and room.fits_at_once(pages):
                txn.clear(environment.recency)
                size = environment.piece_bytes
                for number, start in enumerate(range(0, len(state), size)):
                    txn.put(environment.recency, STATE + _CHUNK.pack(number), state[start : start + size])
            txn.put(environment.meta, CLEAN, b"yes")
    except lmdb.MapFullError:
        with WriteTransaction(environment) as txn:
            txn.put(environment.meta, CLEAN, b"yes")
    environment.sync()


def _pack(policy: CachePolicy, entries: Mapping[bytes, Entry]) -> bytes:
    try:
        return pack_state(policy.state(), entries)
    except (NotImplementedError, TypeError, ValueError) as error:
        log.warning("the eviction policy's state is not kept: %s", error)
        return b""
