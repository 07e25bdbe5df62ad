"""How many outputs a second arrive, from the command to the last delivery, every row counted and checked.

The same workload for both rivals: the engine is held while ``rows`` requests are sent, then released, and makes
``steps`` steps in which each request gets one token. Request ``row`` counts up from ``row * SPREAD``. The clock runs
from the call that releases the engine to the delivery of the last row of the last step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import anyio

from anyengine import EngineClient, SamplingParams
from benchmarks.baseline import BaselineClient
from benchmarks.watch import Watch

SPREAD = 100_000
"""Tokens between the prompts of two requests."""

CHECK_EVERY = 97
"""Of so many steps one is kept and checked token by token after the clock has stopped, the others by their last."""

_names = itertools.count()


async def whole_steps(client: EngineClient, rows: int, steps: int) -> dict[str, float]:
    """``get_output`` of anyengine."""
    await client.call_utility("hold")
    params = SamplingParams(max_tokens=steps)
    for row in range(rows):
        await client.add_request([row * SPREAD], params)
    kept: list[tuple[int, Sequence[int]]] = []
    seen = step = 0
    last = (rows - 1) * SPREAD
    watch = Watch(client.health().pid)
    async with watch:
        await client.call_utility("release")
        while seen < rows * steps:
            outputs = await client.get_output()
            step += 1
            seen += len(outputs.handles)
            if outputs.token_ids[-1] != last + step:
                raise AssertionError(f"step {step} ends with token {outputs.token_ids[-1]}")
            if step % CHECK_EVERY == 0:
                kept.append((step, outputs.token_ids))
    for number, tokens in kept:
        _check(number, tokens, rows)
    _check(step, outputs.token_ids, rows)
    if set(outputs.details) != set(range(rows)) or step != steps:
        raise AssertionError(f"{len(outputs.details)} of {rows} requests ended in step {step}")
    return watch.figures(seen)


async def whole_steps_of_baseline(client: BaselineClient, rows: int, steps: int) -> dict[str, float]:
    """``get_output`` of the rival."""
    await client.close_dispatcher()
    await client.call_utility("hold")
    for row in range(rows):
        await client.add_request(f"{next(_names)}", [row * SPREAD], steps)
    kept = []
    seen = step = 0
    last = (rows - 1) * SPREAD
    watch = Watch(client.process.pid)
    async with watch:
        await client.call_utility("release")
        while seen < rows * steps:
            outputs = (await client.get_output()).outputs
            step += 1
            seen += len(outputs)
            if outputs[-1].new_token_ids[-1] != last + step:
                raise AssertionError(f"step {step} ends with token {outputs[-1].new_token_ids[-1]}")
            if step % CHECK_EVERY == 0:
                kept.append((step, outputs))
    for number, earlier in kept:
        _check(number, [token for output in earlier for token in output.new_token_ids], rows)
    _check(step, [token for output in outputs for token in output.new_token_ids], rows)
    if sum(output.finish_reason is not None for output in outputs) != rows or step != steps:
        raise AssertionError(f"not all of {rows} requests ended in step {step}")
    return watch.figures(seen)


def _check(step: int, tokens: Sequence[int], rows: int) -> None:
    if list(tokens) != [row * SPREAD + step for row in range(rows)]:
        raise AssertionError(f"step {step} brought the wrong tokens")


async def streams(client: EngineClient, rows: int, steps: int) -> dict[str, float]:
    """``open_request`` of anyengine, one task per request."""
    await client.call_utility("hold")
    params = SamplingParams(max_tokens=steps)
    entered = Countdown(rows)
    finished = Countdown(rows)

    async def read(row: int) -> None:
        tokens: list[int] = []
        async with client.open_request([row * SPREAD], params) as request:
            entered.one()
            async for output in request:
                tokens += output.token_ids
        finished.one()
        await checked.wait()
        _check_stream(row, tokens, steps)

    checked = anyio.Event()
    watch = Watch(client.health().pid)
    async with anyio.create_task_group() as readers:
        for row in range(rows):
            readers.start_soon(read, row)
        await entered.done.wait()
        async with watch:
            await client.call_utility("release")
            await finished.done.wait()
        checked.set()
    return watch.figures(rows * steps)


async def streams_of_baseline(client: BaselineClient, rows: int, steps: int) -> dict[str, float]:
    """A collector per request of the rival, one task each."""
    await client.call_utility("hold")
    entered = Countdown(rows)
    finished = Countdown(rows)

    async def read(row: int) -> None:
        tokens: list[int] = []
        collector = await client.open_stream(f"{next(_names)}", [row * SPREAD], steps)
        entered.one()
        ended = False
        while not ended:
            for output in await collector.get():
                tokens += output.new_token_ids
                ended = output.finish_reason is not None
        finished.one()
        await checked.wait()
        _check_stream(row, tokens, steps)

    checked = anyio.Event()
    watch = Watch(client.process.pid)
    async with anyio.create_task_group() as readers:
        for row in range(rows):
            readers.start_soon(read, row)
        await entered.done.wait()
        async with watch:
            await client.call_utility("release")
            await finished.done.wait()
        checked.set()
    return watch.figures(rows * steps)


def _check_stream(row: int, tokens: list[int], steps: int) -> None:
    first = row * SPREAD + 1
    if tokens != list(range(first, first + steps)):
        raise AssertionError(f"request {row} got {len(tokens)} tokens, and not the {steps} it should have")


class Countdown:
    """``done`` is set when :meth:`one` has been called ``count`` times."""

    def __init__(self, count: int) -> None:
        self._left = count
        self.done = anyio.Event()

    def one(self) -> None:
        """One of them."""
        self._left -= 1
        if self._left == 0:
            self.done.set()
