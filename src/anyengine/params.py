"""What a request asks for: how its tokens are sampled or its prompt is pooled, and what else an engine may know.

Like :mod:`anyengine.errors` this imports only the standard library, since both processes use it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, cast

from anyengine.brief import brief
from anyengine.checks import require, require_integer
from anyengine.errors import RequestRefusedError
from anyengine.keywords import explain_unknown
from anyengine.multimodal import MultiModalFeature
from anyengine.types import U32_MAX


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What shape a request's text must have: exactly one of a JSON schema, a regex, a list of choices, a grammar.

    :raises TypeError: if a field has the wrong type
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
            require(_is_list_of_strings(self.choice), "StructuredOutputs.choice", self.choice, "a list of strings")
            if not self.choice:
                raise RequestRefusedError("StructuredOutputs.choice=[]: expected at least one choice")
        for name, kinds, expected in (
            ("json", (str, Mapping), "a JSON schema as a string or a mapping"),
            ("regex", (str,), "a string"),
            ("grammar", (str,), "a string"),
        ):
            value: object = getattr(self, name)
            fits = value is None or isinstance(value, kinds)
            require(fits, f"StructuredOutputs.{name}", cast("object", value), expected)


_ELSEWHERE = {
    "stop": "stop strings are found in text, so give stop=[...] to anyengine.text (ModelText.open_stream, generate); "
    "tokens that end a request are stop_token_ids",
    "n": "n completions are n requests, each with a seed of its own",
    "extra_args": "here it is 'extra'",
    "output_kind": "an output always holds what is new since the last one",
    "skip_special_tokens": "give it to anyengine.text (ModelText.open_stream, generate)",
    "include_stop_str_in_output": "give it to anyengine.text (ModelText.open_stream, generate)",
}
"""What vLLM's and OpenAI's parameters have besides, and what is written for it here."""


@explain_unknown(_ELSEWHERE)
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled, by the field's standard names (those of vLLM's and OpenAI's APIs).

    ``temperature=0`` is greedy; other temperatures and ``repetition_penalty`` are 1e-10 to 1e10, a ``logit_bias`` -1e10
    to 1e10. ``top_k=0`` means all tokens; ``logprobs=k`` asks for the sampled token's and the k best log-probabilities
    of each step, ``prompt_logprobs`` likewise for the prompt. k is at most the engine's ``max_logprobs``, and -1 stands
    for the size of its vocabulary. ``extra`` holds an engine's own options and is open. An engine lists at READY what
    it supports, and anything else that differs from its default is refused by name at the call.

    :raises TypeError: if there is no such field, or one has the wrong type
    :raises RequestRefusedError: if a value is out of its range
    """

    max_tokens: int | None = 16
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

    @functools.cached_property
    def differences(self) -> Mapping[str, Any]:
        """The fields that differ from their defaults: what a request asks for, and what travels."""
        return {
            name: value
            for name, default in _SAMPLING_DEFAULTS
            if (value := getattr(self, name)) is not default and value != default
        }

    def __post_init__(self) -> None:
        # Both processes make one for each request: what has its default value needs no check.
        for name, default in _SAMPLING_DEFAULTS:
            value = getattr(self, name)
            if value is default:
                continue
            if type(value) is not type(default) or value != default:
                value = _SAMPLING_CHECKS[name](f"SamplingParams.{name}", value)
            elif type(value) is dict:
                value = {}
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestRefusedError(
                f"SamplingParams.min_tokens={self.min_tokens}: more than max_tokens={self.max_tokens}"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How one prompt is pooled, by vLLM's names, for a request that wants a vector or scores in place of tokens.

    ``task`` is one of the engine's supported tasks (``"embed"``, ``"classify"``, ``"token_embed"``, ...),
    ``dimensions`` cuts a vector of a model that allows it, and ``use_activation`` normalizes or not where the model
    leaves the choice.

    :raises TypeError: if a field has the wrong type
    :raises RequestRefusedError: if a value is out of its range
    """

    task: str = "embed"
    dimensions: int | None = None
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        require(isinstance(self.task, str), "PoolingParams.task", self.task, "a string")
        if self.dimensions is not None:
            require_integer("PoolingParams.dimensions", self.dimensions, 1, U32_MAX)
        if self.use_activation is not None:
            _boolean("PoolingParams.use_activation", self.use_activation)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoRARequest:
    """A LoRA adapter, by vLLM's names: ``lora_path`` is where the engine finds it, ``lora_int_id`` its number there.

    :raises TypeError: if a field has the wrong type
    :raises RequestRefusedError: if the number is below 1, or a string is empty
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value: object = getattr(self, name)
            require(isinstance(value, str), f"LoRARequest.{name}", value, "a string")
            if not value:
                raise RequestRefusedError(f"LoRARequest.{name}='': expected at least one character")
        require_integer("LoRARequest.lora_int_id", self.lora_int_id, 1, U32_MAX)


class RequestKeywords(TypedDict, total=False):
    """What a request may ask for besides its prompt and how it is sampled: keyword arguments of whatever makes one.

    An engine lists at READY what it supports (``EngineInfo.request_options``); the rest is refused by name.
    """

    priority: int
    """A lower number goes first, where the engine schedules by priority; 0 if it is left out."""

    cache_salt: str | None
    """The request shares what the prefix cache holds only with requests of the same salt."""

    lora: LoRARequest | None
    """The adapter to use; the engine loads it if it has not.

    Its number and its name are its own as long as it is loaded or requests are there for it: another adapter that has
    one of them is refused. The request may have to wait for those of other adapters to end, if the engine has no place
    for one more; and requests that come later wait with it, when it has been overtaken by many.
    """

    features: Sequence[MultiModalFeature]
    """Images and the like, each with its place in the token ids of the one prompt. Their arrays may be changed when
    those of ``prompt_embeds`` may. What the engine cannot check, as sizes that contradict each other or places that the
    encoder's output does not fill, may end it: take features of the model's own processor."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """:class:`RequestKeywords` as they reach an engine, and how the prompt is to be pooled, if it is.

    :raises TypeError: if a field has the wrong type
    :raises RequestRefusedError: if a value is out of its range
    """

    priority: int = 0
    cache_salt: str | None = None
    lora: LoRARequest | None = None
    pooling: PoolingParams | None = None
    features: Sequence[MultiModalFeature] = ()

    def __post_init__(self) -> None:
        require_integer("priority", self.priority, -(2**31), 2**31 - 1)
        if self.cache_salt is not None:
            require(isinstance(self.cache_salt, str), "cache_salt", self.cache_salt, "a string")
            if not self.cache_salt:
                raise RequestRefusedError("cache_salt='': expected at least one character, or None")
        for name, kind in (("lora", LoRARequest), ("pooling", PoolingParams)):
            value: object = getattr(self, name)
            require(value is None or isinstance(value, kind), name, value, f"a {kind.__name__}")
        if self.features != ():
            object.__setattr__(self, "features", _features("features", self.features))


_FACTOR = 1e10
"""Bound of what an engine multiplies or divides logits by, of its inverse, and of what it adds to them. Engines compute
in float32, which ends at 3.4e38: with all of these together in one request a logit stays finite."""

# ---- checks: each takes where a value stands and the value, and returns what is to be kept of it ----

_Check = Callable[[str, Any], Any]


def _integer(low: int, high: int) -> _Check:
    def check(where: str, value: Any) -> Any:
        require_integer(where, value, low, high)
        return value

    return check


_count = _integer(1, U32_MAX)


def _max_tokens(where: str, value: Any) -> Any:
    return None if value is None else _count(where, value)


def _require_number(where: str, value: Any) -> None:
    require(isinstance(value, int | float) and not isinstance(value, bool), where, value, "a number")


def _number(low: float, high: float, *, above: bool = False) -> _Check:
    comparison = "above" if above else "at least"

    def check(where: str, value: Any) -> Any:
        _require_number(where, value)
        if not (low < value <= high if above else low <= value <= high):
            raise RequestRefusedError(f"{where}={brief(value)}: expected {comparison} {low:g} and at most {high:g}")
        return float(value)

    return check


_factor = _number(1 / _FACTOR, _FACTOR)


def _temperature(where: str, value: Any) -> Any:
    _require_number(where, value)
    if value == 0:
        return 0.0
    if not 1 / _FACTOR <= value <= _FACTOR:
        raise RequestRefusedError(f"{where}={brief(value)}: expected 0 (greedy), or {1 / _FACTOR:g} to {_FACTOR:g}")
    return float(value)


def _boolean(where: str, value: Any) -> Any:
    require(isinstance(value, bool), where, value, "a bool")
    return value


# Sequences and mappings are copied, so that nothing the caller does later changes a request that is under way.


def _tokens(where: str, value: Any) -> Any:
    require(
        isinstance(value, Sequence) and not isinstance(value, str | bytes), where, cast("object", value), "token ids"
    )
    tokens = cast("Sequence[Any]", value)
    for token in tokens:
        require(isinstance(token, int) and not isinstance(token, bool), where, token, "integer token ids")
        if not 0 <= token <= U32_MAX:
            raise RequestRefusedError(f"{where} holds {token!r}: a token id is 0 to {U32_MAX}")
    return tuple(tokens)


def _allowed_tokens(where: str, value: Any) -> Any:
    tokens = _tokens(where, value)
    if not tokens:
        raise RequestRefusedError(f"{where}=[]: expected at least one token id")
    return tokens


def _biases(where: str, value: Any) -> Any:
    require(isinstance(value, Mapping), where, value, "a mapping")
    _tokens(where, list(value))
    for token, bias in value.items():
        _require_number(f"{where}[{token}]", bias)
        if not abs(bias) <= _FACTOR:
            raise RequestRefusedError(
                f"{where}[{token}]={brief(bias)}: expected {-_FACTOR:g} to {_FACTOR:g}; a token that "
                "must not come is one that allowed_token_ids leaves out"
            )
    return {token: float(bias) for token, bias in value.items()}


def _structured(where: str, value: Any) -> Any:
    require(isinstance(value, StructuredOutputs), where, value, "a StructuredOutputs")
    return value


def _features(where: str, value: Any) -> Any:
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    require(is_sequence, where, cast("object", value), "a sequence of MultiModalFeature")
    features = tuple(cast("Sequence[Any]", value))
    for index, feature in enumerate(features):
        require(isinstance(feature, MultiModalFeature), f"{where}[{index}]", feature, "a MultiModalFeature")
    return features


def _extra(where: str, value: Any) -> Any:
    require(isinstance(value, Mapping), where, value, "a mapping")
    for name in value:
        require(isinstance(name, str), where, name, "string keys")
    return dict(value)


_SAMPLING_CHECKS: Mapping[str, _Check] = {
    "max_tokens": _max_tokens,
    "min_tokens": _integer(0, U32_MAX),
    "temperature": _temperature,
    "top_p": _number(0.0, 1.0, above=True),
    "top_k": _integer(-1, U32_MAX),
    "min_p": _number(0.0, 1.0),
    "seed": _integer(-(2**63), 2**63 - 1),
    "stop_token_ids": _tokens,
    "ignore_eos": _boolean,
    "logprobs": _integer(-1, U32_MAX),
    "prompt_logprobs": _integer(-1, U32_MAX),
    "presence_penalty": _number(-2.0, 2.0),
    "frequency_penalty": _number(-2.0, 2.0),
    "repetition_penalty": _factor,
    "logit_bias": _biases,
    "allowed_token_ids": _allowed_tokens,
    "structured_outputs": _structured,
    "extra": _extra,
}


def _is_list_of_strings(value: object) -> bool:
    if not isinstance(value, list | tuple):
        return False
    return all(isinstance(item, str) for item in cast("Sequence[object]", value))


_SAMPLING_DEFAULTS: Sequence[tuple[str, Any]] = [
    (field.name, field.default_factory() if callable(field.default_factory) else field.default)
    for field in dataclasses.fields(SamplingParams)
]
