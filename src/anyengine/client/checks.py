"""Checks of what callers pass, at the call and before anything is sent."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, cast

from anyengine.brief import brief
from anyengine.errors import RequestRefusedError
from anyengine.logprob_limits import within_max_logprobs
from anyengine.multimodal import MultiModalFeature, check_places
from anyengine.params import PoolingParams, RequestKeywords, RequestOptions, SamplingParams
from anyengine.protocol.sampling import NO_OPTIONS
from anyengine.types import EngineInfo


def check_sampling(sampling: object, info: EngineInfo) -> SamplingParams:
    """``sampling`` itself.

    :raises TypeError: if it is not SamplingParams
    :raises RequestRefusedError: if it asks for something that the engine does not support, or for more
        log-probabilities than it allows; the message names it
    """
    if not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling_params={brief(sampling)} ({type(sampling).__name__}): expected a SamplingParams")
    for name, value in sampling.differences.items():
        if name not in info.sampling_parameters:
            supported = ", ".join(info.sampling_parameters) or "none"
            raise RequestRefusedError(
                f"SamplingParams.{name}={brief(value)}: engine {info.engine!r} does not support it; it supports "
                f"{supported}"
            )
    within_max_logprobs(sampling, info)
    return sampling


def check_pooling(pooling: object, info: EngineInfo) -> PoolingParams:
    """``pooling`` itself.

    :raises TypeError: if it is not PoolingParams
    :raises RequestRefusedError: if the engine does not support its task
    """
    if not isinstance(pooling, PoolingParams):
        raise TypeError(f"pooling_params={brief(pooling)} ({type(pooling).__name__}): expected a PoolingParams")
    if pooling.task not in info.supported_tasks or pooling.task == "generate":
        supported = ", ".join(task for task in info.supported_tasks if task != "generate") or "none"
        raise RequestRefusedError(
            f"PoolingParams.task={brief(pooling.task)}: engine {info.engine!r} has no such pooling task; "
            f"it has {supported}"
        )
    return pooling


def check_options(info: EngineInfo, given: RequestKeywords, pooling: PoolingParams | None = None) -> RequestOptions:
    """A request's options.

    :raises TypeError: if there is no such option, or one has the wrong type
    :raises RequestRefusedError: if one is out of its range, or the engine does not support it; the message names it
    """
    if given:
        check_keywords(given, RequestKeywords)
    if pooling is None:
        if "generate" not in info.supported_tasks:
            supported = ", ".join(info.supported_tasks) or "none"
            raise RequestRefusedError(
                f"engine {info.engine!r} generates no tokens; call encode() for its tasks: {supported}"
            )
        if not given:
            return NO_OPTIONS
    options = RequestOptions(**given, pooling=pooling)
    for name in given:
        value = getattr(options, name)
        if name not in info.request_options and value != getattr(NO_OPTIONS, name):
            supported = ", ".join(info.request_options) or "no such option"
            raise RequestRefusedError(
                f"{name}={brief(value)}: engine {info.engine!r} does not support it; it supports {supported}"
            )
    return options


def check_features(features: Sequence[MultiModalFeature], tokens: Sized | None) -> None:
    """Check that features fit their prompt.

    :raises RequestRefusedError: if they do not, or the prompt is embeddings
    """
    if not features:
        return
    if tokens is None:
        raise RequestRefusedError(
            "features: expected prompt_token_ids, in which they have their places, not prompt_embeds"
        )
    check_places(features, len(tokens))


def check_keywords(given: Mapping[str, object], keywords: type) -> None:
    """Check the names of keyword arguments that are spelled out in the TypedDict ``keywords``.

    :raises TypeError: if one is not among them; the message names it and them
    """
    known = keywords.__annotations__
    for name in given:
        if name in known:
            continue
        if name in SamplingParams.__annotations__:
            raise TypeError(f"unexpected keyword argument {name!r}: it belongs into the request's SamplingParams")
        options = ", ".join(known)
        if keywords is RequestKeywords:
            options += ", and where the call has them request_id, stall_limit and prompt_embeds"
        raise TypeError(f"unexpected keyword argument {name!r}: the options of a request are {options}")


def check_handles(handles: object) -> list[int]:
    """``handles`` as a list.

    :raises TypeError: if it is not an iterable of integers
    """
    if not isinstance(handles, Iterable) or isinstance(handles, str | bytes):
        raise TypeError(f"handles={brief(handles)} ({type(handles).__name__}): expected handles of add_request")
    listed = list(cast("Iterable[Any]", handles))
    for handle in listed:
        if not isinstance(handle, int):
            raise TypeError(f"handles holds {brief(handle)} ({type(handle).__name__}): expected integers")
    return listed


def check_request_id(request_id: object) -> str | None:
    """``request_id`` itself.

    :raises TypeError: if it is neither a string nor None
    :raises RequestRefusedError: if it is empty
    """
    if request_id is not None and not isinstance(request_id, str):
        raise TypeError(f"request_id={brief(request_id)} ({type(request_id).__name__}): expected a string or None")
    if request_id == "":
        raise RequestRefusedError("request_id='': expected a string with at least one character, or None")
    return request_id


def check_count(name: str, value: object) -> None:
    """Check a limit that counts something.

    :raises TypeError: if ``value`` is not an integer
    :raises ValueError: if it is not above 0
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={brief(value)} ({type(value).__name__}): expected an integer")
    if value <= 0:
        raise ValueError(f"{name}={brief(value)}: expected at least 1")


def check_seconds(name: str, value: object, *, zero: bool = False) -> None:
    """Check a limit in seconds.

    :raises TypeError: if ``value`` is not a number
    :raises ValueError: if it is not above 0, or with ``zero`` below 0, or no float is as great
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise TypeError(f"{name}={brief(value)} ({type(value).__name__}): expected a number of seconds")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(f"{name}={brief(value)}: expected seconds that a float can hold")
    if value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name}={brief(value)}: expected {'at least' if zero else 'more than'} 0 seconds")
