"""Why vLLM ends a request for an error, which its outputs do not say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def reasons_of(scheduler: Any) -> dict[str, str]:
    """A mapping to which the reason is added of each request that the scheduler ends for an error from now on.

    It is by request id, and holds those alone whose reason can be told.
    """
    reasons: dict[str, str] = {}
    finish = scheduler.finish_requests

    def finish_and_note(request_ids: Any, finished_status: Any) -> Any:
        if finished_status.name == "FINISHED_ERROR":
            for request in _requests(scheduler, request_ids):
                if (reason := _reason(scheduler, request)) is not None:
                    reasons[request.request_id] = reason
        return finish(request_ids, finished_status)

    scheduler.finish_requests = finish_and_note
    return reasons


def _requests(scheduler: Any, request_ids: str | Iterable[str] | None) -> list[Any]:
    if request_ids is None:
        return list(scheduler.requests.values())
    ids = {request_ids} if isinstance(request_ids, str) else set(request_ids)
    return [scheduler.requests[each] for each in ids if each in scheduler.requests]


def _reason(scheduler: Any, request: Any) -> str | None:
    grammar = getattr(request.structured_output_request, "grammar", None)
    if isinstance(grammar, Exception):
        return f"structured_outputs cannot be compiled: {grammar}"
    cached_size = getattr(getattr(scheduler, "encoder_cache_manager", None), "get_cached_num_encoder_embeds", None)
    if cached_size is None:  # before 0.32 vLLM does not compare
        return None
    for index, feature in enumerate(request.mm_features):
        cached, size = cached_size(request, index), request.get_num_encoder_embeds(index)
        if cached is not None and cached != size:
            return (
                f"features[{index}] has {size} embeddings, and the engine keeps {cached} under its identifier "
                f"{feature.identifier!r}: what differs needs another identifier"
            )
    return None
