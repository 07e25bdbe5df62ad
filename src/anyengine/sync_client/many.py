"""Many requests at once for a caller without an event loop: one task group, whose results cross in batches."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Generator, Iterator, Sequence

import anyio

from anyengine.client.engine_client import EngineClient
from anyengine.errors import RequestError
from anyengine.sync_client.portal import Portal
from anyengine.types import Completion, SamplingParams

IndexedResult = tuple[int, Completion | RequestError]
"""The place of a prompt among the prompts, and what came of it."""


class RequestGroup:
    """Requests that run side by side in the loop. Made, and used but for its construction, in the loop's thread."""

    def __init__(self, client: EngineClient, sampling: SamplingParams) -> None:
        self._client = client
        self._sampling = sampling
        self._results: list[IndexedResult] = []
        self._error: Exception | None = None
        self._started = anyio.Event()
        self._arrival = anyio.Event()

    async def run(self) -> None:
        """Hold the task group of the requests; cancelling this aborts those that run."""
        async with anyio.create_task_group() as self._group:
            self._started.set()
            await anyio.sleep_forever()

    async def exchange(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[IndexedResult]:
        """Send more requests, and return the results that have come since the last time, one at least.

        :raises EngineDeadError: if the engine died, after all results from before
        :raises EngineClosedError: if the client was closed
        """
        await self._started.wait()
        for index, prompt in prompts:
            self._group.start_soon(self._generate, index, prompt)
        if not self._results and self._error is None:
            self._arrival = anyio.Event()
            await self._arrival.wait()
        results, self._results = self._results, []
        if not results and self._error is not None:
            raise self._error
        return results

    async def _generate(self, index: int, prompt: Sequence[int]) -> None:
        try:
            result = await self._generate_or_fail(prompt)
        except Exception as error:  # the engine died, the client was closed, or the prompt is of a wrong type
            if self._error is None:
                self._error = error
        else:
            self._results.append((index, result))
        self._arrival.set()

    async def _generate_or_fail(self, prompt: Sequence[int]) -> Completion | RequestError:
        try:
            return await self._client.generate(prompt, self._sampling)
        except RequestError as error:
            return error


def generate_many(
    portal: Portal[EngineClient], group: RequestGroup, prompts: Iterator[Sequence[int]], max_concurrency: int
) -> Generator[IndexedResult]:
    """The results of ``prompts`` as they come. Prompts are taken from their iterator when there is room for them."""
    numbered = enumerate(prompts)
    running = 0
    task = portal.start(group.run)
    try:
        while True:
            batch = list(itertools.islice(numbered, max_concurrency - running))
            running += len(batch)
            if not running:
                return
            results = portal.call(functools.partial(group.exchange, batch))
            running -= len(results)
            yield from results
    finally:
        portal.abandon(task)
