"""``SyncEngineClient``: the client as blocking calls."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NoReturn, TypeVar, Unpack

from anyengine.brief import brief
from anyengine.client.checks import (
    check_count,
    check_handles,
    check_options,
    check_sampling,
    check_seconds,
)
from anyengine.client.engine_client import EngineClient, session_of
from anyengine.client.prompts import check_prompt
from anyengine.client.request_group import IndexedResult, RequestGroup
from anyengine.client.session import HEALTH_TIMEOUT
from anyengine.client.waiters import without_rows
from anyengine.errors import EngineClosedError, RequestRefusedError
from anyengine.lengths import token_limit
from anyengine.params import PoolingParams, RequestKeywords, SamplingParams
from anyengine.protocol.outputs import StepOutputs
from anyengine.sync_client.handover import StepHandover, StepSubscription
from anyengine.sync_client.many import OneRequest, generate_many
from anyengine.sync_client.portal import Portal
from anyengine.sync_client.sync_request_stream import SyncRequestStream
from anyengine.types import ClientStatistics, Completion, EngineInfo, Health
from anyengine.utilities import BlockingEngineUtilities

_DEFAULT_SAMPLING = SamplingParams()
_DEFAULT_POOLING = PoolingParams()
T = TypeVar("T")


class SyncEngineClient(BlockingEngineUtilities):
    """An :class:`EngineClient` whose calls block. ``open_sync_engine_client`` makes it and owns what runs behind it.

    Every call ends: with a value, with an error, or with the KeyboardInterrupt that came meanwhile, which aborts the
    call's requests in the engine. After the engine's death each call that blocks or comes gets
    :class:`EngineDeadError`, after the client's block :class:`EngineClosedError`. Any thread may use it, several at a
    time too, except the one that serves it, in which ``on_progress`` and some finalizers run: there, calls that would
    wait for themselves raise RuntimeError.
    """

    def __init__(self, portal: Portal[EngineClient], client: EngineClient) -> None:
        self._portal = portal
        self._client = client
        self._session = session_of(client)
        self._steps: StepHandover = StepHandover()
        self._subscription: StepSubscription | None = None
        self._subscribing = threading.Lock()

    # ---- looking ----

    @property
    def info(self) -> EngineInfo:
        """What the engine said of itself at READY."""
        return self._client.info

    def health(self, timeout: float = HEALTH_TIMEOUT) -> Health:
        """Whether the engine is alive, unresponsive, closing, closed, dead or being restarted, as last heard of it.

        :raises TypeError: if ``timeout`` is not a number
        :raises ValueError: if ``timeout`` is not a positive number
        """
        return self._look(functools.partial(self._client.health, timeout))

    def statistics(self) -> ClientStatistics:
        """What the client holds right now; every count is zero when nothing runs."""
        statistics = self._look(self._client.statistics)
        return dataclasses.replace(statistics, unread_outputs=statistics.unread_outputs + len(self._steps))

    def _look(self, function: Callable[[], T]) -> T:
        """What ``function`` sees in the loop's thread, or when the loop is gone and nothing moves any more."""
        if not self._portal.is_own_thread:
            with contextlib.suppress(EngineClosedError):
                return self._portal.call_now(function)
        return function()

    def wait_dead(self, timeout: float | None = None) -> NoReturn:
        """Wait for the engine's death.

        :param timeout: seconds to wait; None waits as long as the engine lives
        :raises EngineDeadError: when the engine dies
        :raises EngineClosedError: when the client is closed
        :raises TimeoutError: if the engine lives on for so long
        """
        if timeout is not None:
            check_seconds("timeout", timeout)

        async def wait() -> None:
            with self._session.limits.within(timeout):
                await self._client.wait_dead()

        self._portal.call(wait)
        raise TimeoutError(f"the engine has not died within {timeout} s")

    # ---- requests ----

    def stream(
        self,
        prompt_token_ids: Sequence[int] | None = None,
        sampling_params: SamplingParams = _DEFAULT_SAMPLING,
        *,
        prompt_embeds: Any = None,
        request_id: str | None = None,
        stall_limit: float | None = None,
        **options: Unpack[RequestKeywords],
    ) -> SyncRequestStream:
        """One request, as a context manager that iterates over its outputs.

        Parameters and errors as :meth:`EngineClient.open_request`.
        """
        opened = self._portal.call_now(
            lambda: self._client.open_request(
                prompt_token_ids,
                sampling_params,
                prompt_embeds=prompt_embeds,
                request_id=request_id,
                stall_limit=stall_limit,
                **options,
            )
        )
        return SyncRequestStream(self._portal, opened)

    def generate(
        self,
        prompt_token_ids: Sequence[int] | None = None,
        sampling_params: SamplingParams = _DEFAULT_SAMPLING,
        *,
        prompt_embeds: Any = None,
        request_id: str | None = None,
        stall_limit: float | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Completion:
        """One request to its end. Parameters and errors as :meth:`EngineClient.generate`."""
        prompt = check_prompt(prompt_token_ids, prompt_embeds, self.info)
        if prompt is not None and request_id is stall_limit is None and "features" not in options:
            checked = check_options(self.info, options)
            sampling = check_sampling(sampling_params, self.info)
            token_limit(sampling, len(prompt), self.info.max_model_len)
            request = OneRequest(self._session, prompt, sampling, checked)
            if (completion := request(self._portal)) is not None:
                return completion
        return self._portal.call(
            lambda: self._client.generate(
                prompt_token_ids,
                sampling_params,
                prompt_embeds=prompt_embeds,
                request_id=request_id,
                stall_limit=stall_limit,
                **options,
            )
        )

    def encode(
        self,
        prompt_token_ids: Sequence[int] | None = None,
        pooling_params: PoolingParams = _DEFAULT_POOLING,
        *,
        prompt_embeds: Any = None,
        request_id: str | None = None,
        stall_limit: float | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Completion:
        """The pooled vector or scores of one prompt. Parameters and errors as :meth:`EngineClient.encode`."""
        return self._portal.call(
            lambda: self._client.encode(
                prompt_token_ids,
                pooling_params,
                prompt_embeds=prompt_embeds,
                request_id=request_id,
                stall_limit=stall_limit,
                **options,
            )
        )

    def generate_many(
        self,
        prompts: Iterable[Sequence[int]],
        sampling_params: SamplingParams = _DEFAULT_SAMPLING,
        *,
        max_concurrency: int = 256,
        **options: Unpack[RequestKeywords],
    ) -> Generator[IndexedResult]:
        """Many requests, each to its end: pairs of a prompt's index and its completion, in the order of completion.

        A request that is refused or fails gives its :class:`RequestError` in place of the completion, and the others go
        on. Prompts are taken from ``prompts`` in the calling thread, a few times ``max_concurrency`` ahead of the
        results, so that a generator may read them from a file. Ending the iteration early, however that happens, aborts
        what runs.

        :param prompts: each prompt as token ids (u32)
        :param max_concurrency: requests that are under way at a time; more than the client's ``max_requests`` are
            refused, unless they are to wait
        :param options: what else each request asks for, see :class:`RequestKeywords`
        :raises TypeError: if an argument has the wrong type; while iterating, if a prompt has
        :raises ValueError: if ``max_concurrency`` is below 1
        :raises RequestRefusedError: if the engine does not support a sampling parameter or an option
        :raises EngineDeadError: if the engine is dead; while iterating, if it dies, after all results from before
        :raises EngineClosedError: if the client is closed, before or meanwhile
        """
        check_count("max_concurrency", max_concurrency)
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
            raise TypeError(f"prompts={brief(prompts)} ({type(prompts).__name__}): expected an iterable of token ids")
        checked = check_options(self.info, options)
        sampling = check_sampling(sampling_params, self.info)
        if checked.features:
            raise RequestRefusedError("features have their places in one prompt: use generate() or stream()")
        group = self._portal.call_now(
            functools.partial(RequestGroup, self._session, sampling, checked, max_concurrency)
        )
        return generate_many(self._portal, group, self.info, sampling, iter(prompts), max_concurrency)

    def add_request(
        self,
        prompt_token_ids: Sequence[int] | None = None,
        sampling_params: SamplingParams = _DEFAULT_SAMPLING,
        *,
        prompt_embeds: Any = None,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestKeywords],
    ) -> int:
        """One request for a caller with a dispatcher of its own; returns its handle, by which ``get_output`` names it.

        The caller must abort what it does not want any more. Parameters and errors as :meth:`EngineClient.add_request`.
        """
        return self._portal.call(
            lambda: self._client.add_request(
                prompt_token_ids,
                sampling_params,
                prompt_embeds=prompt_embeds,
                pooling_params=pooling_params,
                request_id=request_id,
                **options,
            ),
            undo=lambda handle: self._abort([handle]),
        )

    def abort_requests(self, handles: Iterable[int]) -> None:
        """Abort requests made by :meth:`add_request`; nothing of them comes after that.

        Those that have ended, or never were, are ignored.

        :raises TypeError: if ``handles`` does not hold integers
        :raises EngineDeadError: if the engine is dead
        :raises EngineClosedError: if the client is closed
        """
        own = check_handles(handles)
        self._portal.finish(lambda: self._abort(own))

    async def _abort(self, handles: Sequence[int]) -> None:
        await self._client.abort_requests(handles)
        # What is left in the client's queue is of requests that had ended: it goes the same way as what has crossed.
        self._steps.extend(self._client.get_outputs_nowait())
        self._steps.replace(functools.partial(without_rows, set(handles)))

    def get_output(self) -> StepOutputs:
        """The next step's outputs for requests made by :meth:`add_request`, in columns.

        Nothing of a request comes after it was aborted, and no step is lost by an interrupt. Any number of threads may
        take steps, but one at a time may wait here.

        :raises EngineDeadError: if the engine is dead and everything it sent has been read
        :raises EngineClosedError: if the client is closed
        :raises anyio.BusyResourceError: if another thread waits
        """
        self._portal.check_open()
        while (step := self._steps.take()) is None:
            if self._session.restarted is None:
                self._subscribe()
                self._steps.wait()
            else:
                self._portal.call(self._fetch_steps)
        return step

    def _subscribe(self) -> None:
        self._portal.check_thread()
        with self._subscribing:
            earlier = self._subscription
            if earlier is None or earlier.is_over:
                self._subscription = StepSubscription(self._session, self._steps)
                self._portal.subscribe(self._subscription, earlier)

    async def _fetch_steps(self) -> None:
        step = await self._client.get_output()
        # No await from here: a step that was taken is handed over, whoever is interrupted.
        self._steps.extend([step, *self._client.get_outputs_nowait()])

    # ---- utilities ----

    def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a method that the engine marks ``@utility``; returns what it returned.

        Parameters and errors as :meth:`EngineClient.call_utility`.
        """
        return self._portal.call(lambda: self._client.call_utility(method, *args, timeout=timeout))

    def connect_client(self, address: str, *, keys: str | os.PathLike[str] | None = None) -> None:
        """Let another client share this engine. Parameters and errors as :meth:`EngineClient.connect_client`."""
        self._portal.call(lambda: self._client.connect_client(address, keys=keys))
