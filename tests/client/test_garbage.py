"""However a request or call ends, nothing of it is in a cycle: without the garbage collector a client does not grow.

A task group that is cancelled is not among the endings: on asyncio AnyIO's own task groups leave a cycle then, with the
frames of the tasks that were cancelled.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import pytest
from tests.garbage import REPEATS, nothing_in_cycles
from tests.text import kinds

from anyengine import EngineClient, EngineError, SamplingParams, open_engine_client
from anyengine.testing import scripted_spec
from anyengine.text import ModelText

pytestmark = pytest.mark.anyio

LONG = SamplingParams(max_tokens=10**6)
SHORT = SamplingParams(max_tokens=3)
UNKNOWN_TOKEN = [40_000]
TEXT = ModelText(kinds.byte_level(), chat_templates={"default": "{{ messages[0].content }}"})


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
async def client(anyio_backend: str) -> AsyncIterator[EngineClient]:
    # In a thread, so that the engine's own garbage is seen, too.
    async with open_engine_client(scripted_spec(step_delay=0.0002), placement="thread") as client:
        yield client


async def _read(client: EngineClient, prompt: list[int], params: SamplingParams) -> None:
    async with client.open_request(prompt, params) as request:
        async for _ in request:
            pass


async def _leave(client: EngineClient, outputs: int) -> None:
    async with client.open_request([1], LONG) as request:
        for _ in range(outputs):
            await anext(request)


async def _raise_in_the_block(client: EngineClient) -> None:
    async with client.open_request([1], LONG):
        raise EngineError("the reader's own")


async def _read_on_after_an_error(client: EngineClient) -> None:
    async with TEXT.open_stream(client, UNKNOWN_TOKEN, SHORT) as stream:
        for _ in range(2):
            with contextlib.suppress(EngineError):
                await anext(stream, None)


async def _leave_text(client: EngineClient) -> None:
    async with TEXT.open_stream(client, "hello", LONG) as stream:
        await anext(stream)


async def _time_out(call: Awaitable[object]) -> None:
    with anyio.move_on_after(0.002):
        await call


async def _stall(client: EngineClient) -> None:
    await client.pause_scheduler("keep")
    try:
        await client.generate([1], LONG, stall_limit=0.001)
    finally:
        await client.resume_scheduler()


async def _call_without_answer(client: EngineClient, timeout: float | None) -> None:
    handle = await client.add_request([1], LONG)
    try:
        await _time_out(client.call_utility("pause_scheduler", "wait", timeout=timeout))
    finally:
        await client.abort_requests([handle])
        await client.resume_scheduler()


async def _dispatch(client: EngineClient) -> None:
    await client.add_request([1], SamplingParams(max_tokens=1))
    await client.get_output()


async def _add_and_abort(client: EngineClient) -> None:
    await client.abort_requests([await client.add_request([1], LONG)])


ENDINGS: dict[str, Callable[[EngineClient], Awaitable[object]]] = {
    "a stream read to its end": lambda client: _read(client, [1], SHORT),
    "a stream left early": lambda client: _leave(client, 1),
    "a stream left unread": lambda client: _leave(client, 0),
    "an exception in the block": _raise_in_the_block,
    "a stream that times out": lambda client: _time_out(_read(client, [1], LONG)),
    "a stream that the engine refuses": lambda client: _read(client, UNKNOWN_TOKEN, SHORT),
    "a completion": lambda client: client.generate([1], SHORT),
    "a completion that times out": lambda client: _time_out(client.generate([1], LONG)),
    "a completion that the engine refuses": lambda client: client.generate(UNKNOWN_TOKEN, SHORT),
    "a completion that the client refuses": lambda client: client.generate([1], SHORT, request_id=""),
    "a stalled completion": _stall,
    "a dispatched request": _dispatch,
    "a dispatched request that is aborted": _add_and_abort,
    "an output that does not come": lambda client: _time_out(client.get_output()),
    "a call": lambda client: client.call_utility("echo", 1),
    "a call that raises": lambda client: client.call_utility("wake_up", 5),
    "a call without such a utility": lambda client: client.call_utility("no_such_thing"),
    "a call that cannot travel": lambda client: client.call_utility("echo", object()),
    "a call that is cancelled": lambda client: _call_without_answer(client, None),
    "a call that times out": lambda client: _call_without_answer(client, 0.001),
    "waiting for a death": lambda client: _time_out(client.wait_dead()),
    "text": lambda client: TEXT.generate(client, "hello", SHORT),
    "text with a stop string": lambda client: TEXT.generate(client, [1], LONG, stop=[TEXT.decode([3])]),
    "text left early": _leave_text,
    "text that the engine refuses": lambda client: TEXT.generate(client, UNKNOWN_TOKEN, SHORT),
    "text that is read on after an error": _read_on_after_an_error,
    "text that cannot be encoded": lambda client: TEXT.generate(client, "\ud83c", SHORT),
}


@pytest.mark.parametrize("ending", ENDINGS)
async def test_an_ending_leaves_nothing_in_cycles(client: EngineClient, ending: str) -> None:
    async def end() -> None:
        with contextlib.suppress(EngineError):
            await ENDINGS[ending](client)

    await end()
    with nothing_in_cycles():
        for _ in range(REPEATS):
            await end()
