"""What the rival's two processes say to each other: msgspec structs in msgpack, one struct per request and step.

The shape is that of vLLM's ``EngineCoreRequest`` and ``EngineCoreOutputs``, with the fields that every request has and
a few optional ones, so that nothing is slower than this shape has to be. Arrays travel as frames of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy

ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"
"""The kinds of a message to the engine; they are a frame of their own."""

LENGTH_REACHED = 1
"""The finish reason of a request that has all its tokens."""

Frame = bytes | bytearray | memoryview


class Sampling(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """How a request is sampled; ``max_tokens`` is the field that this engine looks at."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: list[int] = []


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A new request."""

    request_id: str
    prompt_token_ids: list[int] | None
    sampling_params: Sampling
    arrival_time: float = 0.0
    prompt_embeds: Any = None


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step brought for one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs: Any = None
    pooling_output: Any = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    events: list[Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class UtilityOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The answer to a utility call."""

    call_id: int
    failure_message: str | None = None
    result: Any = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One message from the engine: a step's outputs, or the answer to a utility call."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None


class ArrayOnWire(msgspec.Struct, array_like=True, gc=False):
    """An array: its bytes are frame ``index`` of the message."""

    dtype: str
    shape: list[int]
    index: int


class RequestEncoder:
    """Encodes requests and utility calls; frames after the first are the arrays' own memory."""

    def __init__(self) -> None:
        self._arrays: list[Frame] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_array)

    def encode(self, message: object) -> list[Frame]:
        """The frames of one message."""
        self._arrays = []
        body = self._encoder.encode(message)
        return [body, *self._arrays]

    def _encode_array(self, value: object) -> ArrayOnWire:
        if not isinstance(value, numpy.ndarray):
            raise TypeError(f"{type(value).__name__} cannot travel")
        self._arrays.append(value.reshape(-1).view(numpy.uint8).data)
        return ArrayOnWire(value.dtype.str, list(value.shape), len(self._arrays))


def array_from(wire: Sequence[Any], frames: Sequence[Any]) -> numpy.ndarray[Any, Any]:
    """The array that an :class:`ArrayOnWire` describes, on the memory of its frame."""
    dtype, shape, index = wire
    return numpy.frombuffer(frames[index], dtype=dtype).reshape(shape)
