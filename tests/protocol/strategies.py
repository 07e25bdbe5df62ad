"""Every message of the protocol as a hypothesis strategy, and messages as they arrive."""

from __future__ import annotations

import math
import os
import struct
import warnings
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from hypothesis import settings
from hypothesis import strategies as st

from anyengine.multimodal import BATCHINGS, MultiModalFeature, MultiModalField
from anyengine.params import LoRARequest, PoolingParams, RequestOptions, SamplingParams, StructuredOutputs
from anyengine.protocol.arrays import from_value
from anyengine.protocol.bootstrap import Bootstrap, CurveKeys
from anyengine.protocol.error_kinds import ERROR_KINDS
from anyengine.protocol.handshake import Hello, Progress, Ready
from anyengine.protocol.outputs import FINISH_REASONS, OutputDetails, StepOutputs, from_rows
from anyengine.protocol.replies import Dead, Goodbye, Outputs, Pong, Stats, Tokens, UtilityResult
from anyengine.protocol.requests import Abort, Add, Init, Ping, Shutdown, Utility
from anyengine.protocol.sampling import NO_OPTIONS
from anyengine.types import EngineInfo

THOROUGHNESS = int(os.environ.get("ANYENGINE_THOROUGHNESS", "1"))
"""How many times as many examples as usual."""


def examples(number: int) -> settings:
    """A test's own number of examples."""
    return settings(max_examples=number * THOROUGHNESS)


TORCH_DTYPES: list[torch.dtype] = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]  # fmt: skip
NUMPY_DTYPES = [
    "|b1", "|u1", "|i1", "<u2", ">u2", "<i2", ">i2", "<u4", ">u4", "<i4", ">i4", "<u8", ">u8", "<i8", ">i8",
    "<f2", ">f2", "<f4", ">f4", "<f8", ">f8", "<f16", "<c8", ">c8", "<c16", ">c16", "<c32",
]  # fmt: skip

with warnings.catch_warnings():
    # torch warns, once, that complex32 is young.
    warnings.simplefilter("ignore")
    torch.empty(1, dtype=torch.complex32)

u64 = st.integers(0, 2**64 - 1) | st.integers(0, 3)
u32 = st.integers(0, 2**32 - 1) | st.integers(0, 3)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
names = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=6)
float32s = st.floats(width=32)
shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple)


# ---- arrays and values ----


def torch_array(dtype: torch.dtype, shape: Sequence[int], data: bytes) -> torch.Tensor:
    """A tensor of ``shape`` that repeats ``data``; NaN and everything else that bits can be."""
    size = math.prod(shape) * dtype.itemsize
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    if size == 0:
        return torch.empty(0, dtype=torch.uint8).view(dtype).reshape(tuple(shape))
    filled = bytearray((data * (size // len(data) + 1))[:size])
    return torch.frombuffer(filled, dtype=torch.uint8).view(dtype).reshape(tuple(shape))


def numpy_array(dtype: str, shape: Sequence[int], data: bytes) -> Any:
    """The same for numpy."""
    size = math.prod(shape) * numpy.dtype(dtype).itemsize
    if dtype == "|b1":
        data = bytes(byte & 1 for byte in data)
    return numpy.frombuffer(bytearray((data * (size // len(data) + 1))[:size]), dtype=dtype).reshape(tuple(shape))


def torch_arrays(shape: st.SearchStrategy[tuple[int, ...]] = shapes) -> st.SearchStrategy[torch.Tensor]:
    return st.builds(torch_array, st.sampled_from(TORCH_DTYPES), shape, st.binary(min_size=1, max_size=32))


def numpy_arrays(shape: st.SearchStrategy[tuple[int, ...]] = shapes) -> st.SearchStrategy[Any]:
    return st.builds(numpy_array, st.sampled_from(NUMPY_DTYPES), shape, st.binary(min_size=1, max_size=32))


def arrays(shape: st.SearchStrategy[tuple[int, ...]] = shapes) -> st.SearchStrategy[Any]:
    return torch_arrays(shape) | numpy_arrays(shape)


large_arrays = st.builds(numpy_array, st.sampled_from(["|u1", "<f4", ">f4"]), st.just((65537,)), st.binary(min_size=1))
"""Above the inline limit: these travel in a buffer of their own."""

integers = st.integers(-(2**63), 2**64 - 1) | st.integers(-300, 300)
scalars = st.none() | st.booleans() | integers | st.floats() | texts | st.binary(max_size=8)
keys = texts | integers


def values(leaves: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[Any]:
    """What applications put in: nested lists, tuples and mappings with arrays in them."""
    leaves = scalars | arrays() if leaves is None else leaves
    deeper = leaves
    for _ in range(3):
        deeper = (
            leaves
            | st.lists(deeper, max_size=3)
            | st.lists(deeper, max_size=3).map(tuple)
            | st.dictionaries(keys, deeper, max_size=3)
        )
    return deeper


# ---- messages to the engine ----

_choices = st.lists(texts, min_size=1, max_size=3)

structured_outputs = (
    st.builds(StructuredOutputs, json=texts | st.dictionaries(texts, values(scalars), max_size=3))
    | st.builds(StructuredOutputs, regex=texts)
    | st.builds(
        StructuredOutputs,
        choice=st.lists(texts, min_size=1, max_size=3) | st.lists(texts, min_size=1, max_size=2).map(tuple),
    )
    | st.builds(StructuredOutputs, grammar=texts)
)


@st.composite
def sampling(draw: st.DrawFn) -> SamplingParams:
    """Sampling parameters of which each field has its default or not."""
    tokens = st.lists(u32, max_size=3)
    max_tokens = draw(st.integers(1, 2**32 - 1))
    fields: dict[str, st.SearchStrategy[Any]] = {
        "max_tokens": st.just(max_tokens),
        "min_tokens": st.integers(0, max_tokens),
        "temperature": st.just(0) | st.floats(1e-10, 1e10) | st.integers(1, 10**10),
        "top_p": st.floats(0, 1, exclude_min=True) | st.just(1),
        "top_k": st.integers(-1, 2**32 - 1),
        "min_p": st.floats(0, 1),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stop_token_ids": tokens | tokens.map(tuple),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(-1, 2**32 - 1),
        "prompt_logprobs": st.integers(-1, 2**32 - 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2) | st.integers(-2, 2),
        "repetition_penalty": st.floats(1e-10, 1e10),
        "logit_bias": st.dictionaries(u32, st.floats(-1e10, 1e10) | st.integers(-100, 100), max_size=3),
        "allowed_token_ids": st.lists(u32, min_size=1, max_size=3),
        "structured_outputs": structured_outputs,
        "extra": st.dictionaries(texts, values(), max_size=2),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(fields)), max_size=5))
    if "min_tokens" in chosen:
        chosen.add("max_tokens")
    return SamplingParams(**{name: draw(fields[name]) for name in sorted(chosen)})


columns_u32 = st.lists(u32, max_size=6) | st.lists(u32, max_size=6).map(lambda values: array("I", values))
columns_u64 = st.lists(u64, max_size=6) | st.lists(u64, max_size=6).map(lambda values: array("Q", values))
matrices = arrays(st.tuples(st.integers(1, 3), st.integers(1, 3)))

filled = texts.filter(bool)
options = st.builds(
    RequestOptions,
    priority=st.integers(-(2**31), 2**31 - 1),
    cache_salt=st.none() | filled,
    lora=st.none() | st.builds(LoRARequest, lora_name=filled, lora_int_id=st.integers(1, 2**32 - 1), lora_path=filled),
    pooling=st.none()
    | st.builds(
        PoolingParams,
        task=texts,
        dimensions=st.none() | st.integers(1, 2**32 - 1),
        use_activation=st.none() | st.booleans(),
    ),
)
no_options = st.just(NO_OPTIONS) | options
fields = st.builds(
    MultiModalField,
    data=st.recursive(arrays() | integers | st.floats(), lambda deeper: st.lists(deeper, max_size=2), max_leaves=3),
    batching=st.sampled_from(BATCHINGS),
    dim=st.integers(-64, 63),
    keep_on_cpu=st.booleans(),
)


@st.composite
def features(draw: st.DrawFn) -> list[MultiModalFeature]:
    """Up to three, one behind the other or with gaps, within 20 tokens."""
    made: list[MultiModalFeature] = []
    end = 0
    for _ in range(draw(st.integers(1, 3))):
        offset, length = end + draw(st.integers(0, 2)), draw(st.integers(1, 4))
        end = offset + length
        made.append(
            MultiModalFeature(
                modality=draw(filled),
                identifier=draw(filled),
                offset=offset,
                length=length,
                fields=draw(st.dictionaries(texts, fields, min_size=1, max_size=2)),
                is_embed=draw(st.none() | masks(length)),
            )
        )
    return made


def masks(length: int) -> st.SearchStrategy[Any]:
    bits = st.lists(st.booleans(), min_size=length, max_size=length)
    return bits.map(torch.tensor) | bits.map(numpy.array)


with_features = st.builds(RequestOptions, priority=st.integers(0, 1), features=features())
first_handles = st.integers(0, 2**64 - 5)
prompts = st.lists(columns_u32, min_size=1, max_size=4)
adds = (
    st.builds(Add, first_handles, prompts, st.none(), sampling(), no_options)
    | st.builds(Add, u64, st.none(), matrices, sampling(), no_options)
    | st.builds(Add, u64, st.just([list(range(20))]), st.none(), sampling(), with_features)
)
aborts = st.builds(Abort, columns_u64)
utilities = st.builds(Utility, u64, texts, st.lists(values(), max_size=3) | st.tuples(values()))
inits = st.builds(
    Init, st.integers(0, 3), u64, texts, st.just("package.module:Engine"), st.dictionaries(texts, values(), max_size=3)
)
shutdowns = st.builds(Shutdown, st.sampled_from(["abort", "drain"]))
pings = st.builds(Ping, u64)
to_engine = st.one_of(adds, aborts, utilities, inits, shutdowns, pings)

# ---- messages to the client ----

hellos = st.builds(Hello, st.integers(0, 3), st.binary(max_size=16), st.integers(0, 2**22), st.integers(0, 2**16 - 1))
progresses = st.builds(Progress, texts, st.none() | st.floats())
sizes = st.none() | u64
infos = st.builds(
    EngineInfo,
    engine=texts,
    version=texts,
    max_model_len=u64,
    vocab_size=sizes,
    dtype=st.none() | texts,
    num_gpu_blocks=sizes,
    block_size=sizes,
    kv_cache_size_tokens=sizes,
    kv_cache_max_concurrency=st.none() | st.floats() | st.integers(0, 100),
    world_size=st.integers(1, 100),
    data_parallel_size=st.integers(1, 100),
    data_parallel_rank=st.integers(0, 99),
    supported_tasks=st.lists(texts, max_size=3),
    sampling_parameters=st.lists(names, max_size=3).map(tuple),
    request_options=st.lists(names, max_size=3),
    prompt_embeds=st.booleans(),
    max_logprobs=st.just(-1) | u64,
    utilities=st.lists(names, max_size=3),
)
readies = st.builds(Ready, infos)
logprobs = st.lists(st.dictionaries(u32, float32s, max_size=3), max_size=3)
details = st.builds(
    OutputDetails,
    finish_reason=st.none() | st.sampled_from(FINISH_REASONS),
    stop_reason=st.none() | st.integers(-(2**63), 2**64 - 1) | texts,
    error=st.none() | texts,
    error_kind=st.none() | st.sampled_from(ERROR_KINDS),
    logprobs=st.none() | logprobs,
    prompt_logprobs=st.none() | logprobs,
    pooling_output=values(),
    kv_transfer_params=st.none() | st.dictionaries(keys, values(scalars), max_size=2),
    events=st.none() | st.lists(values(scalars), max_size=2),
)


@st.composite
def step_outputs(draw: st.DrawFn, max_rows: int = 5) -> StepOutputs:
    """One step of distinct requests, as an adapter may hand it over: with or without counts, lists or arrays."""
    handles = draw(st.lists(u64, max_size=max_rows, unique=True))
    counts = draw(st.none() | st.lists(st.integers(0, 3), min_size=len(handles), max_size=len(handles)))
    total = len(handles) if counts is None else sum(counts)
    tokens = draw(st.lists(u32, min_size=total, max_size=total))
    rows = draw(st.dictionaries(st.integers(0, len(handles) - 1), details, max_size=2)) if handles else {}
    if draw(st.booleans()):
        return StepOutputs(handles, tokens, counts, rows)
    return StepOutputs(array("Q", handles), array("I", tokens), None if counts is None else array("I", counts), rows)


def large_step(rows: int) -> StepOutputs:
    """A step whose columns go in buffers if ``rows`` is above 16384."""
    return from_rows((handle, range(handle % 3), None) for handle in range(rows))


outputs = st.builds(Outputs, u64, u64, u64, step_outputs())
failures = st.tuples(texts, texts, st.none() | texts)
utility_results = st.builds(UtilityResult, u64, u64, u64, st.none(), values()) | st.builds(
    UtilityResult, u64, u64, u64, failures, st.none()
)
stats = st.builds(Stats, u64, u64, st.dictionaries(texts, st.floats() | integers, max_size=3))
pongs = st.builds(Pong, u64, u64, u64)
goodbyes = st.builds(Goodbye, u64, u64)
deads = st.builds(Dead, u64, u64, texts, texts, texts)
tokens = st.builds(Tokens, u64, u64, u64, columns_u32)
to_client = st.one_of(hellos, progresses, readies, outputs, tokens, utility_results, stats, pongs, goodbyes, deads)

bootstraps = st.builds(
    Bootstrap,
    texts,
    st.integers(0, 2**16 - 1),
    st.binary(max_size=16),
    st.none() | st.builds(CurveKeys, *[st.text("abc", min_size=40, max_size=40)] * 3),
    st.none() | u64,
)


# ---- comparing ----


_RECORDS = (
    OutputDetails, StructuredOutputs, EngineInfo, RequestOptions, LoRARequest, PoolingParams, MultiModalFeature,
    MultiModalField,
)  # fmt: skip


def canonical(value: Any) -> Any:
    """``value`` in a form that ``==`` compares by type and by bit: NaN equals NaN, 1 is neither True nor 1.0."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float):
        return "float", b"NaN" if math.isnan(value) else struct.pack("<d", value)
    if isinstance(value, int):
        return "int", value
    if isinstance(value, str):
        return value
    found = from_value(value)
    if found is not None:
        return "array", found.library, found.dtype, found.shape, bytes(found.data)
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, StepOutputs):
        return "step", [(handle, list(tokens), canonical(more)) for handle, tokens, more in value.rows()]
    if isinstance(value, SamplingParams):
        # What equals its default stays at home, and 1 equals 1.0 and 0.0 equals -0.0.
        fields = {name: getattr(value, name) for name in value.__dataclass_fields__}
        return {
            name: ("number", item + 0) if type(item) in (int, float) else canonical(item)
            for name, item in fields.items()
        }
    if isinstance(value, _RECORDS):
        return type(value).__name__, {name: canonical(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {canonical(key): canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple | memoryview | array):
        name = type(value).__name__ if hasattr(value, "_fields") else "list"
        return name, [canonical(item) for item in value]
    raise TypeError(f"no canonical form of {type(value)}")


def arrived(frames: Sequence[Any], offset: int = 0) -> list[bytes | memoryview]:
    """``frames`` as a socket hands them out: buffers are writable, and start anywhere in memory."""
    received: list[bytes | memoryview] = [bytes(frame) for frame in frames[:2]]
    received += [memoryview(bytearray(offset) + bytes(frame))[offset:] for frame in frames[2:]]
    return received
