"""Tensors on their way by the lane when something goes wrong: a death, a cancellation, a refusal."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from typing import Any

import anyio
import numpy
import pytest
from tests.client.lane_engine import digest, figures, first_token, lane_spec
from tests.helpers import is_running, until, until_sync
from tests.lane import ONE_TOKEN, is_free, lane_of, large, lent, passed

from anyengine import EngineClient, EngineDeadError, RequestFailedError, RestartPolicy, open_engine_client
from anyengine.protocol.lane import LANE_KIND, Passed, encode_passed

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]


async def test_an_engine_killed_with_tensors_on_their_way() -> None:
    errors: list[EngineDeadError] = []

    async def send(client: EngineClient, number: int) -> None:
        with pytest.raises(EngineDeadError) as caught:
            if number % 2:
                await client.call_utility("keep", large(number))
            else:
                await client.generate(prompt_embeds=large(number), sampling_params=ONE_TOKEN)
        errors.append(caught.value)

    async with open_engine_client(lane_spec()) as client:
        await client.call_utility("keep", large(0))
        os.kill(client.health().pid, signal.SIGSTOP)
        async with anyio.create_task_group() as group:
            for number in range(1, 40):
                group.start_soon(send, client, number)
            await until(lambda: passed(client) == 40)
            os.kill(client.health().pid, signal.SIGKILL)
        assert len(errors) == 39
        with pytest.raises(EngineDeadError):
            await client.call_utility("keep", large(0))


async def test_engines_that_die_while_tensors_are_copied() -> None:
    for delay in (0.0, 0.01, 0.03, 0.06):
        async with anyio.create_task_group() as group:
            async with open_engine_client(lane_spec()) as client:
                group.start_soon(_kill_after, delay, client.health().pid)
                with pytest.raises(EngineDeadError):
                    await client.call_utility("keep", numpy.ones(2**25))
                    await client.wait_dead()


async def _kill_after(delay: float, pid: int) -> None:
    await anyio.sleep(delay)
    os.kill(pid, signal.SIGKILL)


def test_a_client_killed_with_tensors_on_their_way(anyio_backend: Any) -> None:
    """The memory has no name: it ends with the processes that have it."""
    code = f"""
import anyio, os, signal
from tests.client.lane_engine import lane_spec
from tests.lane import large
from anyengine import open_engine_client
async def main():
    async with open_engine_client(lane_spec()) as client:
        await client.call_utility("keep", large(0))
        print(client.health().pid, flush=True)
        os.kill(client.health().pid, signal.SIGSTOP)
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(client.call_utility, "keep", large(number))
anyio.run(main, backend={anyio_backend[0]!r})
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        engine = int(program.stdout.readline())
        until_sync(lambda: figures(program.pid)["tensor_descriptors"] >= 15)
        program.kill()
    until_sync(lambda: not is_running(engine), 3)
    assert not [name for name in os.listdir("/dev/shm") if "anyengine" in name]


async def test_cancellation_at_any_moment_of_a_send() -> None:
    """By turns of the loop for what takes no time, and by time for the copy and the wait for the answer."""
    small, big = large(0), large(1, 2**25)
    async with open_engine_client(lane_spec(), max_requests=2, when_full="wait") as client:

        async def call(array: numpy.ndarray) -> None:
            await client.call_utility("digests", [array])

        async def request(array: numpy.ndarray) -> None:
            async with client.open_request(prompt_embeds=array, sampling_params=ONE_TOKEN) as request:
                await request.completion()

        for send in (call, request, lambda array: client.add_request(prompt_embeds=array, sampling_params=ONE_TOKEN)):
            for turns in range(12):
                async with anyio.create_task_group() as group:
                    group.start_soon(send, small)
                    for _ in range(turns):
                        await anyio.lowlevel.checkpoint()
                    group.cancel_scope.cancel()
            for milliseconds in range(0, 40, 2):
                with anyio.move_on_after(milliseconds / 1000):
                    await send(big)
        await until(lambda: client.statistics().live_requests == client.statistics().aborting_requests == 0)
        assert client.statistics().waiting_requests == client.statistics().pending_calls == 0
        assert client._session.admission._held == 0
        completion = await client.generate(prompt_embeds=small, sampling_params=ONE_TOKEN)
        assert completion.token_ids == [first_token(small)]
        await is_free(client)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_native_cancellation_while_a_thread_copies() -> None:
    """The thread goes on for a moment, and writes to nothing that somebody else has got meanwhile."""
    async with open_engine_client(lane_spec()) as client:
        for milliseconds in range(0, 40, 4):
            task = asyncio.create_task(client.call_utility("keep", numpy.full((64, 2**16), -1)))
            await asyncio.sleep(milliseconds / 1000)
            task.cancel()
            arrays = [large(number, 2**25) for number in range(2)]
            assert await client.call_utility("digests", arrays) == [digest(array) for array in arrays]
        await client.call_utility("drop")
        await is_free(client)


async def test_requests_that_fail_in_the_engine_give_their_memory_back() -> None:
    async with open_engine_client(lane_spec(prompts="refuse")) as client:
        for number in range(20):
            with pytest.raises(RequestFailedError, match="no embeddings today"):
                await client.generate(prompt_embeds=large(number), sampling_params=ONE_TOKEN)
        assert passed(client) == 20
        await is_free(client)


async def test_calls_that_are_refused_before_they_are_sent_give_their_memory_back() -> None:
    async with open_engine_client(lane_spec()) as client:
        for _ in range(5):
            with pytest.raises(TypeError, match="cannot travel"):
                await client.call_utility("digests", [large(0), object()])
        assert passed(client) == 0
        assert len(lane_of(client).pool._returned) + len(lane_of(client).pool._idle) == 1


async def test_malformed_messages_leave_no_descriptor_in_the_engine() -> None:
    async with open_engine_client(lane_spec()) as client:
        lane = lane_of(client)
        session = client._session

        def send(items: list[Passed], *message: bytes) -> None:
            assert session.link.identity is not None
            session.endpoints.router.send([session.link.identity, LANE_KIND, encode_passed(items), *message])

        def number() -> int:
            block = lane.pool.take(1000)
            assert block.lend(lane._pass)
            return lane._sent - 1

        before = (await client.call_utility("figures"))["descriptors"]
        send([Passed(0, number(), 4096, 1000, True)], b"\x7f", b"\x80", b"")  # no such kind
        send([Passed(0, number(), 4096, 1000, True)], b"\x03", b"\xff", b"")  # no body
        send([Passed(1, number(), 4096, 1000, True)], b"\x03", b"\x80", b"")  # no such buffer
        send([Passed(0, number(), 0, 1000, True)], b"\x03", b"\x80", b"")  # the block's header
        send([Passed(0, number(), 4096, 5000, True)], b"\x03", b"\x80", b"")  # more than there is
        send([Passed(0, lane._sent, 4096, 1000, True)], b"\x03", b"\x80", b"")  # nothing came
        send([Passed(0, number(), 4096, 1000, True)])  # no message
        number()  # no reference to it
        assert await client.call_utility("digests", [large(0)]) == [digest(large(0))]
        after = await client.call_utility("figures")
        assert (after["descriptors"], after["tensor_mappings"]) == (before, 0)
        assert await client.call_utility("digests", [large(1)]) == [digest(large(1))]


async def test_an_engine_that_is_started_again_has_a_lane_of_its_own() -> None:
    policy = RestartPolicy(limit=3, window=600, backoff=0)
    weights = large(7)
    async with open_engine_client(lane_spec(weights=weights), restart=policy) as client:
        for _ in range(2):
            lane = lane_of(client)
            await client.call_utility("keep", large(0))
            os.kill(client.health().pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await client.wait_dead()
            # Made while nobody is there, and sent to the engine that comes.
            assert await client.call_utility("digests", [large(1)]) == [digest(large(1))]
            assert lane_of(client) is not lane
            assert await client.call_utility("kept") == []
            assert await client.call_utility("weights") == digest(weights)
            assert passed(client) >= 1
            assert figures(os.getpid())["tensor_descriptors"] <= 2  # of this life


async def test_who_waits_for_a_place_holds_no_copy() -> None:
    async with open_engine_client(lane_spec(step_delay=0.01), max_requests=1, when_full="wait") as client:
        async with anyio.create_task_group() as group:
            first = await client.add_request([1])
            for number in range(10):
                group.start_soon(_generate, client, large(number))
            await until(lambda: client.statistics().waiting_requests == 10)
            assert figures(os.getpid())["tensor_descriptors"] == 0
            await client.abort_requests([first])


async def _generate(client: EngineClient, array: numpy.ndarray) -> None:
    assert (await client.generate(prompt_embeds=array, sampling_params=ONE_TOKEN)).token_ids == [first_token(array)]


async def test_a_process_that_the_application_forked_keeps_no_memory_of_engines() -> None:
    gc.collect()  # errors of earlier tests, which keep what their calls had on the way
    async with open_engine_client(lane_spec()) as client:
        arrays = [large(number) for number in range(3)]
        await client.call_utility("digests", arrays)
        await until(lambda: lent(client) == 0)
        await client.call_utility("keep", arrays[0])
        staged = await client._session.stage(arrays[1], [])
        assert figures(os.getpid())["tensor_mappings"] == 3  # one of each: idle, lent, and with an array of ours
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            before = figures(os.getpid())
            has_it = digest(staged) == digest(arrays[1])
            del staged
            after = figures(os.getpid())["tensor_mappings"]
            found = [before["tensor_descriptors"], before["tensor_mappings"], has_it, after]
            os.write(writer, str(found).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(reader, 100) == b"[0, 1, True, 0]"
        os.close(reader)
        os.close(writer)
        del staged
        assert await client.call_utility("digests", [large(1)]) == [digest(large(1))]
