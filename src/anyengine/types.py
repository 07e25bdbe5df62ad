"""The words everybody uses: what a request asks for, what comes back, what an engine says of itself.

Like :mod:`anyengine.errors` this imports only the standard library, since both processes use it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

from anyengine.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
"""Why a request ended: a stop token or string, max_tokens or the model's length, its caller, or its own failure."""

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSpec:
    """Which engine to run: an import path ``"package.module:Class"`` and the keyword arguments of that class.

    The arguments travel to the engine's process as CBOR: None, booleans, integers of 64 bits, floats, strings, bytes,
    lists, string-keyed mappings, and numpy arrays or torch tensors.

    :raises TypeError: if ``path`` is not a string or ``arguments`` is not a mapping with string keys
    :raises ValueError: if ``path`` does not have the form ``"package.module:Class"``
    """

    path: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        _require(isinstance(self.path, str), "EngineSpec.path", self.path, "a string 'package.module:Class'")
        if not _PATH.fullmatch(self.path):
            raise ValueError(f"EngineSpec.path={self.path!r}: expected the form 'package.module:Class'")
        _require(isinstance(self.arguments, Mapping), "EngineSpec.arguments", self.arguments, "a mapping")
        for name in self.arguments:
            _require(isinstance(name, str), "EngineSpec.arguments", name, "string keys")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What shape a request's text must have: exactly one of a JSON schema, a regex, a list of choices, a grammar.

    :raises ValueError: if not exactly one of the four is given
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"StructuredOutputs takes exactly one of json, regex, choice, grammar; got {given or 'none'}"
            )
        if self.choice is not None:
            _require(_is_list_of_strings(self.choice), "StructuredOutputs.choice", self.choice, "a list of strings")
            if not self.choice:
                raise RequestError("StructuredOutputs.choice=[]: expected at least one choice")
        for name, kinds, expected in (
            ("json", (str, Mapping), "a JSON schema as a string or a mapping"),
            ("regex", (str,), "a string"),
            ("grammar", (str,), "a string"),
        ):
            value: object = getattr(self, name)
            fits = value is None or isinstance(value, kinds)
            _require(fits, f"StructuredOutputs.{name}", cast("object", value), expected)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled, by the field's standard names (those of vLLM's and OpenAI's APIs).

    ``temperature=0`` is greedy; ``top_k=0`` means all tokens; ``logprobs=k`` asks for the sampled token's and the k
    best log-probabilities of each step, ``prompt_logprobs`` likewise for the prompt. ``extra`` holds an engine's own
    options and is open. An engine lists at READY what it supports, and anything else that differs from its default is
    refused by name at the call.

    :raises TypeError: if a field has the wrong type
    :raises RequestError: if a value is out of its range
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict[int, float])
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputs | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        self._integer("max_tokens", 1, U32_MAX)
        self._integer("min_tokens", 0, U32_MAX)
        self._integer("top_k", -1, U32_MAX)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._integer(name, 0, U32_MAX)
        if self.seed is not None:
            self._integer("seed", -(2**63), 2**63 - 1)
        self._number("temperature", 0.0, math.inf)
        self._number("top_p", 0.0, 1.0, above=True)
        self._number("min_p", 0.0, 1.0)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._number("repetition_penalty", 0.0, math.inf, above=True)
        _require(isinstance(self.ignore_eos, bool), "SamplingParams.ignore_eos", self.ignore_eos, "a bool")
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"SamplingParams.min_tokens={self.min_tokens}: more than max_tokens={self.max_tokens}")
        self._tokens("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            self._tokens("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise RequestError("SamplingParams.allowed_token_ids=[]: expected at least one token id")
        _require(isinstance(self.logit_bias, Mapping), "SamplingParams.logit_bias", self.logit_bias, "a mapping")
        self._tokens("logit_bias", list(self.logit_bias))
        for token, bias in self.logit_bias.items():
            where = f"SamplingParams.logit_bias[{token}]"
            _require(isinstance(bias, int | float) and not isinstance(bias, bool), where, bias, "a number")
        if self.structured_outputs is not None:
            _require(
                isinstance(self.structured_outputs, StructuredOutputs),
                "SamplingParams.structured_outputs",
                self.structured_outputs,
                "a StructuredOutputs",
            )
        _require(isinstance(self.extra, Mapping), "SamplingParams.extra", self.extra, "a mapping")
        for name in self.extra:
            _require(isinstance(name, str), "SamplingParams.extra", name, "string keys")
        # Copies, so that nothing the caller does later changes the parameters of a request that is under way.
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        object.__setattr__(self, "extra", dict(self.extra))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        where = f"SamplingParams.{name}"
        _require(isinstance(value, int) and not isinstance(value, bool), where, value, "an integer")
        if not low <= value <= high:
            raise RequestError(f"{where}={value!r}: expected {low} to {high}")

    def _number(self, name: str, low: float, high: float, *, above: bool = False) -> None:
        value = getattr(self, name)
        where = f"SamplingParams.{name}"
        _require(isinstance(value, int | float) and not isinstance(value, bool), where, value, "a number")
        inside = low < value <= high if above else low <= value <= high
        if not inside or math.isinf(value):
            comparison = "above" if above else "at least"
            limit = "" if math.isinf(high) else f" and at most {high:g}"
            raise RequestError(f"{where}={value!r}: expected {comparison} {low:g}{limit}")

    def _tokens(self, name: str, tokens: Sequence[int]) -> None:
        where = f"SamplingParams.{name}"
        _require(isinstance(tokens, Sequence) and not isinstance(tokens, str | bytes), where, tokens, "token ids")
        for token in tokens:
            _require(isinstance(token, int) and not isinstance(token, bool), where, token, "integer token ids")
            if not 0 <= token <= U32_MAX:
                raise RequestError(f"{where} holds {token!r}: a token id is 0 to {U32_MAX}")


def _is_list_of_strings(value: object) -> bool:
    if not isinstance(value, list | tuple):
        return False
    return all(isinstance(item, str) for item in cast("Sequence[object]", value))


def _require(condition: bool, where: str, value: object, expected: str) -> None:
    if not condition:
        raise TypeError(f"{where}={value!r} ({type(value).__name__}): expected {expected}")


TokenLogprobs = Mapping[int, float]
"""Log-probabilities (natural logarithm) at one position, by token id; the token that was sampled comes first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What came of one request since the last output: all of it in one object, however slow the reader was.

    ``token_ids`` are the new tokens (perhaps none), ``logprobs`` has one entry per new token when they were asked for.
    ``finish_reason`` is set on the last output of the request, and only there; ``stop_reason`` then holds the token id
    or the string that stopped it, if one did. ``prompt_logprobs`` comes once; its first entry, which has no
    predecessor, is empty.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    pooling_output: Any = None
    kv_transfer_params: Mapping[str, Any] | None = None
    events: list[Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion(RequestOutput):
    """A whole request: every token of it, and why it ended."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine says of itself at READY.

    ``max_model_len`` counts prompt and completion tokens together. ``sampling_parameters`` names the
    :class:`SamplingParams` fields that the engine honours, ``utilities`` the methods that ``call_utility`` reaches.
    ``prompt_embeds`` tells whether a prompt may come as embeddings. Sizes of the KV cache are in blocks and tokens.
    """

    engine: str
    version: str
    max_model_len: int
    vocab_size: int | None = None
    dtype: str | None = None
    num_gpu_blocks: int | None = None
    block_size: int | None = None
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    world_size: int = 1
    data_parallel_size: int = 1
    supported_tasks: Sequence[str] = ("generate",)
    sampling_parameters: Sequence[str] = ("max_tokens",)
    prompt_embeds: bool = False
    utilities: Sequence[str] = ()


ProgressCallback = Callable[[str, float | None], None]
"""Called while an engine loads, with the stage in words and how much of it is done (0.0 to 1.0, None if unknown)."""

HealthState = Literal["alive", "unresponsive", "restarting", "closing", "closed", "dead"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """One look at an engine, true (``bool(health)``) only while it is alive.

    ``steps`` counts the engine's steps as last reported, and ``last_step_age`` is the time in seconds since that
    number last rose (None before the first step). ``unresponsive_for`` is the time in seconds for which the engine
    has not answered, or has had work and made no step; None in every other state.
    """

    state: HealthState
    rank: int
    pid: int
    steps: int
    last_step_age: float | None
    unresponsive_for: float | None = None

    def __bool__(self) -> bool:
        return self.state == "alive"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClientStatistics:
    """What the client holds right now; every count is zero when nothing runs.

    ``live_requests`` are those sent and neither finished nor aborted, ``aborting_requests`` those whose abort the
    engine has not acknowledged, ``waiting_requests`` those that wait to be let in, ``pending_calls`` the utility calls
    without an answer, ``unread_outputs`` the steps that wait for ``get_output``, and ``tracked_buffers`` the tensors
    whose memory ZeroMQ still reads. ``engine`` holds the engine's own figures as last reported.
    """

    live_requests: int
    aborting_requests: int
    pending_calls: int
    unread_outputs: int
    waiting_requests: int
    tracked_buffers: int
    engine: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
