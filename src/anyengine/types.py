"""The words everybody uses: which engine, what comes of a request, what an engine says of itself.

Like :mod:`anyengine.errors` this imports only the standard library, since both processes use it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from anyengine.brief import brief
from anyengine.checks import require

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
        require(isinstance(self.path, str), "EngineSpec.path", self.path, "a string 'package.module:Class'")
        if not _PATH.fullmatch(self.path):
            raise ValueError(f"EngineSpec.path={brief(self.path)}: expected the form 'package.module:Class'")
        require(isinstance(self.arguments, Mapping), "EngineSpec.arguments", self.arguments, "a mapping")
        for name in self.arguments:
            require(isinstance(name, str), "EngineSpec.arguments", name, "string keys")


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
    ``request_options`` names the :class:`RequestKeywords` that it honours.
    ``prompt_embeds`` tells whether a prompt may come as embeddings. ``max_logprobs`` is how many log-probabilities a
    request may ask for at each token, -1 as many as the vocabulary has. Sizes of the KV cache are in blocks and tokens.
    ``data_parallel_rank`` is this engine's number among ``data_parallel_size`` that share the requests out.
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
    data_parallel_rank: int = 0
    supported_tasks: Sequence[str] = ("generate",)
    sampling_parameters: Sequence[str] = ("max_tokens",)
    request_options: Sequence[str] = ()
    prompt_embeds: bool = False
    max_logprobs: int = 20
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
