"""Tensors and arrays: every dtype, every layout in memory, and headers that disagree with their bytes."""

from __future__ import annotations

import gc
import sys
import types
from typing import Any

import cbor2
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol import strategies
from tests.protocol.strategies import NUMPY_DTYPES, TORCH_DTYPES, canonical, numpy_array, torch_array

from anyengine.errors import ProtocolError
from anyengine.protocol import arrays, cbor, packing
from anyengine.protocol.arrays import INLINE_LIMIT, WireArray

SHAPES: list[tuple[int, ...]] = [(), (1,), (5,), (2, 3), (0,), (3, 0), (0, 3), (2, 0, 3), (1,) * 64]
LARGE = (3, 2**15)


def round_trip(value: Any, offset: int = 0, readonly: bool = False) -> Any:
    """``value`` through bytes and buffers that begin ``offset`` bytes into their memory."""
    buffers: list[cbor.Buffer] = []
    body = packing.encode(value, buffers, path="value")
    memory = [bytes(offset) + bytes(buffer) for buffer in buffers]
    views = [memoryview(data if readonly else bytearray(data))[offset:] for data in memory]
    return cbor.decode(body, views)


def bits(value: Any) -> Any:
    """What :func:`canonical` says of it, without the path that is under test: dtype, shape and bytes in C order."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        return str(value.dtype), tuple(value.shape), bytes(flat.reshape(-1).view(torch.uint8).tolist())
    return value.dtype.str, value.shape, value.tobytes()


# ---- every dtype ----


@pytest.mark.parametrize("shape", [*SHAPES, LARGE], ids=lambda shape: f"{len(shape)}d-{'x'.join(map(str, shape[:3]))}")
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_torch_dtype_and_shape_arrives_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch_array(dtype, shape, bytes(range(256)))
    received = round_trip(tensor)
    assert type(received) is torch.Tensor
    assert canonical(received) == canonical(tensor)
    assert (received.dtype, received.shape) == (dtype, tensor.shape)


@pytest.mark.parametrize("shape", [*SHAPES, LARGE], ids=lambda shape: f"{len(shape)}d-{'x'.join(map(str, shape[:3]))}")
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_every_numpy_dtype_and_shape_arrives_bit_by_bit(dtype: str, shape: tuple[int, ...]) -> None:
    array = numpy_array(dtype, shape, bytes(range(256)))
    received = round_trip(array)
    assert type(received) is numpy.ndarray
    assert (received.dtype, received.shape) == (array.dtype, array.shape)
    assert bits(received) == bits(array)


def test_the_torch_dtypes_that_cannot_travel_are_the_quantised_and_packed_ones() -> None:
    """A dtype that a new torch brings shows here."""
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    names = {str(dtype).removeprefix("torch.") for dtype in every - set(TORCH_DTYPES)}
    packed = ("quint", "qint", "bits", "float4_", *(f"uint{n}" for n in range(1, 8)), *(f"int{n}" for n in range(1, 8)))
    unexpected = {name for name in names if not name.startswith(packed)}
    assert not unexpected


@given(strategies.arrays(), st.integers(0, 17))
def test_any_array_arrives_bit_by_bit(array: Any, offset: int) -> None:
    assert bits(round_trip(array, offset)) == bits(array)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_empty_tensors_travel_first_in_the_middle_and_last(dtype: torch.dtype) -> None:
    empty, full = torch_array(dtype, (2, 0), b"\1"), torch_array(dtype, LARGE, b"\1\0")
    value = [empty, full, empty, full, empty]
    assert canonical(round_trip(value)) == canonical(value)


# ---- every layout ----


def _under_inference_mode(grid: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return grid * 2


TORCH_LAYOUTS = {
    "rows of a slice": lambda grid: grid[1:-1],
    "columns of a slice": lambda grid: grid[:, 2:-1],
    "every other": lambda grid: grid[::2, ::3],
    "transposed": lambda grid: grid.T,
    "permuted": lambda grid: grid.unflatten(0, (2, -1)).permute(2, 0, 1),
    "expanded, stride 0": lambda grid: grid[:, :1].expand(-1, 500),
    "expanded number": lambda grid: grid[0, 1].expand(400, 300),
    "diagonal": lambda grid: grid.diagonal(),
    "channels last": lambda grid: grid.reshape(1, 2, 3, -1).contiguous(memory_format=torch.channels_last),
    "with an offset": lambda grid: grid.reshape(-1)[7:],
    "flipped": lambda grid: grid.flip(0),
    "requires grad": lambda grid: grid.clone().requires_grad_(),
    "has a graph": lambda grid: grid.clone().requires_grad_() * 2,
    "parameter": torch.nn.Parameter,
    "made under inference mode": _under_inference_mode,
}


@pytest.mark.parametrize("size", [(6, 8), (600, 800)], ids=["inline", "buffer"])
@pytest.mark.parametrize("layout", TORCH_LAYOUTS)
def test_tensors_of_every_layout_arrive_equal(layout: str, size: tuple[int, int]) -> None:
    grid = torch.arange(size[0] * size[1]).reshape(size).to(torch.float32)
    if layout == "channels last":
        grid = grid.reshape(6, -1)
    tensor = TORCH_LAYOUTS[layout](grid)
    before = tensor.clone()
    received = round_trip(tensor)
    assert torch.equal(received, before.detach())
    assert received.is_contiguous()
    assert not received.requires_grad
    assert torch.equal(tensor, before), "sending must not change the tensor"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_conjugated_and_negated_views_arrive_as_their_values(dtype: torch.dtype) -> None:
    tensor = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1).to(dtype)
    assert tensor.conj().is_conj()
    assert torch.equal(round_trip(tensor.conj()), tensor.conj().resolve_conj())
    for negated in (tensor.conj().imag, torch._neg_view(torch.arange(4.0))):
        assert negated.is_neg()
        assert torch.equal(round_trip(negated), negated.resolve_neg())


NUMPY_LAYOUTS = {
    "negative stride": lambda grid: grid[::-1],
    "two negative strides": lambda grid: grid[::-2, ::-1],
    "columns": lambda grid: grid[:, 2:5],
    "transposed": lambda grid: grid.T,
    "Fortran order": numpy.asfortranarray,
    "stride 0": lambda grid: numpy.broadcast_to(grid[:, :1], (6, 5)),
    "broadcast number": lambda grid: numpy.broadcast_to(numpy.float32(3), (4, 3)),
    "field of a record": lambda grid: numpy.array([(1, 2.0), (3, 4.0)], dtype="u1,<f4")["f1"],
    "read-only": lambda grid: numpy.frombuffer(bytes(64), dtype="<f4"),
    "0-dim": lambda grid: numpy.array(5.0),
    "matrix": lambda grid: grid[:2].view(type("Subclass", (numpy.ndarray,), {})),
    "unaligned": lambda grid: numpy.frombuffer(bytes(65), dtype="<f4", offset=1),
    "memory map-like view": lambda grid: numpy.lib.stride_tricks.sliding_window_view(grid, 3, axis=1),
}


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("layout", NUMPY_LAYOUTS)
def test_arrays_of_every_layout_arrive_equal(layout: str, order: str) -> None:
    array = NUMPY_LAYOUTS[layout](numpy.arange(48, dtype=f"{order}f4").reshape(6, 8))
    received = round_trip(array)
    assert received.dtype == array.dtype
    assert received.shape == array.shape
    assert numpy.array_equal(received, array)


# ---- memory ----


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 3, 8, 16])
@pytest.mark.parametrize("make", [torch.zeros, numpy.zeros], ids=["torch", "numpy"])
def test_what_arrives_is_aligned_and_can_be_written_to(make: Any, offset: int, readonly: bool) -> None:
    for shape in ((3, 4), LARGE):
        received = round_trip(make(shape), offset, readonly)
        received[:] = 5
        assert float(received.sum()) == 5 * shape[0] * shape[1]
        address = received.data_ptr() if isinstance(received, torch.Tensor) else received.ctypes.data
        assert address % received.dtype.itemsize == 0


def test_an_aligned_buffer_is_not_copied() -> None:
    buffers: list[cbor.Buffer] = []
    body = packing.encode(numpy.arange(2**17, dtype="u1"), buffers, path="value")
    memory = bytearray(bytes(buffers[0]))
    received = cbor.decode(body, [memoryview(memory)])
    memory[5] = 99
    assert received[5] == 99


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_a_large_contiguous_array_is_sent_without_a_copy_and_kept_alive(library: str) -> None:
    make: Any = torch.full if library == "torch" else numpy.full
    array = make(LARGE, 3.0)
    buffers: list[cbor.Buffer] = []
    packing.encode(array, buffers, path="value")
    array[0, 0] = 7
    expected = bits(array)[2]
    assert bytes(buffers[0]) == expected
    del array
    gc.collect()
    # Whatever is allocated now must not land in the memory that is being sent.
    others = [make(LARGE, 5.0) for _ in range(8)]
    assert bytes(buffers[0]) == expected
    assert len(others) == 8


def test_an_array_of_the_inline_limit_stays_inline_and_one_byte_more_does_not() -> None:
    for size, expected in ((INLINE_LIMIT, 0), (INLINE_LIMIT + 1, 1)):
        buffers: list[cbor.Buffer] = []
        packing.encode(numpy.zeros(size, dtype="u1"), buffers, path="value")
        assert len(buffers) == expected


def test_two_arrays_cannot_share_a_buffer() -> None:
    """One of them would change with the other, and a small message could ask for many copies of a large buffer."""
    tag = cbor2.CBORTag(cbor.ARRAY_TAG, ["numpy", "|u1", [4], 0])
    body = cbor2.dumps([tag, tag])
    with pytest.raises(ProtocolError, match="not there or taken"):
        cbor.decode(body, [memoryview(bytearray(4))])


# ---- without the library ----


def test_an_array_whose_library_is_not_loaded_stays_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    body = packing.encode([torch.tensor([1.5, 2.5]), numpy.array([[1, 2]], dtype=">i4")], [], path="value")
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.delitem(sys.modules, "numpy")
    first, second = cbor.decode(body)
    monkeypatch.undo()
    assert (first.library, first.dtype, first.shape) == ("torch", "float32", (2,))
    assert (second.library, second.dtype, second.shape) == ("numpy", ">i4", (1, 2))
    assert packing.encode([first, second], [], path="value") == body
    assert torch.equal(first.resolve(), torch.tensor([1.5, 2.5]))
    assert numpy.array_equal(second.resolve(), [[1, 2]])


def test_a_library_that_another_thread_is_still_importing_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    body = packing.encode(torch.tensor([1.5]), [], path="value")
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "numpy", types.ModuleType("numpy"))
    assert isinstance(cbor.decode(body), WireArray)
    assert arrays.from_value(object()) is None


NATIVE = [dtype for dtype in NUMPY_DTYPES if dtype not in ("<f16", "<c32")]


@pytest.mark.parametrize("dtype", NATIVE)
def test_a_numpy_array_becomes_the_tensor_of_the_same_numbers(dtype: str) -> None:
    data = numpy.array([[0, 1, 0], [1, 1, 0]]).astype(dtype)
    wire = arrays.from_value(data)
    assert wire is not None
    tensor = wire.to_torch()
    assert tensor.tolist() == data.tolist()
    assert tensor.shape == (2, 3)


def test_a_tensor_becomes_the_numpy_array_of_the_same_numbers_if_numpy_has_its_dtype() -> None:
    wire = arrays.from_value(torch.tensor([[1.5, 2.5]]))
    assert wire is not None
    assert wire.to_numpy().tolist() == [[1.5, 2.5]]
    assert wire.to_numpy().dtype == numpy.float32
    wire = arrays.from_value(torch.tensor([1.5], dtype=torch.bfloat16))
    assert wire is not None
    with pytest.raises(TypeError):
        wire.to_numpy()


# ---- what does not fit together ----


def decode_tag(content: Any, *buffers: bytes) -> Any:
    return cbor.decode(cbor2.dumps(cbor2.CBORTag(cbor.ARRAY_TAG, content)), [memoryview(bytearray(b)) for b in buffers])


@pytest.mark.parametrize(
    "content",
    [
        None,
        5,
        "text",
        {},
        [],
        ["numpy", "|u1", [4]],
        ["numpy", "|u1", [4], bytes(4), None],
        ["numpy", "|u1", [4], bytes(3)],
        ["numpy", "|u1", [4], bytes(5)],
        ["numpy", "|u1", [4], 0],
        ["numpy", "|u1", [3], 1],
        ["numpy", "|u1", [4], -1],
        ["numpy", "|u1", [4], True],
        ["numpy", "|u1", [4], False],
        ["numpy", "|u1", [4], "abcd"],
        ["numpy", "|u1", [4], None],
        ["numpy", "|u1", [4], [0, 0, 0, 0]],
        ["numpy", "|u1", 4, bytes(4)],
        ["numpy", "|u1", "4", bytes(4)],
        ["numpy", "|u1", None, bytes(1)],
        ["numpy", "|u1", [4.0], bytes(4)],
        ["numpy", "|u1", [True], bytes(1)],
        ["numpy", "|u1", [-4], bytes(4)],
        ["numpy", "|u1", [-2, -2], bytes(4)],
        ["numpy", "|u1", [2**63], bytes(4)],
        ["numpy", "|u1", [0, 2**64 - 1], b""],
        ["numpy", "|u1", [2**32, 2**32], b""],
        ["numpy", "|u1", [2**62, 4], b""],
        ["numpy", "|u1", [1] * 65, bytes(1)],
        ["numpy", "|u1", [[4]], bytes(4)],
        ["numpy", "|O", [1], bytes(8)],
        ["numpy", "O", [1], bytes(8)],
        ["numpy", "<U4", [1], bytes(16)],
        ["numpy", "|V8", [1], bytes(8)],
        ["numpy", "|S8", [1], bytes(8)],
        ["numpy", "<M8[s]", [1], bytes(8)],
        ["numpy", "i4", [1], bytes(4)],
        ["numpy", "=i4", [1], bytes(4)],
        ["numpy", "|b2", [1], bytes(2)],
        ["numpy", "|u1\n", [1], bytes(1)],
        ["numpy", "float32", [1], bytes(4)],
        ["numpy", b"|u1", [1], bytes(1)],
        ["numpy", None, [1], bytes(1)],
        ["torch", "|u1", [1], bytes(1)],
        ["torch", "qint8", [1], bytes(1)],
        ["torch", "Tensor", [1], bytes(1)],
        ["torch", "float4_e2m1fn_x2", [1], bytes(1)],
        ["torch", "", [1], bytes(1)],
        ["Torch", "uint8", [1], bytes(1)],
        [b"torch", "uint8", [1], bytes(1)],
        [None, "uint8", [1], bytes(1)],
        [["torch"], "uint8", [1], bytes(1)],
    ],
    ids=repr,
)
@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "not loaded"])
def test_a_header_that_is_malformed_or_disagrees_with_its_bytes_is_refused(
    content: Any, loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not loaded:
        monkeypatch.delitem(sys.modules, "torch")
        monkeypatch.delitem(sys.modules, "numpy")
    with pytest.raises(ProtocolError):
        decode_tag(content)


@pytest.mark.parametrize("data", [True, False, 2, -1, 1.0, "0", None, [0]], ids=repr)
def test_a_buffer_is_named_by_a_number_that_it_has(data: Any) -> None:
    with pytest.raises(ProtocolError):
        decode_tag(["numpy", "|u1", [4], data], bytes(4), bytes(4))


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("shape", [[0, 2**62, 2**62], [0, 2**63 - 1], [2**63 - 1] * 63 + [0], [0] * 64])
def test_a_shape_without_elements_is_made_or_refused_whatever_its_other_sizes(library: str, shape: list[int]) -> None:
    try:
        received = decode_tag([library, "uint8" if library == "torch" else "|u1", shape, b""])
    except ProtocolError as error:
        assert f"{library} makes no array of dtype" in str(error)
        return
    assert list(received.shape) == shape


ARRAY = cbor2.CBORTag(cbor.ARRAY_TAG, ["numpy", "|u1", [4], bytes(4)])
TENSOR = cbor2.CBORTag(cbor.ARRAY_TAG, ["torch", "uint8", [4], bytes(4)])


@pytest.mark.parametrize("inner", [ARRAY, TENSOR], ids=["numpy", "torch"])
@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_an_array_inside_an_array_is_refused(inner: Any, position: int) -> None:
    content: list[Any] = ["numpy", "|u1", [4], bytes(4)]
    content[position] = inner
    with pytest.raises(ProtocolError):
        decode_tag(content)
    content[2] = [inner]
    with pytest.raises(ProtocolError):
        decode_tag(content)


@pytest.mark.parametrize("wrong", [0, 1, -1, 2**20])
def test_a_buffer_of_another_length_is_refused(wrong: int) -> None:
    size = 2**17
    content = ["numpy", "<f4", [size // 4], 0]
    assert len(decode_tag(content, bytes(size))) == size // 4
    with pytest.raises(ProtocolError, match="takes 131072 bytes"):
        decode_tag(content, bytes(0 if wrong == 0 else size + wrong))


@given(
    st.sampled_from(["torch", "numpy"]) | st.text(max_size=3),
    st.sampled_from([*NUMPY_DTYPES, *(str(dtype).removeprefix("torch.") for dtype in TORCH_DTYPES)])
    | st.text(max_size=4),
    st.lists(st.integers(-1, 3) | st.integers(), max_size=4),
    st.binary(max_size=64) | st.integers(-1, 2),
    st.lists(st.binary(max_size=64), max_size=2),
)
def test_any_header_makes_an_array_of_that_shape_or_is_refused(
    library: str, dtype: str, shape: list[int], data: bytes | int, buffers: list[bytes]
) -> None:
    try:
        received = decode_tag([library, dtype, shape, data], *buffers)
    except ProtocolError:
        return
    assert list(received.shape) == shape
    assert received.nbytes == len(data if isinstance(data, bytes) else buffers[data])
