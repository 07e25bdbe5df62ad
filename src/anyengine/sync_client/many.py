"""Many requests at once for a caller without an event loop, whose prompts and results cross in batches."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from anyengine.client.prompts import check_prompt
from anyengine.client.request_group import IndexedResult, RequestGroup
from anyengine.client.session import EngineSession
from anyengine.errors import RequestError
from anyengine.lengths import token_limit
from anyengine.params import RequestOptions, SamplingParams
from anyengine.sync_client.portal import Portal
from anyengine.sync_client.portal_call import PortalCall, PortalWait, TakeBack
from anyengine.types import Completion, EngineInfo


class GroupExchange:
    """Hands prompts to a group and results to the caller, in batches and without a task.

    :param info: what the engine said of itself
    :param sampling: how each request is sampled
    """

    def __init__(self, portal: Portal[Any], group: RequestGroup, info: EngineInfo, sampling: SamplingParams) -> None:
        self._portal = portal
        self._group = group
        self._info = info
        self._sampling = sampling
        self._results: list[IndexedResult] = []
        self._refused: list[IndexedResult] = []

    def send(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Send more requests, without waiting for anything.

        :raises TypeError: if a prompt is none
        """
        checked = [(index, tokens) for index, prompt in prompts if (tokens := self._check(index, prompt)) is not None]
        if checked:
            self._portal.loop.post(functools.partial(self._group.add, checked))

    def receive(self) -> list[IndexedResult]:
        """The results that have come since the last time, as a rule one at least.

        :raises EngineDeadError: if the engine died, after all results from before
        :raises EngineClosedError: if the client was closed
        """
        if not self._refused:
            self._portal.wait(self._listen)
        results = [*self._refused, *self._results]
        self._refused, self._results = [], []
        return results

    def _check(self, index: int, prompt: Sequence[int]) -> Sequence[int] | None:
        try:
            tokens = check_prompt(prompt, None, self._info)
            if tokens is not None:
                token_limit(self._sampling, len(tokens), self._info.max_model_len)
            return tokens
        except RequestError as error:
            self._refused.append((index, error))
            return None

    # ---- in the loop's thread ----

    def _listen(self, wait: PortalWait) -> TakeBack:
        self._group.listen(functools.partial(_collect, self._group, self._results, wait))
        return self._stop_listening

    def _stop_listening(self, then: Callable[[], object]) -> None:
        self._group.stop_listening()
        then()


class OneRequest:
    """One request that is wanted as a whole, sent and awaited in one crossing and without a task."""

    def __init__(
        self, session: EngineSession, prompt: Sequence[int], sampling: SamplingParams, options: RequestOptions
    ) -> None:
        self._session = session
        self._request = prompt, sampling, options
        self._results: list[IndexedResult] = []

    def __call__(self, portal: Portal[Any]) -> Completion | None:
        """What came of it; None if it could not be sent at once.

        :raises RequestError: if the engine refused or failed it
        :raises EngineDeadError: if the engine is dead, or dies first
        :raises EngineClosedError: if the client is closed, before or meanwhile
        """
        portal.wait(self._listen)
        if not self._results:
            return None
        _, result = self._results.pop()
        try:
            if isinstance(result, RequestError):
                raise result
            return result
        finally:
            del result  # its traceback holds this frame

    def _listen(self, wait: PortalWait) -> TakeBack:
        prompt, sampling, options = self._request
        group = RequestGroup(self._session, sampling, options, 1)
        self._session.check_open()
        if self._session.takes_requests_now:
            group.add([(0, prompt)])
            group.listen(functools.partial(_collect, group, self._results, wait))
        else:
            wait.finish()
        return functools.partial(_give_up, group)


def _give_up(group: RequestGroup, then: Callable[[], object]) -> None:
    group.stop_listening()
    group.abort(then)


def _collect(group: RequestGroup, results: list[IndexedResult], wait: PortalWait) -> None:
    """Move what has come of a group to ``results``, in the loop's thread, and let the caller go on."""
    try:
        results += group.results()
    except Exception as error:  # whatever it is, it belongs to the caller and not to the client's reader
        wait.fail(error)
    else:
        wait.finish()


def generate_many(
    portal: Portal[Any],
    group: RequestGroup,
    info: EngineInfo,
    sampling: SamplingParams,
    prompts: Iterator[Sequence[int]],
    max_concurrency: int,
) -> Generator[IndexedResult]:
    """The results of ``prompts`` as they come.

    The group is given at most twice as many as it may have under way, so that the end of one request is the start of
    the next.
    """
    exchange = GroupExchange(portal, group, info, sampling)
    numbered = enumerate(prompts)
    task: PortalCall[object] = PortalCall(group.run, None)
    try:
        portal.start(task)
        given = _give_more(exchange, numbered, 2 * max_concurrency)
        while given:
            results = exchange.receive()
            given -= len(results)
            try:
                # Before the results are looked at, which may take long.
                given += _give_more(exchange, numbered, 2 * max_concurrency - given)
            except BaseException:
                yield from results  # what went wrong with the prompts comes after what there is already
                raise
            yield from results
    finally:
        portal.abandon(task)
        portal.loop.post_surely(group.abort)  # if the task was ended before its first turn


def _give_more(exchange: GroupExchange, numbered: Iterator[tuple[int, Sequence[int]]], limit: int) -> int:
    batch = list(itertools.islice(numbered, limit))
    exchange.send(batch)
    return len(batch)
