"""What vLLM's core says of a step, as columns."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from anyengine.engine.core import OutputDetails, StepOutputs
from anyengine.engine.failures import message_of
from anyengine.errors import RequestError, RequestFailedError, RequestRefusedError
from anyengine.protocol.error_kinds import kind_of
from anyengine.types import FinishReason, TokenLogprobs

_FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error", "stop")
"""By the values of vLLM's FinishReason; the last is a repetition that was detected, which the stop reason says."""


@dataclasses.dataclass(frozen=True, slots=True)
class FailedRow:
    """The last row of a request that vLLM is not to go on with, in place of its ``EngineCoreOutput``."""

    request_id: str
    error: RequestError
    new_token_ids: Sequence[int] = ()
    finish_reason: int = _FINISH_REASONS.index("error")
    stop_reason: None = None
    new_logprobs: None = None
    new_prompt_logprobs_tensors: None = None
    pooling_output: None = None
    kv_transfer_params: None = None
    events: None = None


_FAILED = "vLLM ended the request for an error of its own; its log may say which (VLLM_LOGGING_LEVEL=WARNING)"


def step_outputs(
    rows: Sequence[Any], logprobs: Mapping[str, tuple[int, int]], reasons: Mapping[str, str]
) -> StepOutputs | None:
    """The columns of one step; None if it brought nothing.

    :param rows: vLLM's ``EngineCoreOutput`` or a ``FailedRow``, one for each request that has anything
    :param logprobs: how many log-probabilities a position of the completion and of the prompt is to have, by the ids of
        the requests that want any: a batch's arrays are as wide as its widest request wants
    """
    if not rows:
        return None
    tokens = [row.new_token_ids for row in rows]
    counts = array("I", map(len, tokens))
    return StepOutputs(
        array("Q", [int(row.request_id) for row in rows]),
        array("I", chain.from_iterable(tokens)),
        None if counts.count(1) == len(counts) else counts,
        {index: _details(row, logprobs, reasons) for index, row in enumerate(rows) if _has_details(row)},
    )


def _has_details(row: Any) -> bool:
    return (
        row.finish_reason is not None
        or row.new_logprobs is not None
        or row.new_prompt_logprobs_tensors is not None
        or row.pooling_output is not None
        or row.kv_transfer_params is not None
        or row.events is not None
    )


def _details(row: Any, logprobs: Mapping[str, tuple[int, int]], reasons: Mapping[str, str]) -> OutputDetails:
    value: int | None = row.finish_reason
    finish_reason = None if value is None else _FINISH_REASONS[value]
    wanted, prompt_wanted = logprobs.get(row.request_id, (0, 0))
    error = _error(row, reasons) if finish_reason == "error" else None
    new, prompt = row.new_logprobs, row.new_prompt_logprobs_tensors
    return OutputDetails(
        finish_reason=finish_reason,
        stop_reason=row.stop_reason,
        error=None if error is None else message_of(error),
        error_kind=None if error is None else kind_of(error),
        logprobs=None if new is None else _positions(new.logprob_token_ids, new.logprobs, wanted),
        # The first token of a prompt has no predecessor, and vLLM no entry for it.
        prompt_logprobs=(
            None if prompt is None else [{}, *_positions(prompt.logprob_token_ids, prompt.logprobs, prompt_wanted)]
        ),
        pooling_output=row.pooling_output,
        kv_transfer_params=row.kv_transfer_params,
        events=_events(row.events),
    )


def _error(row: Any, reasons: Mapping[str, str]) -> RequestError:
    if isinstance(row, FailedRow):
        return row.error
    # What is known of the reason is always something that the request asked for.
    reason = reasons.get(row.request_id)
    return RequestFailedError(_FAILED) if reason is None else RequestRefusedError(reason)


def _positions(token_ids: Any, logprobs: Any, wanted: int) -> list[TokenLogprobs]:
    """One mapping for each row of two arrays [positions, wanted or more], which begin with the token itself."""
    columns = wanted + 1
    return [
        dict(zip(tokens, values, strict=True))
        for tokens, values in zip(token_ids[:, :columns].tolist(), logprobs[:, :columns].tolist(), strict=True)
    ]


def _events(events: Iterable[Any] | None) -> list[Any] | None:
    """When a request was queued, scheduled and preempted, in seconds of the machine's monotonic clock."""
    if events is None:
        return None
    return [{"type": event.type.name.lower(), "timestamp": event.timestamp} for event in events]
