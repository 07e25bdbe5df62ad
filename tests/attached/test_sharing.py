"""Several clients share one engine: each gets its own outputs, and none notices when another leaves or dies."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import anyio
import pytest
from tests.attached.hand import Hand
from tests.helpers import until

from anyengine import (
    ConnectionKeys,
    EngineClient,
    EngineDeadError,
    RequestFailedError,
    RestartPolicy,
    SamplingParams,
    ShutdownPolicy,
    UtilityError,
    open_engine_client,
)
from anyengine.testing import scripted_spec

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

FOREVER = SamplingParams(max_tokens=10_000_000)

OTHER = """
import sys, anyio
from anyengine import SamplingParams, open_engine_client

async def main():
    async with open_engine_client(address=sys.argv[1]) as client:
        for _ in range(20):
            await client.add_request([0], SamplingParams(max_tokens=10_000_000))
        await client.get_output()
        print("streaming", flush=True)
        await anyio.sleep(60)

anyio.run(main)
"""


async def generate_many(client: EngineClient, base: int, count: int) -> None:
    async def one(start: int) -> None:
        completion = await client.generate([start], SamplingParams(max_tokens=20))
        assert completion.token_ids == list(range(start + 1, start + 21))

    async with anyio.create_task_group() as group:
        for number in range(count):
            group.start_soon(one, base + 100 * number)


async def test_outputs_go_to_the_client_that_asked(hand: Hand) -> None:
    """With the same handles, since each client counts its own requests, and in every way of reading."""
    hand.start("--connect", hand.address("second"), "--connect", hand.address("third"))
    async with (
        open_engine_client(address=hand.address()) as first,
        open_engine_client(address=hand.address("second")) as second,
        open_engine_client(address=hand.address("third")) as third,
    ):
        async with anyio.create_task_group() as group:
            for base, client in ((0, first), (5000, second), (10000, third)):
                group.start_soon(generate_many, client, base, 30)
        handle = await second.add_request([7], SamplingParams(max_tokens=3))
        assert handle == await first.add_request([9], SamplingParams(max_tokens=3))
        seen: list[int] = []
        while len(seen) < 3:
            seen += (await second.get_output()).token_ids
        assert seen == [8, 9, 10]
        answers = [await client.call_utility("echo", number) for number, client in enumerate((first, second, third))]
        assert answers == [0, 1, 2]


async def test_a_client_can_join_while_the_engine_runs() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.001)) as owner:
        directory = owner._session.endpoints._directory
        assert directory is not None
        address = f"ipc://{directory.path}/second"
        async with owner.open_request([0], FOREVER) as request:
            await anext(request)
            for _ in range(2):
                await owner.connect_client(address)
            for _ in range(3):
                async with open_engine_client(address=address) as second:
                    await generate_many(second, 1000, 5)
                    await second.add_request([0], FOREVER)
                    assert (await anext(request)).token_ids
            await until(lambda: owner.statistics().engine == {"running": 1, "waiting": 0})


async def test_a_client_that_is_killed_has_its_requests_aborted_and_nobody_else_notices(hand: Hand) -> None:
    hand.start("step_delay=0.001", "--connect", hand.address("second"))
    async with open_engine_client(address=hand.address()) as client:
        async with client.open_request([0], FOREVER) as request:
            await anext(request)
            other = subprocess.Popen(
                [sys.executable, "-c", OTHER, hand.address("second")], stdout=subprocess.PIPE, text=True
            )
            with other:
                assert other.stdout is not None
                assert await anyio.to_thread.run_sync(other.stdout.readline) == "streaming\n"
                await until(lambda: client.statistics().engine == {"running": 21, "waiting": 0})
                other.kill()
            await until(lambda: client.statistics().engine == {"running": 1, "waiting": 0})
            tokens = (await anext(request)).token_ids
            later = (await anext(request)).token_ids
            assert later[0] == tokens[-1] + 1
        # Its place is free for the next one.
        async with open_engine_client(address=hand.address("second")) as second:
            await generate_many(second, 0, 3)


async def test_an_abort_and_a_pause_of_one_reach_what_they_should(hand: Hand) -> None:
    hand.start("step_delay=0.001", "--connect", hand.address("second"))
    async with (
        open_engine_client(address=hand.address()) as first,
        open_engine_client(address=hand.address("second")) as second,
    ):
        async with first.open_request([0], FOREVER) as mine, second.open_request([0], FOREVER) as theirs:
            await anext(mine)
            await anext(theirs)
            handle = await second.add_request([5], FOREVER)
            await second.abort_requests([handle])
            assert (await anext(mine)).token_ids
            # A pause is the engine's: it ends the requests of all clients, and each is told of its own.
            await first.pause_scheduler("abort")
            for request in (mine, theirs):
                last = [output async for output in request][-1]
                assert last.finish_reason == "abort"
            assert await second.is_scheduler_paused()
            await second.resume_scheduler()
        await generate_many(first, 0, 3)
        await generate_many(second, 0, 3)


async def test_a_pause_ends_with_the_client_that_made_it(hand: Hand) -> None:
    hand.start("step_delay=0.001", "--connect", hand.address("second"))
    async with open_engine_client(address=hand.address()) as client:
        for method in ("pause_scheduler", "sleep"):
            async with open_engine_client(address=hand.address("second")) as second:
                await second.call_utility(method)
                assert await client.is_scheduler_paused()
            with anyio.fail_after(20):
                await generate_many(client, 0, 2)
            assert not await client.is_sleeping()


async def test_what_is_wrong_with_a_guest_ends_neither_the_engine_nor_the_owner(hand: Hand) -> None:
    async with open_engine_client(scripted_spec(step_delay=0.001)) as owner:
        await owner.connect_client(hand.address())
        with pytest.raises(EngineDeadError):
            async with open_engine_client(address=hand.address()) as guest:
                session = guest._session
                assert session.link.identity is not None
                # Counted by the guest, refused by the engine: for the engine a message is missing at the next PING.
                session.link.machine._sent += 1
                await guest.wait_dead()
        assert await owner.call_utility("echo", 1) == 1
        async with open_engine_client(address=hand.address()) as guest:
            await generate_many(guest, 0, 3)
            session = guest._session
            session.link.machine._handles = iter([2**60])
            with pytest.raises(RequestFailedError, match="56 bits"):
                await guest.generate([0])


async def test_an_owner_that_drains_waits_for_its_own_requests_only(hand: Hand) -> None:
    policy = ShutdownPolicy(mode="drain", drain_limit=60)
    async with anyio.create_task_group() as group:
        with anyio.fail_after(20):
            async with open_engine_client(scripted_spec(step_delay=0.001), shutdown=policy) as owner:
                await owner.connect_client(hand.address())

                async def share(*, task_status: Any) -> None:
                    async with open_engine_client(address=hand.address()) as guest:
                        async with guest.open_request([0], FOREVER) as request:
                            await anext(request)
                            task_status.started()
                            assert [output async for output in request][-1].finish_reason == "abort"
                        with pytest.raises(EngineDeadError, match="goodbye"):
                            await guest.wait_dead()

                await group.start(share)


async def test_the_owner_takes_the_engine_along() -> None:
    async with anyio.create_task_group() as group:
        errors: list[EngineDeadError] = []

        async def share(address: str, *, task_status: Any) -> None:
            with pytest.raises(EngineDeadError) as caught:
                async with open_engine_client(address=address) as second:
                    await second.generate([0], SamplingParams(max_tokens=1))
                    task_status.started()
                    assert (await second.generate([0], FOREVER)).finish_reason == "abort"
                    await second.wait_dead()
            errors.append(caught.value)

        async with open_engine_client(scripted_spec(step_delay=0.001)) as owner:
            directory = owner._session.endpoints._directory
            assert directory is not None
            address = f"ipc://{directory.path}/second"
            await owner.connect_client(address)
            await group.start(share, address)
    assert "it said goodbye" in str(errors[0])


async def test_an_engine_that_is_started_again_comes_back_to_the_clients_that_shared_it(hand: Hand) -> None:
    restart = RestartPolicy(limit=2, window=600, backoff=0)
    async with (
        open_engine_client(scripted_spec(step_delay=0.001), restart=restart) as owner,
        anyio.create_task_group() as group,
    ):
        joined = anyio.Event()
        pids: list[int] = []

        async def share() -> None:
            async with open_engine_client(address=hand.address(), restart=restart) as guest:
                for _ in range(2):
                    pids.append(guest.health().pid)
                    joined.set()
                    with pytest.raises(EngineDeadError):
                        await guest.generate([0], FOREVER)
                    await guest.generate([0], SamplingParams(max_tokens=1))

        group.start_soon(share)
        await owner.connect_client(hand.address())
        for _ in range(2):
            await joined.wait()
            joined = anyio.Event()
            os.kill(owner.health().pid, signal.SIGKILL)
        with anyio.fail_after(30):
            await until(lambda: len(pids) == 2)
    assert len(set(pids)) == 2


async def test_a_restarted_engine_that_cannot_come_back_to_a_client_serves_the_others(
    tmp_path: pathlib.Path, hand: Hand, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    ConnectionKeys.generate().save(keys)
    restart = RestartPolicy(limit=2, window=600, backoff=0)
    async with open_engine_client(scripted_spec(), restart=restart) as owner:
        await owner.connect_client(hand.address(), keys=keys)
        keys.unlink()
        os.kill(owner.health().pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await owner.wait_dead()
        assert (await owner.generate([0], SamplingParams(max_tokens=1))).token_ids == [1]
    assert f"the client at {hand.address()} does not share the restarted engine" in caplog.text
    assert "keys" in caplog.text


async def test_death_reaches_all_clients(hand: Hand) -> None:
    engine = hand.start("step_delay=0.001", "--connect", hand.address("second"))
    async with (
        open_engine_client(address=hand.address()) as first,
        open_engine_client(address=hand.address("second")) as second,
    ):
        await first.call_utility("echo", 1)
        engine.send_signal(signal.SIGKILL)
        for client in (first, second):
            with anyio.fail_after(10), pytest.raises(EngineDeadError):
                await client.generate([0], FOREVER)


async def test_bad_addresses_are_refused_by_name() -> None:
    async with open_engine_client(scripted_spec()) as client:
        for address, message in (
            ("tcp://127.0.0.1:5", "need keys"),
            ("nowhere", "expected tcp"),
            (5, "expected a string"),
        ):
            with pytest.raises(UtilityError, match=message):
                await client.connect_client(address)  # type: ignore[arg-type]
        with pytest.raises(UtilityError, match="cannot be read"):
            await client.connect_client("tcp://127.0.0.1:5", keys="/no/such/file")
        assert await client.call_utility("echo", 1) == 1
