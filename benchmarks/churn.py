"""Requests that come and go at the pace of an engine: what an output costs the client, and how long its loop is held.

``rows`` requests of some :data:`TOKENS` tokens run at a time, the engine makes ``rate`` steps a second, and each
request that ends is replaced by a new one at once. The ends are spread over the steps, from the first step on. Every
request has to end with its own last token.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio

from anyengine import EngineClient, SamplingParams
from benchmarks.baseline import BaselineClient
from benchmarks.throughput import Countdown
from benchmarks.watch import Watch

TOKENS = 64
"""Tokens of a request, on average."""

_SHORTER = 32
"""By how many tokens a request may be shorter than the average, or longer."""

names = itertools.count()
"""For the requests of rivals."""


class Churn:
    """The requests of one measurement.

    ``seen`` counts the outputs that the contestant has taken. When it is ``over``, no request is replaced any more.
    """

    def __init__(self, rows: int, rate: float, steps: int) -> None:
        self.over = False
        self.seen = 0
        self.rows, self.rate = rows, rate
        self._steps = steps
        self._requests = self._draw()
        self._begun = Countdown(rows)

    def next(self) -> tuple[int, int]:
        """The token of the next request's prompt, and how many tokens it gets."""
        return next(self._requests)

    def _draw(self) -> Iterator[tuple[int, int]]:
        source = random.Random(self.rows)
        for number in itertools.count():
            length = source.randint(TOKENS - _SHORTER, TOKENS + _SHORTER)
            if number < self.rows:  # these are found somewhere on their way
                length = source.randint(1, length)
            yield number % 1000, length

    def begun(self) -> None:
        """One request has been sent."""
        self._begun.one()

    async def all_begun(self) -> None:
        """Return when as many requests have been sent as are to run at a time."""
        await self._begun.done.wait()

    async def measure(self, engine_pid: int, run: Callable[[int], Awaitable[object]]) -> dict[str, float]:
        """``run`` takes the outputs of a number of steps: the CPU time for each output, and the loop's longest pauses.

        One after the other: looking at the loop each millisecond would cost more than the outputs do.
        """
        watch = Watch(engine_pid, looks=False)
        async with watch:
            before = self.seen
            await run(self._steps)
            outputs = self.seen - before
        figures = watch.figures(outputs)
        watch = Watch(engine_pid)
        async with watch:
            await run(self._steps)
        return {"cpu_us_per_output": figures["cpu_us_per_output"], **watch.pauses()}

    async def sleep(self, steps: int) -> None:
        """Wait while the engine makes ``steps`` steps."""
        await anyio.sleep(steps / self.rate)


def check_last(token: int, first: int, length: int) -> None:
    """:raises AssertionError: if ``token`` is not the last one of a request"""
    if token != first + length:
        raise AssertionError(f"a request of {length} tokens after {first} ends with token {token}")


# ---- whole steps ----


async def whole_steps(client: EngineClient, rows: int, rate: float, steps: int) -> dict[str, float]:
    """``get_output`` of anyengine."""
    churn = Churn(rows, rate, steps)
    live: dict[int, tuple[int, int]] = {}

    async def add() -> None:
        first, length = churn.next()
        handle = await client.add_request([first], SamplingParams(max_tokens=length))
        live[handle] = first, length

    async def take() -> None:
        outputs = await client.get_output()
        churn.seen += len(outputs.handles)
        for row, details in outputs.details.items():
            if details.finish_reason is not None:
                check_last(outputs.token_ids[row], *live.pop(outputs.handles[row]))
                if not churn.over:
                    await add()

    return await _steps_of(client, client.health().pid, churn, live, add, take)


async def whole_steps_of_baseline(client: BaselineClient, rows: int, rate: float, steps: int) -> dict[str, float]:
    """``get_output`` of the rival."""
    await client.close_dispatcher()
    churn = Churn(rows, rate, steps)
    live: dict[str, tuple[int, int]] = {}

    async def add() -> None:
        first, length = churn.next()
        name = f"churn-{next(names)}"
        await client.add_request(name, [first], length)
        live[name] = first, length

    async def take() -> None:
        outputs = (await client.get_output()).outputs
        churn.seen += len(outputs)
        for output in outputs:
            if output.finish_reason is not None:
                check_last(output.new_token_ids[-1], *live.pop(output.request_id))
                if not churn.over:
                    await add()

    return await _steps_of(client, client.process.pid, churn, live, add, take)


async def _steps_of(
    client: Any,
    engine_pid: int,
    churn: Churn,
    live: dict[Any, Any],
    add: Callable[[], Awaitable[None]],
    take: Callable[[], Awaitable[None]],
) -> dict[str, float]:
    async def run(count: int) -> None:
        for _ in range(count):
            await take()

    await client.call_utility("hold")
    for _ in range(churn.rows):
        await add()
    await client.call_utility("release", 1 / churn.rate, False)
    figures = await churn.measure(engine_pid, run)
    churn.over = True
    await client.call_utility("release")
    while live:
        await take()
    return figures


# ---- streams ----


async def streams(client: EngineClient, rows: int, rate: float, steps: int) -> dict[str, float]:
    """``open_request`` of anyengine, ``rows`` tasks that open one request after the other."""

    async def read(churn: Churn) -> None:
        while not churn.over:
            token, (first, length) = -1, churn.next()
            async with client.open_request([first], SamplingParams(max_tokens=length)) as request:
                churn.begun()
                async for output in request:
                    churn.seen += len(output.token_ids)
                    token = output.token_ids[-1]
            check_last(token, first, length)

    return await streams_of(client.call_utility, client.health().pid, read, rows, rate, steps)


async def streams_of_baseline(client: BaselineClient, rows: int, rate: float, steps: int) -> dict[str, float]:
    """A collector per request of the rival."""

    async def read(churn: Churn) -> None:
        while not churn.over:
            token, (first, length) = -1, churn.next()
            collector = await client.open_stream(f"churn-{next(names)}", [first], length)
            churn.begun()
            ended = False
            while not ended:
                for output in await collector.get():
                    churn.seen += len(output.new_token_ids)
                    token = output.new_token_ids[-1]
                    ended = output.finish_reason is not None
            check_last(token, first, length)

    return await streams_of(client.call_utility, client.process.pid, read, rows, rate, steps)


async def streams_of(
    call_utility: Callable[..., Awaitable[Any]],
    engine_pid: int,
    read: Callable[[Churn], Awaitable[None]],
    rows: int,
    rate: float,
    steps: int,
) -> dict[str, float]:
    """Run ``rows`` tasks that ``read`` one request after the other."""
    churn = Churn(rows, rate, steps)
    await call_utility("hold")
    async with anyio.create_task_group() as readers:
        for _ in range(rows):
            readers.start_soon(read, churn)
        await churn.all_begun()
        await call_utility("release", 1 / rate, False)
        figures = await churn.measure(engine_pid, churn.sleep)
        churn.over = True
        await call_utility("release")
    return figures
