"""Tensors and arrays on the wire: a private CBOR tag that names type and shape, and bytes that lie beside it.

The tag's content is ``[library, dtype, shape, data]``. ``data`` is a byte string for small arrays and the index of a
buffer frame for large ones. torch and numpy are never imported here: a value can only be a tensor if its library is
loaded, and an array whose library is not loaded on the receiving side stays a :class:`WireArray`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import re
import sys
from typing import Any, Literal, cast

from anyengine.brief import brief
from anyengine.errors import ProtocolError

INLINE_LIMIT = 64 * 1024
"""Bytes up to which an array lies inside the CBOR body. ZeroMQ copies frames of up to this size anyway."""

Library = Literal["torch", "numpy"]

_TORCH_ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2, "uint32": 4, "int32": 4, "float32": 4,
    "complex32": 4, "uint64": 8, "int64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""The torch dtypes that can travel, with their sizes in bytes. Quantised ones need a scale beside their bytes."""

_NUMPY_DTYPE = re.compile(r"(?:\|b1|[|<>][iu][1248]|[<>]f(?:2|4|8|16)|[<>]c(?:8|16|32))")
"""numpy's ``dtype.str`` of booleans, integers, floats and complex numbers: kinds without Python objects in them."""

_MAX_DIMENSIONS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class WireArray:
    """An array as the wire describes it: ``data`` holds its elements in C order.

    :raises ProtocolError: if dtype, shape and byte count do not agree
    """

    library: Library
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        expected = math.prod(self.shape) * _itemsize(self.library, self.dtype)
        if self.data.nbytes != expected:
            raise ProtocolError(
                f"array of {self.library} dtype {self.dtype} and shape {list(self.shape)} takes {expected} bytes, "
                f"but {self.data.nbytes} came"
            )

    def resolve(self) -> Any:
        """The tensor or array itself if its library is loaded in this process, else this object.

        The result is writable and owns its memory or keeps it alive.
        """
        if not is_loaded(self.library):
            return self
        return self.to_torch() if self.library == "torch" else self.to_numpy()

    def to_torch(self) -> Any:
        """This array as a torch tensor on the CPU, sharing memory where it is writable and aligned.

        :raises AttributeError: if it is a numpy dtype that this torch does not have
        """
        import torch

        if self.dtype.startswith(">"):
            # torch knows one byte order only.
            return cast("Any", torch).from_numpy(self.to_numpy().astype(_numpy_name(self.dtype)))
        dtype: torch.dtype = getattr(torch, self.dtype if self.library == "torch" else _numpy_name(self.dtype))
        if self.data.nbytes:
            flat = torch.frombuffer(self._aligned(), dtype=torch.uint8)
        else:
            flat = torch.empty(0, dtype=torch.uint8)
        return flat.view(dtype).reshape(self.shape)

    def to_numpy(self) -> Any:
        """This array as a numpy array, sharing memory where it is writable and aligned.

        :raises TypeError: if it is a torch dtype that numpy does not have
        """
        import numpy

        dtype = numpy.dtype(self.dtype)
        if self.data.nbytes == 0:
            return numpy.empty(self.shape, dtype=dtype)
        return numpy.frombuffer(self._aligned(), dtype=dtype).reshape(self.shape)

    def _aligned(self) -> memoryview:
        # ZeroMQ may hand out a view into the middle of its receive buffer. Elements have to lie on multiples of their
        # size, as far as processors and compilers count on it.
        wanted = 16 if self.dtype[1:] in ("f16", "c32") else min(_itemsize(self.library, self.dtype), 8)
        if not self.data.readonly and _address(self.data) % wanted == 0:
            return self.data
        return memoryview(bytearray(self.data))


def from_value(value: object) -> WireArray | None:
    """The array behind ``value`` as the wire describes it, or None if it is neither tensor nor array.

    Tensors on other devices are copied to the host, and non-contiguous ones into C order; a contiguous one on the host
    is not copied: the result shares its memory and keeps it alive.

    :raises TypeError: if it is an array of a dtype or layout that cannot travel
    """
    if isinstance(value, WireArray):
        array = value
    elif is_loaded("torch") and isinstance(value, sys.modules["torch"].Tensor):
        array = _from_torch(value)
    elif is_loaded("numpy") and isinstance(value, sys.modules["numpy"].ndarray):
        array = _from_numpy(value)
    else:
        return None
    if len(array.shape) > _MAX_DIMENSIONS:
        raise TypeError(f"an array of {len(array.shape)} dimensions cannot travel; {_MAX_DIMENSIONS} can")
    return array


def is_array(value: object) -> bool:
    """Whether it is what an array tag decodes to."""
    return (
        isinstance(value, WireArray)
        or (is_loaded("torch") and isinstance(value, sys.modules["torch"].Tensor))
        or (is_loaded("numpy") and isinstance(value, sys.modules["numpy"].ndarray))
    )


def is_loaded(library: Library) -> bool:
    """Whether this process has imported it; not while another thread is still at it."""
    return hasattr(sys.modules.get(library), "Tensor" if library == "torch" else "ndarray")


def _from_torch(tensor: Any) -> WireArray:
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _TORCH_ITEMSIZE:
        hint = "; send int_repr(), q_scale() and q_zero_point()" if tensor.is_quantized else ""
        raise TypeError(f"a torch tensor of dtype {dtype} cannot travel{hint}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"a torch tensor of layout {tensor.layout} cannot travel; send it dense (to_dense())")
    if tensor.is_meta:
        raise TypeError("a torch tensor on the meta device has no data to send")
    shape = tuple(tensor.shape)
    if tensor.numel() == 0:
        return WireArray("torch", dtype, shape, memoryview(b""))
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    # Through ctypes and not numpy, so that torch without numpy works. The ctypes array keeps the tensor alive.
    buffer = (ctypes.c_ubyte * host.numel()).from_address(host.data_ptr())
    buffer.owner = host
    return WireArray("torch", dtype, shape, memoryview(buffer).cast("B"))


def _from_numpy(array: Any) -> WireArray:
    import numpy

    dtype = array.dtype.str
    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise TypeError(f"a numpy array of dtype {array.dtype} cannot travel; booleans and numbers can")
    if isinstance(array, numpy.ma.MaskedArray):
        raise TypeError("a masked numpy array cannot travel; send its data and its mask")
    contiguous = numpy.ascontiguousarray(array)
    data = memoryview(contiguous.reshape(-1).view(numpy.uint8).data) if array.size else memoryview(b"")
    return WireArray("numpy", dtype, tuple(array.shape), data.cast("B"))


def from_wire(content: object, buffers: list[memoryview | None]) -> Any:
    """The array that a tag's ``content`` and the message's ``buffers`` describe; see :meth:`WireArray.resolve`.

    The array takes its buffer out of ``buffers``: two arrays in one buffer would change together when one of them is
    written to, and a small message could ask for many copies of a large buffer.

    :raises ProtocolError: if the content is malformed or disagrees with its bytes
    """
    if not isinstance(content, list | tuple) or len(cast("list[object]", content)) != 4:
        raise ProtocolError("an array's tag holds [library, dtype, shape, data]")
    library, dtype, shape, data = cast("list[object]", content)
    if not isinstance(library, str) or library not in ("torch", "numpy"):
        raise ProtocolError(f"array of unknown library {brief(library)}")
    if not isinstance(dtype, str):
        raise ProtocolError(f"array dtype {brief(dtype)} is not a string")
    if not isinstance(shape, list | tuple) or len(cast("list[object]", shape)) > _MAX_DIMENSIONS:
        raise ProtocolError(f"array shape {brief(shape)} is not a list of at most {_MAX_DIMENSIONS} sizes")
    sizes = tuple(cast("list[object]", shape))
    for size in sizes:
        if type(size) is not int or not 0 <= size < 2**63:
            raise ProtocolError(f"array shape holds {brief(size)}, which is not a size")
    if type(data) is int:
        view = buffers[data] if 0 <= data < len(buffers) else None
        if view is None:
            raise ProtocolError(f"array refers to buffer {data} of {len(buffers)}, which is not there or taken")
        buffers[data] = None
    elif isinstance(data, bytes):
        view = memoryview(data)
    else:
        raise ProtocolError("array data is neither a byte string nor a buffer's index")
    array = WireArray(library, dtype, cast("tuple[int, ...]", sizes), view)
    try:
        return array.resolve()
    except Exception as error:  # too many dimensions for the library, or a dtype that this version does not have
        raise ProtocolError(
            f"{library} makes no array of dtype {dtype} and shape {brief(list(array.shape))}: {error}"
        ) from error


def _itemsize(library: Library, dtype: str) -> int:
    if library == "torch":
        if dtype not in _TORCH_ITEMSIZE:
            raise ProtocolError(f"unknown torch dtype {brief(dtype)}")
        return _TORCH_ITEMSIZE[dtype]
    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise ProtocolError(f"unknown numpy dtype {brief(dtype)}")
    return int(dtype[2:])


def _numpy_name(dtype: str) -> str:
    import numpy

    return numpy.dtype(dtype).name


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
