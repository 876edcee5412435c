from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.storage import metal
from omlxd.storage.layout import ALIGNMENT, ITEM_BYTES, MAX_PAYLOAD_BYTES, NO_DTYPE, Layout, Tensor, TensorSpec

ROOT = Path(__file__).parents[2]
DTYPES = sorted(ITEM_BYTES)


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int) -> mx.array:
    """Random bits (NaNs, infinities and denormals among them) as an MLX array."""
    nbytes = ITEM_BYTES[dtype] * int(np.prod(shape))
    bits = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, nbytes, dtype=np.uint8)
    return (
        mx.array(bits).view(metal.dtype_of(dtype)).reshape(shape) if nbytes else mx.zeros(shape, metal.dtype_of(dtype))
    )


def bits(array: mx.array) -> bytes:
    return np.array(mx.contiguous(array.reshape(-1)).view(mx.uint8)).tobytes() if array.size else b""


def packed(layout: Layout, arrays: list[Tensor]) -> bytearray:
    out = bytearray(b"\xff" * layout.nbytes)  # a slot holds what was there before
    layout.pack_into(arrays, memoryview(out))
    return out


specs = st.none() | st.tuples(
    st.sampled_from([d for d in DTYPES if d != "float64"]), st.lists(st.integers(0, 5), max_size=4).map(tuple)
)


@given(st.lists(specs, max_size=8), st.integers(0, 1 << 32))
def test_any_tensors_come_back_bit_for_bit(members: list[tuple[str, tuple[int, ...]] | None], seed: int) -> None:
    arrays: list[Tensor] = [m and random_tensor(*m, seed + i) for i, m in enumerate(members)]
    layout = Layout.of(arrays)
    payload = packed(layout, arrays)
    end = 0
    for spec, offset, array in zip(layout.tensors, layout.offsets, arrays, strict=True):
        if array is None or not spec.nbytes:
            continue
        assert offset % ALIGNMENT == 0
        assert payload[end:offset] == bytes(offset - end), "padding is zeros"
        assert 0 <= offset - end < ALIGNMENT
        end = offset + spec.nbytes
        assert payload[offset:end] == bits(array)  # type: ignore[arg-type]
    assert end == layout.nbytes
    for source in (memoryview(payload), bytes(payload), mx.array(np.frombuffer(payload, np.uint8))):
        again = layout.unpack(source)
        assert len(again) == len(arrays)
        for before, after in zip(arrays, again, strict=True):
            if before is None:
                assert after is None
                continue
            assert after is not None
            assert (after.dtype, after.shape) == (before.dtype, before.shape)
            assert bits(after) == bits(before)  # type: ignore[arg-type]


small_specs = st.tuples(
    st.sampled_from(["uint32", "bfloat16", "int8"]), st.sampled_from([(), (1, 3), (2, 3), (1, 16, 2), (0, 2), (32,)])
)


@given(
    st.lists(small_specs | st.none(), min_size=1, max_size=6),
    st.integers(1, 12),
    st.lists(small_specs, max_size=3),
    st.integers(0, 1 << 32),
)
def test_patterns_that_repeat_layer_by_layer_come_back_in_their_order(
    pattern: list[tuple[str, tuple[int, ...]] | None],
    layers: int,
    odd: list[tuple[str, tuple[int, ...]]],
    seed: int,
) -> None:
    members = [*pattern * layers, *odd, *pattern * (layers // 2)]
    arrays: list[Tensor] = [m and random_tensor(*m, seed + i) for i, m in enumerate(members)]
    layout = Layout.of(arrays)
    again = layout.unpack(packed(layout, arrays))
    assert [t if t is None else (t.dtype, t.shape, bits(t)) for t in again] == [
        a if a is None else (a.dtype, a.shape, bits(a))  # type: ignore[arg-type]
        for a in arrays
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_keeps_its_bits_nan_payloads_too(dtype: str) -> None:
    array = random_tensor(dtype, (7, 33), seed=1) if dtype != "float64" else np.arange(231.0).reshape(7, 33)
    layout = Layout.of([array])
    assert layout.tensors[0].dtype == dtype
    payload = packed(layout, [array])
    expected = array.tobytes() if isinstance(array, np.ndarray) else bits(array)
    assert payload == expected
    (again,) = layout.unpack(memoryview(payload))
    assert again is not None
    assert metal.dtype_name(again.dtype) == dtype
    with mx.stream(mx.cpu):
        assert bits(again) == expected


def cache_like(length: int = 96) -> list[mx.array]:
    """Keys and values as an engine's cache holds them: longer than what is in use."""
    return [random_tensor("bfloat16", (1, 4, length, 32), seed) for seed in range(6)]


STRIDED: dict[str, Callable[[mx.array], mx.array]] = {
    "slice along the sequence": lambda a: a[..., 16:80, :],
    "transposed": lambda a: a.swapaxes(1, 2),
    "every other": lambda a: a[:, ::2, ::3, ::2],
    "broadcast": lambda a: mx.broadcast_to(a[:, :1], (2, 4, 96, 32)),
    "lazy": lambda a: a * 2,
    "lazy and strided": lambda a: (a * 2)[..., 1:9, :].swapaxes(0, 1),
}


@pytest.mark.parametrize("way", STRIDED)
def test_arrays_that_are_not_contiguous_or_not_computed_are_packed_in_row_major_order(way: str) -> None:
    arrays = [STRIDED[way](array) for array in cache_like()]
    layout = Layout.of(arrays)
    payload = packed(layout, list(arrays))
    for before, after in zip(arrays, layout.unpack(payload), strict=True):
        assert after is not None
        assert bits(after) == bits(mx.contiguous(before))


def test_numpy_arrays_are_packed_too_whatever_their_order() -> None:
    source = np.arange(24, dtype=np.float32).reshape(4, 6)
    arrays: list[Tensor] = [source, source.T, source[::2, 1:4], np.asfortranarray(source), np.array(3, np.int8)]
    layout = Layout.of(arrays)
    for array, after in zip(arrays, layout.unpack(packed(layout, arrays)), strict=True):
        assert np.array_equal(np.array(after), np.asarray(array))
    swapped = source.astype(">f4")
    assert Layout.of([swapped]) == Layout.of([source])
    assert packed(Layout.of([swapped]), [swapped]) == source.tobytes()


def test_the_bits_of_bfloat16_may_come_from_numpy() -> None:
    array = random_tensor("bfloat16", (3, 5), 9)
    layout = Layout.of([array])
    assert packed(layout, [np.array(array.view(mx.uint16))]) == packed(layout, [array])
    with pytest.raises(ValueError, match="tensor '0' is uint16"):
        packed(layout, [array.view(mx.uint16)])


def test_a_read_only_array_is_packed() -> None:
    array = np.arange(10)
    array.flags.writeable = False
    assert packed(Layout.of([array]), [array]) == array.tobytes()


LAYOUT = Layout.of([mx.zeros((2, 3), mx.bfloat16), None, mx.zeros((4,), mx.uint32)], ["keys", "none", "values"])
GOOD: list[Tensor] = [mx.zeros((2, 3), mx.bfloat16), None, mx.zeros((4,), mx.uint32)]


@pytest.mark.parametrize(
    ("position", "wrong", "named"),
    [
        (0, mx.zeros((3, 2), mx.bfloat16), r"tensor 'keys' is bfloat16\[3, 2\], the layout says bfloat16\[2, 3\]"),
        (0, mx.zeros((2, 3), mx.float16), r"tensor 'keys' is float16\[2, 3\], the layout says bfloat16"),
        (0, mx.zeros((6,), mx.bfloat16), "tensor 'keys'"),
        (0, None, "tensor 'keys' is None"),
        (1, mx.zeros((1,)), r"tensor 'none' is float32\[1\], the layout says None"),
        (2, mx.zeros((4,), mx.int32), "tensor 'values' is int32"),
        (2, mx.zeros((0,), mx.uint32), "tensor 'values'"),
    ],
)
def test_a_tensor_that_is_not_exactly_the_layouts_is_named_and_nothing_is_written(
    position: int, wrong: Tensor, named: str
) -> None:
    arrays = [*GOOD]
    arrays[position] = wrong
    out = bytearray(b"\xff" * LAYOUT.nbytes)
    assert not LAYOUT.matches(arrays)
    with pytest.raises(ValueError, match=named):
        LAYOUT.pack_into(arrays, memoryview(out))
    assert out == b"\xff" * LAYOUT.nbytes


def test_the_number_of_tensors_and_the_room_must_be_exact() -> None:
    assert LAYOUT.matches(GOOD)
    for arrays in (GOOD[:2], [*GOOD, None]):
        assert not LAYOUT.matches(arrays)
        with pytest.raises(ValueError, match=f"{len(arrays)} tensors, the layout has 3"):
            packed(LAYOUT, arrays)
    for nbytes in (LAYOUT.nbytes - 1, LAYOUT.nbytes + 1):
        with pytest.raises(ValueError, match=f"room for {nbytes} bytes"):
            LAYOUT.pack_into(GOOD, memoryview(bytearray(nbytes)))
        with pytest.raises(ValueError, match=f"payload of uint8\\[{nbytes}\\]"):
            LAYOUT.unpack(bytes(nbytes))
    with pytest.raises(ValueError, match="payload of uint32"):
        LAYOUT.unpack(mx.zeros((LAYOUT.nbytes,), mx.uint32))


@given(st.lists(specs, max_size=6))
def test_a_layout_travels_as_bytes(members: list[tuple[str, tuple[int, ...]] | None]) -> None:
    tensors = [
        TensorSpec(f"ü{i}", NO_DTYPE, None) if member is None else TensorSpec(f"ü{i}", *member)
        for i, member in enumerate(members)
    ]
    layout = Layout(tuple(tensors))
    again = Layout.from_bytes(layout.to_bytes())
    assert again == layout
    assert hash(again) == hash(layout)
    assert (again.offsets, again.nbytes, again.digest) == (layout.offsets, layout.nbytes, layout.digest)
    assert again.to_bytes() == layout.to_bytes()


def test_the_bytes_of_a_layout_are_pinned_since_they_name_namespaces() -> None:
    assert LAYOUT.to_bytes().hex() == (
        "92019393a46b657973a862666c6f6174313692020393a46e6f6e65a46e6f6e65c093a676616c756573a675696e7433329104"
    )
    assert LAYOUT.digest.hex() == "656e63f016fbe897aa5dd0069419bfbce840def57b915b3faa8103c0e83818ab"
    assert LAYOUT.offsets == (0, 12, 64)
    assert LAYOUT.nbytes == 80


def test_a_different_name_order_or_shape_is_another_layout() -> None:
    spec = TensorSpec("a", "int8", (2,))
    others = [
        TensorSpec("b", "int8", (2,)),
        TensorSpec("a", "uint8", (2,)),
        TensorSpec("a", "int8", (3,)),
        TensorSpec("a", "int8", (2, 1)),
        TensorSpec("a", NO_DTYPE, None),
    ]
    assert len({Layout((other,)).digest for other in [spec, *others]}) == 6
    assert Layout((spec, others[0])).digest != Layout((others[0], spec)).digest


@pytest.mark.parametrize(
    "packed_bytes",
    [
        b"",
        b"\xc1",
        msgpack.packb(5),
        msgpack.packb([2, []]),
        msgpack.packb([1, [["a", "int8"]]]),
        msgpack.packb([1, [["a", "int8", [-1]]]]),
        msgpack.packb([1, [["a", "int8", [1.0]]]]),
        msgpack.packb([1, [["a", "int8", [True]]]]),
        msgpack.packb([1, [["a", "int8", 3]]]),
        msgpack.packb([1, [["a", "float8", [1]]]]),
        msgpack.packb([1, [["a", "int8", None]]]),
        msgpack.packb([1, [["a", "none", [1]]]]),
        msgpack.packb([1, [[1, "int8", [1]]]]),
        msgpack.packb([1, [["a", ["int8"], [1]]]]),
        msgpack.packb([1, [["a", "int8", [1]], ["a", "int8", [1]]]]),
        msgpack.packb([1, [["a", "int8", [MAX_PAYLOAD_BYTES, 2]]]]),
        LAYOUT.to_bytes() + b"\0",
        LAYOUT.to_bytes()[:-1],
    ],
)
def test_bytes_that_are_no_layout_are_refused(packed_bytes: bytes) -> None:
    with pytest.raises(ValueError, match=r"layout|payload|names"):
        Layout.from_bytes(packed_bytes)


@given(st.binary(max_size=64))
def test_any_bytes_are_a_layout_or_a_value_error(junk: bytes) -> None:
    try:
        layout = Layout.from_bytes(junk)
    except ValueError:
        return
    assert layout.nbytes >= 0


def test_what_a_payload_cannot_have_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="tensor '0': dtype 'datetime64"):
        Layout.of([np.array(["2026-01-01"], "datetime64[D]")])
    with pytest.raises(ValueError, match="2 tensors and 1 names"):
        Layout.of([None, None], ["a"])
    with pytest.raises(ValueError, match="names of tensors must differ"):
        Layout.of([None, None], ["a", "a"])


def test_a_layout_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LAYOUT.nbytes = 5  # type: ignore[misc]


def test_a_layout_without_tensors_is_an_empty_payload() -> None:
    layout = Layout(())
    assert layout.nbytes == 0
    assert packed(layout, []) == b""
    assert layout.unpack(b"") == []


def test_what_was_unpacked_does_not_change_with_the_slot_where_it_was_copied() -> None:
    arrays = cache_like()
    layout = Layout.of(arrays)
    payload = packed(layout, list(arrays))
    tensors = layout.unpack(memoryview(payload))
    payload[:] = bytes(len(payload))
    if not metal.is_zero_copy():
        assert [bits(t) for t in tensors if t is not None] == [bits(a) for a in arrays]


def test_a_layout_is_read_without_importing_mlx() -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from omlxd.storage.layout import Layout\n"
        f"layout = Layout.from_bytes({LAYOUT.to_bytes()!r})\n"
        "print(layout.nbytes, any(name.split('.')[0] == 'mlx' for name in sys.modules))"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert child.stdout.split() == [str(LAYOUT.nbytes), "False"]
