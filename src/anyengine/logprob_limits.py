"""How many log-probabilities a request may ask for at each token: as many as its engine allows.

Clients refuse more at the call. Engines look again, as they do at lengths: what comes may be another client's, or from
before a restart.
"""

from __future__ import annotations

import dataclasses

from anyengine.errors import RequestRefusedError
from anyengine.params import SamplingParams
from anyengine.types import EngineInfo

_FIELDS = ("logprobs", "prompt_logprobs")


def within_max_logprobs(sampling: SamplingParams, info: EngineInfo) -> SamplingParams:
    """``sampling``, with the size of the vocabulary in place of -1.

    :raises RequestRefusedError: if it asks for more than the engine's ``max_logprobs``, or for all of a vocabulary of
        unknown size
    """
    if sampling.logprobs is sampling.prompt_logprobs is None:
        return sampling
    numbers: dict[str, int] = {}
    for name in _FIELDS:
        wanted: int | None = getattr(sampling, name)
        if wanted is None:
            continue
        count = info.vocab_size if wanted == -1 else wanted
        limit = info.vocab_size if info.max_logprobs == -1 else info.max_logprobs
        if count is None or (limit is not None and count > limit):
            raise RequestRefusedError(f"SamplingParams.{name}={wanted}: {_expected(info)}")
        if count != wanted:
            numbers[name] = count
    return dataclasses.replace(sampling, **numbers) if numbers else sampling


def _expected(info: EngineInfo) -> str:
    if info.max_logprobs != -1:
        return (
            f"expected at most {info.max_logprobs}, which is the max_logprobs of engine {info.engine!r}; start it with "
            "a greater one, or with max_logprobs=-1 to allow all tokens of its vocabulary"
        )
    if info.vocab_size is None:
        return f"expected a number, for engine {info.engine!r} does not say how many tokens its vocabulary has"
    return f"expected at most {info.vocab_size}, the tokens of the vocabulary of engine {info.engine!r}, or -1 for all"
