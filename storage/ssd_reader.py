"""Bringing records back: read, verify, decode, straight into the slot. Any worker thread, many at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from omlxd.storage.codec import RAW, CodecError, decode
from omlxd.storage.environment import Environment
from omlxd.storage.ssd_errors import Damaged, Departed, Missing
from omlxd.storage.ssd_payload import Located, get_record, locate, read_ahead, read_stored
from omlxd.storage.ssd_records import checksum

MEASURABLE = 1 << 16
"""Bytes; what is smaller measures the calls, not the disk."""
DECODE_FRESH = 600.0
"""Seconds for which the speed of decoding a codec is believed."""
_KEPT_SCRATCH = 64 << 20  # bytes a thread keeps for encoded blocks between two reads


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.buffer = bytearray()

    def view(self, nbytes: int) -> memoryview:
        """A buffer of the calling thread."""
        if nbytes > _KEPT_SCRATCH:
            return memoryview(bytearray(nbytes))
        if len(self.buffer) < nbytes:
            self.buffer = bytearray(nbytes)
        return memoryview(self.buffer)[:nbytes]


class Reader:
    """Reads and measures how fast the disk gives."""

    def __init__(self) -> None:
        self._scratch = _Scratch()
        self.rate = 0.0
        """Stored bytes a second of one read, a moving mean; 0 while nothing was read."""
        self.fetch_rate = 0.0
        """As ``rate``, of reading and checking."""
        self._decoding: dict[str, tuple[float, float]] = {}

    def decode_rate(self, codec: str) -> float:
        """Payload bytes a second at which restores decoded, a moving mean; 0 when there was none for ``DECODE_FRESH``."""
        rate, at = self._decoding.get(codec, (0.0, 0.0))
        return rate if time.perf_counter() - at < DECODE_FRESH else 0.0

    def read_into(self, environment: Environment, key: bytes, out: memoryview) -> int:
        """Put the payload of ``key`` at the beginning of ``out``; returns its length in bytes.

        Raises ``Missing``, ``DiskTrouble`` or ``Damaged``; ``out`` then holds anything. ``ValueError`` when it is too small.
        """
        located = locate(environment, key)
        if located is None:
            raise Missing(f"block {key.hex()[:16]} is not on the SSD")
        record = located.record
        if record.nbytes > out.nbytes:
            raise ValueError(f"block {key.hex()[:16]} has {record.nbytes} bytes, the slot only {out.nbytes}")
        target = out.cast("B")[: record.nbytes]
        try:
            if record.codec == RAW:
                if record.stored_bytes != record.nbytes:
                    raise Damaged(f"{record.stored_bytes} raw bytes for a payload of {record.nbytes}")
                self._read(environment, located, target)
            else:
                stored = self._scratch.view(record.stored_bytes)
                self._read(environment, located, stored)
                begun = time.perf_counter()
                decode(record.codec, record.frames, stored, target)
                now = time.perf_counter()
                if record.nbytes >= MEASURABLE:
                    mean = _mean(self.decode_rate(record.codec), record.nbytes, now - begun)
                    self._decoding[record.codec] = mean, now
        except (Damaged, CodecError) as error:
            self._explain(environment, located, error)
        return record.nbytes

    def verify(self, environment: Environment, key: bytes) -> int:
        """Read ``key`` and check its stored bytes, without decoding; returns their number. Raises as ``read_into``."""
        located = locate(environment, key)
        if located is None:
            raise Missing(f"block {key.hex()[:16]} is not on the SSD")
        try:
            self._read(environment, located, self._scratch.view(located.record.stored_bytes))
        except Damaged as error:
            self._explain(environment, located, error)
        return located.record.stored_bytes

    def _read(self, environment: Environment, located: Located, out: memoryview) -> None:
        read_ahead(environment, located, fewest_runs=2)  # one is read by one call, which asks for all of it at once
        begun = time.perf_counter()
        read_stored(environment, located, out)
        read = time.perf_counter()
        found = checksum((out,))
        if out.nbytes >= MEASURABLE:
            self.rate = _mean(self.rate, out.nbytes, read - begun)
            self.fetch_rate = _mean(self.fetch_rate, out.nbytes, time.perf_counter() - begun)
        if found != located.record.checksum:
            raise Damaged("the checksum of its bytes does not match")

    def _explain(self, environment: Environment, located: Located, error: Exception) -> None:
        """Wrong bytes are damage, unless the record has left meanwhile and its pages are another's."""
        key = located.record.key
        record = get_record(environment, key)
        if environment.generation != located.generation or record is None or record.number != located.record.number:
            raise Departed(f"block {key.hex()[:16]} left the SSD while it was read") from error
        raise error if isinstance(error, Damaged) else Damaged(str(error)) from error


def _mean(rate: float, nbytes: int, seconds: float) -> float:
    """A moving mean of bytes a second; 0 before the first."""
    latest = nbytes / max(seconds, 1e-9)
    return latest if not rate else 0.95 * rate + 0.05 * latest


def stored_before(environment: Environment, keys: Sequence[bytes], when: float) -> Sequence[bytes]:
    """Those of ``keys`` (given in the order of their record numbers) that were stored before ``when``.

    ``when``: seconds since the epoch. Reads only as many records as a binary search needs.
    """
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        record = get_record(environment, keys[middle])
        if record is not None and record.stored_at >= when:
            high = middle
        else:
            low = middle + 1
    return keys[:low]
