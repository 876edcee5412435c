"""Which codec a namespace's blocks get: as configured, or measured.

``auto`` compresses where a restore gets no slower for it: fetching fewer bytes must save at least the
time that decoding costs,

    ratio / fetch + 1 / decode <= 1 / fetch        (seconds a payload byte, one block after the other)

``fetch`` is the speed at which restores read *and check* stored bytes, for both sides of it the same. The ratio is measured on
samples of the namespace's own payloads, the decoding speed on those and, where blocks of that codec have been restored lately, on
these: the slower of the two counts, since a sample is decoded at another time, mostly with less going on. It is
measured again now and then.

Called from several worker threads at once; a lock guards the little state there is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from omlxd.storage.codec import CODECS, PLANES_2, PLANES_4, RAW, ZSTD, Buffer, decode, encode

AUTO = "auto"
PLANES = "zstd-planes"
CONFIGURABLE = (AUTO, RAW, ZSTD, PLANES)
"""What may be asked for; ``zstd-planes`` takes the element width that compresses better."""

SAMPLE_BYTES = 128 * 1024
MEASURE_EVERY = 512
"""Blocks of a namespace between two measurements."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One codec on a sample: stored share of the payload, payload bytes decoded a second."""

    codec: str
    ratio: float
    decode_rate: float


@dataclass(slots=True)
class _Namespace:
    codec: str
    blocks_left: int
    measured: tuple[Measured, ...]


class CodecChoice:
    """Answers "how is this block stored?" for every namespace."""

    def __init__(
        self,
        configured: str,
        *,
        fetch_rate: Callable[[], float],
        decode_rate: Callable[[str], float] = lambda codec: 0.0,
        timer: Callable[[], float],
    ) -> None:
        """``timer``: seconds, monotonic and fine.

        ``fetch_rate``: stored bytes a second, read and checked; ``decode_rate``: payload bytes a second that restores of
        a codec were decoded at lately. 0 while unknown.

        Raises ``ValueError`` for a name that is not in ``CONFIGURABLE``.
        """
        self._configured = _checked(configured)
        self._of_namespace: dict[bytes, str] = {}
        self._fetch_rate = fetch_rate
        self._decode_rate = decode_rate
        self._timer = timer
        self._lock = threading.Lock()
        self._namespaces: dict[bytes, _Namespace] = {}

    def set(self, namespace: bytes, configured: str | None) -> None:
        """Configure one namespace differently; None: as the others."""
        with self._lock:
            self._namespaces.pop(namespace, None)
            if configured is None:
                self._of_namespace.pop(namespace, None)
            else:
                self._of_namespace[namespace] = _checked(configured)

    def codec_for(self, namespace: bytes, payload: Buffer) -> str:
        """The codec for this payload; measures on it when it is due."""
        configured = self._of_namespace.get(namespace, self._configured)
        if configured in CODECS:
            return configured
        with self._lock:
            state = self._namespaces.get(namespace)
            if state is not None and state.blocks_left > 0:
                state.blocks_left -= 1
                return state.codec
            if state is not None:
                state.blocks_left = MEASURE_EVERY  # others go on with the old answer meanwhile
        if memoryview(payload).nbytes < 4096:
            return RAW  # nothing to measure on, and not worth the call
        measured = self._measure(payload)
        codec = self._pick(configured, measured)
        with self._lock:
            self._namespaces[namespace] = _Namespace(codec, MEASURE_EVERY, measured)
        return codec

    def codec_of(self, namespace: bytes) -> str:
        """The codec in use; what is configured where nothing was measured yet."""
        with self._lock:
            state = self._namespaces.get(namespace)
            return state.codec if state is not None else self._of_namespace.get(namespace, self._configured)

    def measurements(self) -> dict[bytes, tuple[str, tuple[Measured, ...]]]:
        """By namespace: the codec in use and what it was chosen by."""
        with self._lock:
            return {id_: (state.codec, state.measured) for id_, state in self._namespaces.items()}

    def _measure(self, payload: Buffer) -> tuple[Measured, ...]:
        view = memoryview(payload).cast("B")
        middle = (view.nbytes - SAMPLE_BYTES) // 2 // 64 * 64  # tensors start at multiples of 64 bytes
        sample = bytes(view[middle : middle + SAMPLE_BYTES]) if middle > 0 else bytes(view)
        out = memoryview(bytearray(len(sample)))
        found = []
        for codec in (ZSTD, PLANES_2, PLANES_4):
            encoded = encode(codec, sample)
            stored = b"".join(encoded.parts)
            begun = self._timer()
            decode(codec, encoded.frames, stored, out)
            seconds = max(self._timer() - begun, 1e-9)
            found.append(Measured(codec, len(stored) / len(sample), len(sample) / seconds))
        return tuple(found)

    def _pick(self, configured: str, measured: tuple[Measured, ...]) -> str:
        if configured == PLANES:
            return _smallest(one for one in measured if one.codec != ZSTD)
        fetch = self._fetch_rate()
        if fetch <= 0:
            return RAW
        no_slower = [one for one in measured if one.ratio / fetch + 1 / self._slowest(one) <= 1 / fetch]
        return _smallest(no_slower) if no_slower else RAW

    def _slowest(self, measured: Measured) -> float:
        """Payload bytes a second that decoding may be counted on for."""
        restored = self._decode_rate(measured.codec)
        return min(restored, measured.decode_rate) if restored > 0 else measured.decode_rate


def _smallest(measured: Iterable[Measured]) -> str:
    """The best ratio; a difference of less than a hundredth is noise, and the simpler codec comes first."""
    return min(measured, key=lambda one: round(one.ratio, 2)).codec


def _checked(configured: str) -> str:
    if configured not in CONFIGURABLE:
        raise ValueError(f"unknown codec {configured!r}; choose one of {', '.join(CONFIGURABLE)}")
    return configured
