"""An engine that fails each request as its prompt's one token says: the number of one of FAULTS."""

from __future__ import annotations

from collections.abc import Sequence

from anyengine import (
    RequestFailedError,
    RequestRefusedError,
    RequestStalledError,
    TooManyRequestsError,
)
from anyengine.engine import EngineCore, EngineRequest, OutputDetails, StepOutputs, from_rows
from anyengine.types import EngineInfo

FAULTS: Sequence[tuple[BaseException | OutputDetails, type[Exception], str]] = [
    (RequestRefusedError("no such colour"), RequestRefusedError, "no such colour"),
    (RequestFailedError("a row was lost"), RequestFailedError, "a row was lost"),
    (TooManyRequestsError("8 of 8 places are taken"), TooManyRequestsError, "8 of 8 places"),
    (RequestStalledError("nothing came for 9 s"), RequestStalledError, "nothing came for 9 s"),
    (ValueError("shapes differ"), RequestFailedError, "ValueError: shapes differ"),
    (TypeError("not callable"), RequestFailedError, "TypeError: not callable"),
    (KeyError("unlucky"), RequestFailedError, "KeyError: 'unlucky'"),
    (OutputDetails(finish_reason="error", error="NaN"), RequestFailedError, "NaN"),
    (OutputDetails(finish_reason="error"), RequestFailedError, "failed in the engine"),
    (OutputDetails(finish_reason="error", error="no regex", error_kind="refused"), RequestRefusedError, "no regex"),
    (OutputDetails(finish_reason="error", error="full", error_kind="too_many"), TooManyRequestsError, "full"),
    (OutputDetails(finish_reason="error", error="late", error_kind="stalled"), RequestStalledError, "late"),
]
"""What is raised by ``add_request`` or comes as a row's details, which error the caller gets, and part of its text."""

FINE = len(FAULTS)
"""The token of a prompt that is answered with itself."""


class FaultEngine(EngineCore):
    """Ends each request in its first step, if not before."""

    def __init__(self) -> None:
        self._requests: list[tuple[int, int]] = []

    def describe(self) -> EngineInfo:
        return EngineInfo(engine="fault", version="1", max_model_len=100)

    def add_request(self, request: EngineRequest) -> None:
        (number,) = request.prompt_token_ids or ()
        if number != FINE and isinstance(error := FAULTS[number][0], BaseException):
            raise error
        self._requests.append((request.handle, number))

    def abort_requests(self, handles: Sequence[int]) -> None:
        self._requests = [request for request in self._requests if request[0] not in handles]

    def has_work(self) -> bool:
        return bool(self._requests)

    def step(self) -> StepOutputs:
        requests, self._requests = self._requests, []
        return from_rows((handle, [number] if number == FINE else [], _details(number)) for handle, number in requests)


def _details(number: int) -> OutputDetails:
    if number == FINE:
        return OutputDetails(finish_reason="stop")
    details = FAULTS[number][0]
    assert isinstance(details, OutputDetails)
    return details
