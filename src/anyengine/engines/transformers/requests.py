"""How requests begin and end: what is refused when one comes, and what is said of each token of it."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from anyengine.engine.core import EngineRequest, OutputDetails
from anyengine.engines.transformers.scheduler import Request
from anyengine.errors import RequestRefusedError
from anyengine.lengths import token_limit
from anyengine.params import SamplingParams
from anyengine.types import EngineInfo, FinishReason, TokenLogprobs

if TYPE_CHECKING:
    from anyengine.engines.transformers.model import CausalModel, PromptLogits
    from anyengine.engines.transformers.sampler import Sampler

_MAX_PROMPT_LOGPROBS = 2**22
"""How many log-probabilities of its prompt a request may ask for: all of them are in the host's memory at once."""


def accept(request: EngineRequest, info: EngineInfo, model: CausalModel, sampler: Sampler) -> Request:
    """The request as the scheduler takes it.

    :raises RequestRefusedError: if it asks for something that this engine or its model cannot do
    """
    params = request.sampling
    unsupported = params.differences.keys() - set(info.sampling_parameters)
    if unsupported:
        names = ", ".join(f"SamplingParams.{name}" for name in sorted(unsupported))
        raise RequestRefusedError(f"the transformers engine does not support {names}")
    embeds = None if request.prompt_embeds is None else model.as_embeds(request.prompt_embeds)
    tokens = _column(request.prompt_token_ids or ()) if embeds is None else array("I", bytes(4 * len(embeds)))
    length = len(tokens)
    if not tokens:
        raise RequestRefusedError("the prompt is empty")
    import torch  # a process that only names this engine need not load it

    ids = torch.frombuffer(bytearray(tokens), dtype=torch.uint32).long()
    largest = int(ids.max())
    if largest >= model.vocab_size:
        raise RequestRefusedError(f"the prompt holds token {largest}: the model has {model.vocab_size} tokens")
    if params.prompt_logprobs is not None:
        if embeds is not None:
            raise RequestRefusedError("SamplingParams.prompt_logprobs: a prompt of embeddings has no tokens to score")
        most = _MAX_PROMPT_LOGPROBS // length
        if params.prompt_logprobs > most:
            raise RequestRefusedError(
                f"SamplingParams.prompt_logprobs={params.prompt_logprobs}: expected at most {most} for a prompt of "
                f"{length} tokens"
            )
    return Request(
        handle=request.handle,
        tokens=tokens,
        prompt_length=length,
        limit=length + token_limit(params, length, info.max_model_len),
        sampling=sampler.start(params, ids if embeds is None else ids[:0]),
        embeds=embeds,
        prompt_logprobs=None if params.prompt_logprobs is None else [{}],
    )


def _column(token_ids: Sequence[int]) -> array[int]:
    """A copy of token ids; what came by the wire is not looked at one by one, for a prompt may be long."""
    if not isinstance(token_ids, memoryview):
        return array("I", token_ids)
    column = array("I")
    column.frombytes(token_ids.cast("B"))
    return column


def score_prompt(prompt: PromptLogits, sampler: Sampler) -> None:
    """Add what a step computed of a prompt to what is known of it."""
    request = prompt.request
    assert request.prompt_logprobs is not None
    tokens = list(request.tokens[prompt.position : prompt.position + len(prompt.logits)])
    count: int = request.sampling.params.prompt_logprobs
    request.prompt_logprobs += sampler.score(prompt.logits, tokens, count)


def details_of(
    request: Request, token: int, logprobs: TokenLogprobs | None, eos_token_ids: Collection[int]
) -> OutputDetails | None:
    """What is to be said beside ``token``, the request's last one. Takes what is known of the prompt's tokens."""
    finish_reason, stop_reason, error = _ending(request, token, eos_token_ids)
    prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
    positions = None if logprobs is None or token < 0 else [logprobs]
    if finish_reason is None and positions is None and prompt_logprobs is None:
        return None
    return OutputDetails(
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        error=error,
        logprobs=positions,
        prompt_logprobs=prompt_logprobs,
    )


def _ending(
    request: Request, token: int, eos_token_ids: Collection[int]
) -> tuple[FinishReason | None, int | None, str | None]:
    """Why the request ends with this token, if it does: the reason, the stop token, and what went wrong."""
    params: SamplingParams = request.sampling.params
    if token < 0:
        return "error", None, "no token can be sampled: the model's logits are not finite numbers"
    if token in eos_token_ids and not params.ignore_eos:
        return "stop", None, None
    if token in request.sampling.stop_token_ids:
        return "stop", token, None
    if len(request.tokens) >= request.limit:
        return "length", None, None
    return None, None, None
