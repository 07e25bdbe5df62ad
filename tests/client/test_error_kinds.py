"""Whose fault it is that a request failed is the type of its error, by every client and call."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from tests.client.fault_engine import FAULTS, FINE, FaultEngine

from anyengine import (
    EngineClient,
    EngineError,
    EngineSpec,
    InprocEngineClient,
    RequestError,
    RequestRefusedError,
    SyncEngineClient,
    TooManyRequestsError,
    open_engine_client,
    open_sync_engine_client,
)
from anyengine.client.one_error import one_error
from anyengine.protocol.error_kinds import ERROR_KINDS, kind_of, request_error

SPEC = EngineSpec("tests.client.fault_engine:FaultEngine")


def check(error: BaseException, number: int) -> None:
    _, kind, text = FAULTS[number]
    assert type(error) is kind and text in str(error)
    assert isinstance(error, RequestError)
    # What no caller can mend is no ValueError: a server would answer 400.
    assert isinstance(error, ValueError) == (kind is RequestRefusedError)


async def read(client: EngineClient, number: int) -> None:
    async with client.open_request([number]) as request:
        async for _ in request:
            pass


async def read_steps(client: EngineClient, number: int) -> None:
    handle = await client.add_request([number])
    (details,) = (await client.get_output()).details.values()
    raise details.to_error(handle)


@pytest.mark.anyio
@pytest.mark.usefixtures("leaves_nothing")
async def test_the_async_client_raises_what_the_engine_did() -> None:
    calls: list[Callable[[EngineClient, int], Any]] = [
        lambda client, number: client.generate([number]),
        read,
        read_steps,
    ]
    async with open_engine_client(SPEC) as client:
        for call in calls:
            for number in range(len(FAULTS)):
                with pytest.raises(RequestError) as caught:
                    await call(client, number)
                check(caught.value, number)
        assert (await client.generate([FINE])).token_ids == [FINE]


@pytest.mark.anyio
@pytest.mark.usefixtures("leaves_nothing")
async def test_what_was_held_in_a_pause_is_told_apart_as_well() -> None:
    async with open_engine_client(SPEC) as client:
        await client.pause_scheduler("keep")
        errors: dict[int, BaseException] = {}

        async def generate(number: int) -> None:
            try:
                await client.generate([number])
            except RequestError as error:
                errors[number] = error

        async with anyio.create_task_group() as group:
            for number in range(len(FAULTS)):
                group.start_soon(generate, number)
            await anyio.wait_all_tasks_blocked()
            await client.resume_scheduler()
        for number in range(len(FAULTS)):
            check(errors[number], number)


def read_sync(client: SyncEngineClient, number: int) -> None:
    with client.stream([number]) as request:
        list(request)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.usefixtures("leaves_nothing")
def test_the_sync_client_raises_what_the_engine_did(backend: Any) -> None:
    with open_sync_engine_client(SPEC, backend=backend) as client:
        for number in range(len(FAULTS)):
            for call in (read_sync, lambda client, number: client.generate([number])):
                with pytest.raises(RequestError) as caught:
                    call(client, number)
                check(caught.value, number)
        results = dict(client.generate_many([[number] for number in range(FINE + 1)]))
        for number in range(len(FAULTS)):
            error = results[number]
            assert isinstance(error, RequestError)
            check(error, number)
        assert not isinstance(results[FINE], RequestError)


def test_the_in_process_client_raises_what_the_engine_did() -> None:
    with InprocEngineClient(FaultEngine()) as client:
        for number, (fault, *_) in enumerate(FAULTS):
            if isinstance(fault, BaseException):
                with pytest.raises(RequestError) as caught:
                    client.add_request([number])
                check(caught.value, number)
                client.pause_scheduler("keep")
                client.add_request([number])
                client.resume_scheduler()
            else:
                client.add_request([number])
            (details,) = client.get_output().details.values()
            check(details.to_error("x"), number)


def test_a_kind_is_that_of_its_error_and_back() -> None:
    for kind in ERROR_KINDS:
        error = request_error(kind, "text")
        assert kind_of(error) == kind and str(error) == "text"
        for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
            assert type(again) is type(error) and str(again) == "text"
    assert kind_of(EngineError("?")) == kind_of(ValueError("?")) == "failed"
    assert copy.copy(TooManyRequestsError("full", 3)).limit == 3


# ---- several errors at once ----


@pytest.mark.anyio
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("body", [None, ZeroDivisionError("the body's own")])
async def test_services_that_fail_together_leave_one_bare_error(
    body: Exception | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = anyio.Event()

    async def fail(error: Exception, *_: object) -> None:
        await failing.wait()
        raise error

    for name, error in (("keep_pulse", KeyError("pulse")), ("show_output", OSError("output"))):
        monkeypatch.setattr(f"anyengine.client.opening.{name}", lambda session, error=error: fail(error))
    with pytest.raises((KeyError, OSError, ZeroDivisionError)) as caught:
        async with open_engine_client(SPEC):
            failing.set()
            if body is not None:
                raise body
            await anyio.sleep_forever()
    notes = " ".join(caught.value.__notes__)
    others = ["KeyError: 'pulse'", "OSError: output"]
    if body is None:
        assert isinstance(caught.value, KeyError | OSError)
        assert [text in notes for text in others] == [type(caught.value) is kind for kind in (OSError, KeyError)]
    else:
        assert caught.value is body and all(text in notes for text in others)
    messages = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(messages) == (1 if body is None else 2)
    assert all("Traceback" in record.getMessage() for record in messages)


@pytest.mark.anyio
async def test_an_interrupt_comes_before_other_errors_and_a_cancellation_is_none() -> None:
    interrupt, error, cancelled = KeyboardInterrupt(), ValueError("v"), None
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.sleep(1)
        except anyio.get_cancelled_exc_class() as caught:
            cancelled = caught
            raise
    assert cancelled is not None
    assert one_error(BaseExceptionGroup("", [cancelled, error]), None) is error
    assert one_error(BaseExceptionGroup("", [error, BaseExceptionGroup("", [interrupt])]), None) is interrupt
    alone = BaseExceptionGroup("", [cancelled])
    assert one_error(alone, None) is alone
