"""However much text an error has, and whatever its text does: what reaches the caller is bounded, and nothing ends."""

from __future__ import annotations

import os
from typing import Any

import pytest
from tests.client.wordy_engine import ERRORS, WordyEngine

from anyengine import (
    EngineDeadError,
    EngineSpec,
    EngineStartError,
    InprocEngineClient,
    RequestFailedError,
    SamplingParams,
    UnencodableResultError,
    UtilityError,
    open_engine_client,
)
from anyengine.engine.failures import describe_failure, message_of
from anyengine.errors import CrashReport
from anyengine.excerpts import MESSAGE_LIMIT, NAME_LIMIT, TRACE_LIMIT
from anyengine.process.output import TAIL_BYTES
from anyengine.protocol.cbor import encode_plain
from anyengine.protocol.handshake import Progress
from anyengine.protocol.messages import decode_from_engine
from anyengine.protocol.outputs import OutputDetails, decode_details, encode_details
from anyengine.protocol.replies import Dead, UtilityResult

pytestmark = pytest.mark.usefixtures("leaves_nothing")

SPEC = EngineSpec("tests.client.wordy_engine:WordyEngine")
EXPECTED = {
    "long": "ValueError: xxx",
    "group": "ExceptionGroup: many (5000 sub-exceptions)",
    "recursion": "RecursionError: ",
    "cycle": "ValueError: first",
    "poisoned notes": "PoisonedNotes: what was wrong",
    "long name": "NNN",
    "odd name": "OddlyNamed: what was wrong",
    "exit": "TroublingError: <its message cannot be shown: SystemExit>",
    "interrupt": "TroublingError: <its message cannot be shown: KeyboardInterrupt>",
    "no text": "TroublingError: <its message cannot be shown: TypeError>",
    "odd text": "TroublingError: what was wrong",
}
OTHERWISE = "Error: "


def check(error: BaseException, name: str, *, limit: int) -> None:
    text = str(error)
    assert EXPECTED.get(name, OTHERWISE) in text
    assert len(text) < limit


@pytest.mark.anyio
async def test_in_calls_and_in_requests() -> None:
    seen: list[str] = []
    async with open_engine_client(SPEC, on_progress=lambda stage, fraction: seen.append(stage)) as client:
        assert seen and max(map(len, seen)) <= MESSAGE_LIMIT
        for name in ERRORS:
            with pytest.raises(UtilityError) as caught:
                await client.call_utility("fail", name)
            check(caught.value, name, limit=2 * TRACE_LIMIT)
            assert len(caught.value.message) <= MESSAGE_LIMIT
            await client.call_utility("fail_in", "add", name)
            with pytest.raises(RequestFailedError) as failed:
                await client.generate([1])
            check(failed.value, name, limit=2 * MESSAGE_LIMIT)
        await client.call_utility("fail_in", "add", None)
        with pytest.raises(UnencodableResultError):
            await client.call_utility("odd_value")
        assert len((await client.generate([1], SamplingParams(max_tokens=3))).token_ids) == 3


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["long", "exit", "poisoned notes", "recursion"])
async def test_in_a_step(name: str) -> None:
    async with open_engine_client(SPEC) as client:
        await client.call_utility("fail_in", "step", name)
        with pytest.raises(EngineDeadError) as caught:
            await client.generate([1])
        check(caught.value, name, limit=3 * TRACE_LIMIT)
        assert "wordy_engine.py" in (caught.value.report.traceback or "")


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["long", "interrupt"])
async def test_in_loading_with_a_line_without_end(name: str) -> None:
    with pytest.raises(EngineStartError) as caught:
        async with open_engine_client(EngineSpec(SPEC.path, {"load": name})):
            pass
    check(caught.value, name, limit=3 * TRACE_LIMIT)
    assert len(caught.value.report.stderr_tail) <= TAIL_BYTES + 10
    assert caught.value.report.stderr_tail.startswith("... ")


def test_in_process() -> None:
    for name in ERRORS:
        if name == "interrupt":
            continue  # in a program's first thread nobody can tell it from Ctrl-C
        with InprocEngineClient(WordyEngine()) as client:
            with pytest.raises(UtilityError) as called:
                client.call_utility("fail", name)
            check(called.value, name, limit=2 * TRACE_LIMIT)
            client.call_utility("fail_in", "add", name)
            with pytest.raises(RequestFailedError) as failed:
                client.add_request([1])
            check(failed.value, name, limit=2 * MESSAGE_LIMIT)
            client.call_utility("fail_in", "add", None)
            client.add_request([1])
            client.call_utility("fail_in", "step", name)
            with pytest.raises(EngineDeadError) as died:
                client.get_output()
            check(died.value, name, limit=2 * TRACE_LIMIT)


def test_ctrl_c_is_not_taken_for_a_text_that_cannot_be_shown() -> None:
    with pytest.raises(KeyboardInterrupt):
        message_of(ERRORS["interrupt"]())


def test_an_engine_that_knows_no_limits_is_cut_by_the_client() -> None:
    long: Any = "x" * 10**6
    result = decode_from_engine([UtilityResult.KIND, encode_plain([1, 2, 3, [long, long, long], None])])
    assert isinstance(result, UtilityResult) and result.error is not None
    for text, limit in zip(result.error, (NAME_LIMIT, MESSAGE_LIMIT, TRACE_LIMIT), strict=True):
        assert text is not None and len(text) <= limit
    dead = decode_from_engine([Dead.KIND, encode_plain([1, 2, long, long, long])])
    assert isinstance(dead, Dead)
    report = dead.amend(CrashReport(rank=0, pid=1, phase="serve"))
    assert len(report.describe()) < 1.2 * (NAME_LIMIT + MESSAGE_LIMIT + TRACE_LIMIT)
    progress = decode_from_engine([Progress.KIND, encode_plain([long, None])])
    assert isinstance(progress, Progress) and len(progress.stage) <= MESSAGE_LIMIT
    details = decode_details({"finish_reason": "error", "error": long})
    assert details.error is not None and len(details.error) <= MESSAGE_LIMIT
    raw = OutputDetails(finish_reason="error", error=long)
    assert len(str(encode_details(raw, [], "")["error"])) <= MESSAGE_LIMIT
    assert len(str(raw.to_error(1))) < MESSAGE_LIMIT + 20


def test_what_was_cut_says_how_much() -> None:
    kind, message, traceback = describe_failure(ERRORS["long"]())
    assert kind == "ValueError" and len(message) <= MESSAGE_LIMIT
    left = int(message.partition("(")[2].partition(" ")[0].replace(",", ""))
    assert message.count("x") == 10_000_000 - left
    assert len(traceback) <= TRACE_LIMIT and "are left out here" in traceback


def test_frames_at_both_ends_of_a_long_traceback_stay() -> None:
    try:
        raise ERRORS["chain"]() from ERRORS["recursion"]()
    except ValueError as error:
        _, _, traceback = describe_failure(error)
    assert traceback.startswith("Traceback") and "are left out here" in traceback
    assert os.path.basename(__file__) in traceback[-1000:]
