"""How a payload splits into tensors.

A payload is its tensors back to back in row-major order, each starting on a multiple of 64 bytes,
with zeros between them and nothing behind the last. bfloat16 travels as its bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, takewhile
from typing import TYPE_CHECKING, TypeAlias

import msgpack
import numpy as np
from numpy.typing import NDArray

from omlxd.storage import metal
from omlxd.storage.framing import digest

if TYPE_CHECKING:
    import mlx.core as mx

FORMAT = 1
ALIGNMENT = 64
NO_DTYPE = "none"
"""The dtype of a None member."""
MAX_PAYLOAD_BYTES = (1 << 63) - 1

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    metal.BFLOAT16: 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
}

Tensor: TypeAlias = "mx.array | NDArray[np.generic] | None"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a payload, or a member that is None (``shape`` None, ``dtype`` "none").

    Raises ``ValueError`` for a dtype or shape that cannot be.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None

    def __post_init__(self) -> None:
        if (self.shape is None) != (self.dtype == NO_DTYPE):
            raise ValueError(f"tensor {self.name!r}: dtype {self.dtype!r} with shape {self.shape}; None has neither")
        if self.shape is None:
            return
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {self.name!r}: dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        if any(type(size) is not int or size < 0 for size in self.shape):
            raise ValueError(f"tensor {self.name!r}: shape {self.shape} is not made of sizes from 0 up")

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor; 0 for None and for a tensor without elements."""
        return 0 if self.shape is None else math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return "None" if self.shape is None else f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Layout:
    """The tensors of a payload, in order. Immutable and hashable.

    ``offsets`` and ``nbytes`` (of the whole payload) follow from them. Raises ``ValueError`` when a
    name occurs twice or the payload is too large to exist.
    """

    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...] = field(init=False, compare=False)
    nbytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        offsets, end = [], 0
        for spec in self.tensors:
            start = _aligned(end) if spec.nbytes else end
            offsets.append(start)
            end = start + spec.nbytes
        if end > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a payload of {end} bytes: more than any file can hold")
        if len({spec.name for spec in self.tensors}) < len(self.tensors):
            raise ValueError(f"names of tensors must differ: {[spec.name for spec in self.tensors]}")
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "nbytes", end)

    @classmethod
    def of(cls, arrays: Iterable[Tensor], names: Sequence[str] | None = None) -> Layout:
        """Return the layout of these MLX or NumPy arrays and Nones; names default to "0", "1", ...

        Raises ``ValueError`` for a dtype that a payload cannot have, or when the names do not match in number.
        """
        arrays = list(arrays)
        if names is None:
            names = [str(index) for index in range(len(arrays))]
        if len(names) != len(arrays):
            raise ValueError(f"{len(arrays)} tensors and {len(names)} names")
        return cls(tuple(_spec(name, array) for name, array in zip(names, arrays, strict=True)))

    def to_bytes(self) -> bytes:
        """Return the layout as msgpack; equal layouts give equal bytes."""
        return self._packed

    @classmethod
    def from_bytes(cls, packed: bytes) -> Layout:
        """Return the layout that ``to_bytes`` packed; ``ValueError`` for bytes that are no layout of this format."""
        try:
            form, tensors = msgpack.unpackb(packed)
            if form != FORMAT:
                raise ValueError(f"layout format {form!r}: this version knows {FORMAT}")
            specs = tuple(
                TensorSpec(_text(name), _text(dtype), None if shape is None else tuple(shape))
                for name, dtype, shape in tensors
            )
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise ValueError(f"not a layout: {error}") from error
        return cls(specs)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that name this layout."""
        return digest("omlxd layout 1", self._packed)

    @cached_property
    def _packed(self) -> bytes:
        packed: bytes = msgpack.packb([FORMAT, [[spec.name, spec.dtype, spec.shape] for spec in self.tensors]])
        return packed

    def matches(self, arrays: Sequence[Tensor]) -> bool:
        """Tell whether ``pack_into`` would take these arrays."""
        return len(arrays) == len(self.tensors) and all(
            _fits(spec, array) for spec, array in zip(self.tensors, arrays, strict=True)
        )

    def pack_into(self, arrays: Iterable[Tensor], out: memoryview) -> None:
        """Write the arrays into ``out``, byte-exact; padding is written as zeros.

        Takes MLX arrays (lazy and strided ones too), NumPy arrays, and for bfloat16 also NumPy
        ``uint16`` bits. The GIL is released for each tensor of more than a few bytes. Raises
        ``ValueError``, before a byte is written, when the number, a shape or a dtype (the error names
        the tensor) or the length of ``out`` is not exactly the layout's.
        """
        arrays = list(arrays)
        self._check(arrays)
        target = np.frombuffer(out, np.uint8)
        if target.size != self.nbytes:
            raise ValueError(f"room for {target.size} bytes, the layout has {self.nbytes}")
        metal.evaluate(array for array in arrays if array is not None and not isinstance(array, np.ndarray))
        end = 0
        for spec, start, array in zip(self.tensors, self.offsets, arrays, strict=True):
            if array is None or spec.nbytes == 0:
                continue
            if start > end:
                target[end:start] = 0
            end = start + spec.nbytes
            host = array if isinstance(array, np.ndarray) else metal.host_view(array)
            part = target[start:end]
            if host.shape != part.shape or host.dtype != part.dtype:
                part = part.view(_little_endian(host.dtype)).reshape(host.shape)
            np.copyto(part, host)

    def unpack(self, payload: metal.HostBytes | mx.array) -> list[mx.array | None]:
        """Return the tensors of a payload, a view of its bytes or the flat ``uint8`` array over them.

        On Metal the arrays lie in the payload's own memory and keep it alive (``metal.adopt``);
        elsewhere there is one copy, made before this returns. Raises ``ValueError`` when the payload
        does not have exactly the layout's bytes.
        """
        import mlx.core as mx

        if not isinstance(payload, mx.array):
            payload = metal.adopt(payload)
        if payload.dtype != mx.uint8 or payload.shape != (self.nbytes,):
            raise ValueError(
                f"a payload of {metal.dtype_name(payload.dtype)}{list(payload.shape)}, "
                f"the layout has {self.nbytes} bytes"
            )
        tensors: list[mx.array | None] = [
            None if spec.shape is None or spec.nbytes else mx.zeros(spec.shape, metal.dtype_of(spec.dtype))
            for spec in self.tensors
        ]
        for series in self._series:
            for index, tensor in zip(series.indices, series.take(payload), strict=True):
                tensors[index] = tensor
        return tensors

    def _check(self, arrays: Sequence[Tensor]) -> None:
        if len(arrays) != len(self.tensors):
            raise ValueError(f"{len(arrays)} tensors, the layout has {len(self.tensors)}")
        for spec, array in zip(self.tensors, arrays, strict=True):
            if not _fits(spec, array):
                raise ValueError(f"tensor {spec.name!r} is {_spec(spec.name, array)}, the layout says {spec}")

    @cached_property
    def _series(self) -> list[_Series]:
        """The tensors in series of one shape and dtype at equal distances: few operations for hundreds of tensors."""
        alike: defaultdict[tuple[str, tuple[int, ...]], dict[int, int]] = defaultdict(dict)
        for index, (spec, offset) in enumerate(zip(self.tensors, self.offsets, strict=True)):
            if spec.shape is not None and spec.nbytes:
                alike[spec.dtype, spec.shape][offset] = index
        series: list[_Series] = []
        for index_at in alike.values():
            while index_at:
                offsets = _longest_progression(list(index_at))
                stride = offsets[1] - offsets[0] if len(offsets) > 1 else 0
                indices = [index_at.pop(offset) for offset in offsets]
                series.append(_Series(self.tensors[indices[0]], offsets[0], stride, indices))
        return series


@dataclass(slots=True)
class _Series:
    """Equal tensors at ``offset``, ``offset + stride``, ...: keys and values, or weights, scales and biases by turns."""

    spec: TensorSpec
    offset: int
    stride: int
    indices: list[int]

    def take(self, flat: mx.array) -> list[mx.array]:
        import mlx.core as mx

        dtype = metal.dtype_of(self.spec.dtype)
        shape = self.spec.shape or ()
        number = len(self.indices)
        nbytes = (number - 1) * self.stride + self.spec.nbytes
        part = flat if nbytes == flat.size else flat[self.offset : self.offset + nbytes]
        typed = part.view(dtype)
        if number == 1:
            return [typed.reshape(shape)]
        if self.stride == self.spec.nbytes and shape:
            return list(mx.split(typed.reshape(number * shape[0], *shape[1:]), number))
        rest = shape[1:] if shape[:1] == (1,) else shape  # split leaves a first axis of 1: often the wanted one
        strides = (
            self.stride // ITEM_BYTES[self.spec.dtype],
            *(math.prod(rest[axis + 1 :]) for axis in range(len(rest))),
        )
        apart = list(mx.split(mx.as_strided(typed, (number, *rest), strides), number))
        return apart if len(rest) < len(shape) else [one.reshape(shape) for one in apart]


def _longest_progression(offsets: list[int]) -> list[int]:
    """Return the longest of the progressions from the first offset on whose step leads to one of the next few."""
    present = set(offsets)
    best = offsets[:1]
    for second in offsets[1:5]:
        step = second - offsets[0]
        found = list(takewhile(present.__contains__, count(offsets[0], step)))
        best = max(best, found, key=len)
    return best


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _spec(name: str, array: Tensor) -> TensorSpec:
    if array is None:
        return TensorSpec(name, NO_DTYPE, None)
    return TensorSpec(name, _dtype_name(array), tuple(array.shape))


def _dtype_name(array: mx.array | NDArray[np.generic]) -> str:
    return array.dtype.name if isinstance(array, np.ndarray) else metal.dtype_name(array.dtype)


def _fits(spec: TensorSpec, array: Tensor) -> bool:
    if array is None or spec.shape is None:
        return array is None and spec.shape is None
    if tuple(array.shape) != spec.shape:
        return False
    name = _dtype_name(array)
    return name == spec.dtype or (spec.dtype == metal.BFLOAT16 and name == "uint16" and isinstance(array, np.ndarray))


def _little_endian(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """Payloads are little-endian, as every system that MLX runs on is."""
    return dtype.newbyteorder("<")
