"""Many requests that begin or end at one moment: how long that keeps the event loop from everybody else."""

from __future__ import annotations

import anyio

from anyengine import EngineClient, SamplingParams
from benchmarks.throughput import Countdown
from benchmarks.watch import Watch

_LONG = SamplingParams(max_tokens=2**20)
_SHORT = SamplingParams(max_tokens=1)
_STEP_EVERY = 0.01


async def streams(client: EngineClient, rows: int) -> dict[str, dict[str, float]]:
    """The pauses when ``rows`` streams are opened at once, when one step ends all of them, when it ends all of them and
    each is replaced by another, and when all are aborted at once.
    """
    pid = client.health().pid
    watches = {name: Watch(pid) for name in ("open", "end", "replace", "abort")}
    opened, ended, reopened, replaced, left = (Countdown(rows) for _ in range(5))
    again = anyio.Event()

    async def read(row: int) -> None:
        async with client.open_request([row], _SHORT) as request:
            opened.one()
            async for _ in request:
                pass
        ended.one()
        await again.wait()
        async with client.open_request([row], _SHORT) as request:
            reopened.one()
            async for _ in request:
                pass
        try:
            async with client.open_request([row], _LONG) as request:
                replaced.one()
                async for _ in request:
                    pass
        finally:
            left.one()

    await client.call_utility("hold")
    async with anyio.create_task_group() as readers:
        async with watches["open"]:
            for row in range(rows):
                readers.start_soon(read, row)
            await opened.done.wait()
        async with watches["end"]:
            await client.call_utility("release", _STEP_EVERY, False)
            await ended.done.wait()
        await client.call_utility("hold")
        again.set()
        await reopened.done.wait()
        async with watches["replace"]:
            await client.call_utility("release", _STEP_EVERY, False)
            await replaced.done.wait()
        await client.call_utility("release", _STEP_EVERY, False)  # the engine forgot it when it had no requests
        async with watches["abort"]:
            readers.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await left.done.wait()
    await client.call_utility("release")
    return {name: watch.pauses() for name, watch in watches.items()}
