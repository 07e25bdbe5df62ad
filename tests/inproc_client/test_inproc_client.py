"""The in-process client: one step per call, the same checks and errors, and an engine that breaks."""

from __future__ import annotations

import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from anyengine import (
    EngineClosedError,
    EngineDeadError,
    OutputDetails,
    RequestFailedError,
    RequestRefusedError,
    SamplingParams,
    StepOutputs,
    UtilityError,
)
from anyengine.engine import EngineRequest, ProgressReporter, utility
from anyengine.engines.scripted import ScriptedEngine
from anyengine.inproc_client import InprocEngineClient

pytestmark = pytest.mark.usefixtures("leaves_nothing")

THREE = SamplingParams(max_tokens=3)


@pytest.fixture
def client() -> Iterator[InprocEngineClient]:
    with InprocEngineClient(ScriptedEngine()) as client:
        yield client


def rows_of(outputs: StepOutputs) -> list[tuple[int, list[int], str | None]]:
    return [
        (handle, list(tokens), None if details is None else details.finish_reason)
        for handle, tokens, details in outputs.rows()
    ]


def run(client: InprocEngineClient) -> list[tuple[int, list[int], str | None]]:
    rows: list[tuple[int, list[int], str | None]] = []
    while client.has_unfinished_requests():
        rows += rows_of(client.get_output())
    return rows


# ---- stepping ----


def test_each_output_is_one_step(client: InprocEngineClient) -> None:
    first = client.add_request([10], THREE)
    assert rows_of(client.get_output()) == [(first, [11], None)]
    second = client.add_request([20], THREE)
    assert rows_of(client.get_output()) == [(first, [12], None), (second, [21], None)]
    assert rows_of(client.get_output()) == [(first, [13], "length"), (second, [22], None)]
    assert rows_of(client.get_output()) == [(second, [23], "length")]
    assert not client.has_unfinished_requests()
    assert rows_of(client.get_output()) == []


def test_no_thread_and_no_process(client: InprocEngineClient) -> None:
    before = set(threading.enumerate())
    client.add_request([1], THREE)
    run(client)
    assert set(threading.enumerate()) <= before  # one that idled since an earlier test may end


def test_what_was_aborted_has_its_last_row_in_the_next_output(client: InprocEngineClient) -> None:
    first, second = (client.add_request([start], THREE) for start in (10, 20))
    client.get_output()
    client.abort_requests([first, first, 99])
    client.abort_requests([first])
    assert rows_of(client.get_output()) == [(first, [], "abort"), (second, [22], None)]
    client.abort_requests([second])
    assert client.has_unfinished_requests()
    assert run(client) == [(second, [], "abort")]


def test_a_pause_holds_requests_and_a_resume_refuses_what_does_not_fit(client: InprocEngineClient) -> None:
    kept = client.add_request([10], THREE)
    client.get_output()
    client.pause_scheduler("keep")
    held = client.add_request([20], THREE)
    refused = client.add_request([10**6], THREE)
    aborted = client.add_request([30], THREE)
    client.abort_requests([aborted])
    assert rows_of(client.get_output()) == [(aborted, [], "abort")]
    assert rows_of(client.get_output()) == []
    assert client.has_unfinished_requests()
    client.resume_scheduler()
    outputs = client.get_output()
    assert rows_of(outputs) == [(refused, [], "error"), (kept, [12], None), (held, [21], None)]
    assert "not below vocab_size" in (outputs.details[0].error or "")
    run(client)


def test_an_abort_pause_brings_last_rows_and_sleep_keeps_requests(client: InprocEngineClient) -> None:
    first = client.add_request([10], THREE)
    client.get_output()
    client.sleep(1, "keep")
    assert rows_of(client.get_output()) == []
    client.wake_up()
    assert rows_of(client.get_output()) == [(first, [12], None)]
    client.pause_scheduler("abort")
    assert run(client) == [(first, [], "abort")]


@pytest.mark.parametrize("method", ["pause_scheduler", "sleep"])
def test_a_wait_nobody_would_end_is_refused_with_the_reason(method: str, client: InprocEngineClient) -> None:
    client.add_request([10], THREE)
    with pytest.raises(UtilityError, match=r"nobody steps the engine while this call waits; call get_output\(\) until"):
        getattr(client, method)(mode="wait")
    assert len(run(client)) == 3
    getattr(client, method)(mode="wait")
    assert client.is_scheduler_paused()


def test_rows_of_requests_that_nobody_has_are_left_out(client: InprocEngineClient) -> None:
    handle = client.add_request([10], SamplingParams(max_tokens=100))
    client.get_output()
    with pytest.raises(UtilityError, match="it would answer in a later step"):
        client.call_utility("flood", 2, 3)
    assert rows_of(client.get_output()) == [(handle, [0], None)]
    assert rows_of(client.get_output()) == [(handle, [1], None)]


def test_embeddings_reach_the_engine_as_they_are() -> None:
    import numpy

    taken: list[Any] = []

    class EmbedsEngine(ScriptedEngine):
        def describe(self) -> Any:
            import dataclasses

            return dataclasses.replace(super().describe(), prompt_embeds=True)

        def add_request(self, request: EngineRequest) -> None:
            taken.append(request.prompt_embeds)

    embeds = numpy.zeros((2, 4))
    with InprocEngineClient(EmbedsEngine()) as client:
        client.add_request(prompt_embeds=embeds)
    assert taken[0] is embeds


# ---- one request, one call ----


def test_the_engine_refuses_at_the_call_and_nothing_is_left(client: InprocEngineClient) -> None:
    with pytest.raises(RequestRefusedError, match="prompt token id 1000000 is not below vocab_size"):
        client.add_request([10**6], THREE, request_id="same")
    assert not client.has_unfinished_requests()
    client.add_request([1], THREE, request_id="same")
    with pytest.raises(RequestRefusedError, match="request_id='same': a live request has this id"):
        client.add_request([1], THREE, request_id="same")
    run(client)
    client.add_request([1], THREE, request_id="same")


def test_an_exception_in_add_request_fails_that_request_alone() -> None:
    class FussyEngine(ScriptedEngine):
        def add_request(self, request: EngineRequest) -> None:
            if list(request.prompt_token_ids or ()) == [13]:
                raise KeyError("unlucky")
            super().add_request(request)

    with InprocEngineClient(FussyEngine()) as client:
        with pytest.raises(RequestFailedError, match="KeyError: 'unlucky'") as caught:
            client.add_request([13], THREE)
        assert isinstance(caught.value.__cause__, KeyError)
        client.add_request([1], THREE)
        assert len(run(client)) == 3


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({}, TypeError, "exactly one of prompt_token_ids and prompt_embeds"),
        ({"prompt_token_ids": "text"}, TypeError, "tokenize it first"),
        ({"prompt_token_ids": []}, RequestRefusedError, "expected at least one token"),
        ({"prompt_token_ids": [-1]}, RequestRefusedError, "a token id is 0 to"),
        ({"prompt_token_ids": [1], "sampling_params": SamplingParams(top_k=3)}, RequestRefusedError, "top_k=3: engine"),
        ({"prompt_token_ids": [1], "sampling_params": 3}, TypeError, "expected a SamplingParams"),
        ({"prompt_token_ids": [1], "request_id": ""}, RequestRefusedError, "request_id=''"),
    ],
)  # fmt: skip
def test_bad_requests(
    arguments: dict[str, Any], kind: type[Exception], message: str, client: InprocEngineClient
) -> None:
    with pytest.raises(kind, match=message):
        client.add_request(**arguments)


def test_bad_calls(client: InprocEngineClient) -> None:
    with pytest.raises(TypeError, match="handles holds 'a'"):
        client.abort_requests(["a"])  # type: ignore[list-item]
    with pytest.raises(UtilityError, match="engine 'scripted' has no such utility; it has abort, add_lora"):
        client.call_utility("add_request")
    with pytest.raises(TypeError, match=r"method=3 \(int\): expected a string"):
        client.call_utility(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout=1: a call of an in-process engine cannot be ended early"):
        client.call_utility("echo", 1, timeout=1)
    with pytest.raises(TypeError, match="expected an EngineCore object"):
        InprocEngineClient(ScriptedEngine)  # type: ignore[arg-type]


def test_a_failing_utility_carries_type_text_and_traceback(client: InprocEngineClient) -> None:
    with pytest.raises(UtilityError) as caught:
        client.call_utility("raise_error", "boom-1")
    error = caught.value
    assert (error.method, error.exception_type, error.message) == ("raise_error", "RuntimeError", "boom-1")
    assert "faults.py" in (error.traceback or "")
    assert isinstance(error.__cause__, RuntimeError)
    assert client.call_utility("echo", array("I", [1])) == array("I", [1])


def test_sys_exit_in_a_utility_is_that_calls_failure() -> None:
    class LeavingEngine(ScriptedEngine):
        @utility
        def leave(self) -> None:
            sys.exit(3)

    with InprocEngineClient(LeavingEngine()) as client:
        with pytest.raises(UtilityError, match="SystemExit"):
            client.call_utility("leave")


# ---- endings ----


def test_an_engine_that_raises_in_a_step_is_dead_for_every_later_call(client: InprocEngineClient) -> None:
    client.add_request([1], THREE)
    client.call_utility("raise_in_step", "the step failed")
    with pytest.raises(EngineDeadError, match="RuntimeError: the step failed") as first:
        client.get_output()
    report = first.value.report
    assert (report.phase, report.exception_type, report.exception_message) == (
        "serve",
        "RuntimeError",
        "the step failed",
    )
    assert "_strike" in (report.traceback or "")
    assert isinstance(first.value.__cause__, RuntimeError)
    for call in (
        client.get_output,
        lambda: client.add_request([1], THREE),
        lambda: client.abort_requests([0]),
        client.is_scheduler_paused,
    ):
        with pytest.raises(EngineDeadError) as later:
            call()
        assert later.value is not first.value
        assert later.value.report is report
    assert not client.has_unfinished_requests()


class BrittleEngine(ScriptedEngine):
    """Cannot abort."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def abort_requests(self, handles: Sequence[int]) -> None:
        raise self.error


@pytest.mark.parametrize("call", [lambda client: client.abort_requests([0]), lambda client: client.pause_scheduler()])
def test_an_engine_that_fails_to_abort_is_dead(call: Any) -> None:
    with InprocEngineClient(BrittleEngine(RuntimeError("no"))) as client:
        client.add_request([1], THREE)
        with pytest.raises(EngineDeadError, match="RuntimeError: no"):
            call(client)
        with pytest.raises(EngineDeadError):
            client.get_output()


def test_an_interrupted_step_leaves_the_engine_in_an_unknown_state() -> None:
    class InterruptedEngine(ScriptedEngine):
        def step(self) -> StepOutputs | None:
            raise KeyboardInterrupt

    with InprocEngineClient(InterruptedEngine()) as client:
        client.add_request([1], THREE)
        with pytest.raises(KeyboardInterrupt):
            client.get_output()
        with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
            client.get_output()


def test_two_last_rows_of_a_request_fail_it() -> None:
    class StutteringEngine(ScriptedEngine):
        def step(self) -> StepOutputs | None:
            return StepOutputs([0, 0], [1, 2], details={0: OutputDetails(finish_reason="stop")})

    with InprocEngineClient(StutteringEngine()) as client:
        client.add_request([1], THREE)
        ((_, _, details),) = client.get_output().rows()
        assert details is not None
        assert details.finish_reason == "error"
        assert details.error == "StutteringEngine.step() returned two rows of one request"
        assert not client.has_unfinished_requests()


class WatchedEngine(ScriptedEngine):
    """Remembers what was asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def load(self, progress: ProgressReporter) -> None:
        super().load(progress)
        self.seen.append("load")

    def abort_requests(self, handles: Sequence[int]) -> None:
        super().abort_requests(handles)
        self.seen.append(("abort", list(handles)))

    def shutdown(self) -> None:
        self.seen.append("shutdown")


def test_leaving_the_block_aborts_and_shuts_down_once() -> None:
    engine = WatchedEngine()
    with InprocEngineClient(engine) as client:
        handle = client.add_request([1], THREE)
        client.close()
    assert engine.seen == ["load", ("abort", [handle]), "shutdown"]
    for call in (client.get_output, lambda: client.add_request([1]), client.list_loras):
        with pytest.raises(EngineClosedError, match="the client is closed"):
            call()


def test_an_error_of_the_body_comes_out_and_the_engine_is_shut_down() -> None:
    engine = WatchedEngine()
    with pytest.raises(ZeroDivisionError):
        with InprocEngineClient(engine):
            raise ZeroDivisionError
    assert engine.seen == ["load", "shutdown"]


def test_what_loading_raises_comes_out_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="loading failed, as it was told to"):
        InprocEngineClient(ScriptedEngine(load_fault="raise"))


def test_it_loads_neither_an_event_loop_nor_sockets_of_ours() -> None:
    code = """
import sys
from anyengine.inproc_client import InprocEngineClient
print(*sorted({"anyio", "trio", "asyncio", "zmq", "torch", "numpy"} & {*sys.modules}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
