"""``EngineClient``: what the application holds while its engine runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Unpack

from anyio.lowlevel import cancel_shielded_checkpoint, checkpoint, checkpoint_if_cancelled

from anyengine.client.checks import (
    check_features,
    check_handles,
    check_options,
    check_pooling,
    check_request_id,
    check_sampling,
    check_seconds,
)
from anyengine.client.prompts import LongPrompt, accept_prompt
from anyengine.client.request_stream import RequestStream
from anyengine.client.session import HEALTH_TIMEOUT, EngineSession
from anyengine.client.utility_calls import call_utility
from anyengine.errors import EngineError
from anyengine.lengths import token_limit
from anyengine.params import PoolingParams, RequestKeywords, RequestOptions, SamplingParams
from anyengine.protocol.outputs import StepOutputs
from anyengine.types import ClientStatistics, Completion, EngineInfo, Health
from anyengine.utilities import EngineUtilities

_DEFAULT_SAMPLING = SamplingParams()
_DEFAULT_POOLING = PoolingParams()


class EngineClient(EngineUtilities):
    """One engine, wherever it runs. ``open_engine_client`` makes it and owns what runs behind it.

    Every await ends: with a value, with an error, or with cancellation. After the engine's death each call and each
    waiter gets :class:`EngineDeadError`, after the client's block :class:`EngineClosedError`. It belongs to the event
    loop that opened it: from another thread or loop, calls raise RuntimeError. ``info``, :meth:`health` and
    :meth:`statistics` may be called from any thread. In a process that was forked from the client's, all but ``info``
    raise :class:`EngineClosedError`, and leaving a block leaves the engine alone.
    """

    def __init__(self, session: EngineSession) -> None:
        self._session = session

    # ---- looking ----

    @property
    def info(self) -> EngineInfo:
        """What the engine said of itself at READY."""
        assert self._session.link.info is not None
        return self._session.link.info

    def health(self, timeout: float = HEALTH_TIMEOUT) -> Health:
        """Whether the engine is alive, unresponsive, restarting, closing, closed or dead; never blocks.

        It is unresponsive when it has not answered for ``timeout`` seconds, or has requests, is not paused, and made
        no step for as long. That is not death: a long step or a stopped process may go on. The engine is asked twice a
        second, so an answer is that much older than the truth at most.

        :raises TypeError: if ``timeout`` is not a number
        :raises ValueError: if ``timeout`` is not a positive number
        """
        check_seconds("timeout", timeout)
        self._session.belonging.require_process()
        return self._session.health(timeout)

    def statistics(self) -> ClientStatistics:
        """What the client holds right now; every count is zero when nothing runs."""
        self._session.belonging.require_process()
        machine = self._session.link.machine
        return ClientStatistics(
            live_requests=len(machine.requests),
            aborting_requests=len(machine.aborting),
            pending_calls=len(machine.calls),
            unread_outputs=len(self._session.queue),
            waiting_requests=self._session.admission.waiting,
            tracked_buffers=self._session.tracked_buffers,
            engine=dict(self._session.link.engine_figures),
        )

    async def wait_dead(self) -> NoReturn:
        """Wait for the engine's death. Start it in a task group to have a death end the group.

        :raises EngineDeadError: when the engine dies
        :raises EngineClosedError: when the client is closed
        """
        self._session.belonging.require()
        await self._session.link.ended.wait()
        await checkpoint()
        raise self._session.told(self._session.ending_error())

    # ---- requests ----

    def open_request(
        self,
        prompt_token_ids: Sequence[int] | None = None,
        sampling_params: SamplingParams = _DEFAULT_SAMPLING,
        *,
        prompt_embeds: Any = None,
        request_id: str | None = None,
        stall_limit: float | None = None,
        **options: Unpack[RequestKeywords],
    ) -> RequestStream:
        """One request, as an async context manager that iterates over its outputs.

        :param prompt_token_ids: the prompt as token ids (u32); the call copies it. If there are more than 16,384, they
            are checked when the request is entered, while other tasks run, and that raises what is wrong with one
        :param prompt_embeds: the prompt as a torch tensor or numpy array of shape [tokens, hidden size] instead. It may
            be changed once the request is entered; only a tensor in torch's shared memory, of which no copy is made,
            must stay as it is until the request has ended
        :param request_id: a name for logs and errors, free again when the request has ended; made up if None
        :param stall_limit: seconds after which a request of which nothing comes fails with ``RequestStalledError``; the
            time that it waits in the engine counts
        :param options: what else the request asks for, see :class:`RequestKeywords`
        :raises TypeError: if an argument has the wrong type
        :raises ValueError: if ``stall_limit`` is not a positive number
        :raises RequestRefusedError: if the prompt is empty or holds an impossible token id, if ``max_tokens`` does not
            fit beside it (``client.info.max_model_len``), if a feature has no place in it, if a live request has the
            same id, or if the engine does not support a sampling parameter or an option
        :raises TooManyRequestsError: if the client has ``max_requests`` live requests and ``when_full="refuse"``
        :raises EngineDeadError: if the engine is dead
        :raises EngineClosedError: if the client is closed
        """
        return self._prepare(prompt_token_ids, sampling_params, None, prompt_embeds, request_id, stall_limit, options)

    async def generate(
        self,
        prompt_token_ids: Sequence[int] | None = None,
        sampling_params: SamplingParams = _DEFAULT_SAMPLING,
        *,
        prompt_embeds: Any = None,
        request_id: str | None = None,
        stall_limit: float | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Completion:
        """One request to its end. Parameters and errors as :meth:`open_request`; cancelling it aborts the request.

        :raises EngineDeadError: if the engine dies before the last token
        """
        request = self._prepare(
            prompt_token_ids, sampling_params, None, prompt_embeds, request_id, stall_limit, options
        )
        return await _complete(request)

    async def encode(
        self,
        prompt_token_ids: Sequence[int] | None = None,
        pooling_params: PoolingParams = _DEFAULT_POOLING,
        *,
        prompt_embeds: Any = None,
        request_id: str | None = None,
        stall_limit: float | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Completion:
        """The pooled vector or scores of one prompt, as ``pooling_output``, of an engine that supports such a task.

        Other parameters and errors as :meth:`open_request`; cancelling it aborts the request.

        :raises RequestRefusedError: if the engine does not support the task
        :raises EngineDeadError: if the engine dies before the result
        """
        self._session.belonging.require()
        pooling = check_pooling(pooling_params, self.info)
        request = self._prepare(
            prompt_token_ids, _DEFAULT_SAMPLING, pooling, prompt_embeds, request_id, stall_limit, options
        )
        return await _complete(request)

    async def add_request(
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

        The caller must abort what it does not want any more. Parameters and errors as :meth:`open_request`; with
        ``pooling_params`` it asks for what :meth:`encode` does.
        """
        self._session.belonging.require()
        pooling = None if pooling_params is None else check_pooling(pooling_params, self.info)
        tokens, checked = self._check(prompt_token_ids, sampling_params, pooling, prompt_embeds, request_id, options)
        await checkpoint_if_cancelled()
        handle, trackers = await self._session.add(
            self._session.queue, tokens, prompt_embeds, sampling_params, checked, request_id
        )
        try:
            # The message is on its way already while other tasks get their turn.
            await cancel_shielded_checkpoint()
            await self._session.await_trackers(trackers)
        except BaseException:
            await self._session.await_release(self._session.abort_added([handle]), shield=True)
            raise
        return handle

    async def abort_requests(self, handles: Iterable[int]) -> None:
        """Abort requests made by :meth:`add_request`. Those that have ended, or never were, are ignored.

        The aborts are sent at once. It returns when the engine has let go of the requests, or after a second.

        :raises TypeError: if ``handles`` does not hold integers
        :raises EngineDeadError: if the engine is dead
        :raises EngineClosedError: if the client is closed
        """
        self._session.belonging.require()
        self._session.check_open()
        own = check_handles(handles)
        await checkpoint_if_cancelled()
        live = self._session.abort_added(own)
        await cancel_shielded_checkpoint()
        await self._session.await_release(live, shield=False)

    async def get_output(self) -> StepOutputs:
        """The next step's outputs for requests made by :meth:`add_request`, in columns.

        Nothing of a request comes after it was aborted. One task at a time may wait here.

        :raises EngineDeadError: if the engine is dead and everything it sent has been read
        :raises EngineClosedError: if the client is closed
        :raises anyio.BusyResourceError: if another task waits
        """
        session = self._session
        if session.queue:
            session.belonging.require_thread()
        else:
            session.belonging.require()
        if session.restarted is not None and session.waits_for_restart and session.queue.has_told:
            await session.available()
        try:
            return await session.queue.get()
        except EngineError as error:
            raise self._session.told(error) from None

    def get_outputs_nowait(self) -> list[StepOutputs]:
        """The steps that have come already, without waiting; perhaps none. It never says that the engine is dead."""
        self._session.belonging.require()
        return self._session.queue.get_outputs_nowait()

    # ---- utilities ----

    async def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a method that the engine marks ``@utility``; returns what it returned.

        Cancelling the call, or its timeout, does not stop the method in the engine; its late answer is ignored.
        Arguments may be changed when the call is over. No copy is made of a tensor that torch has in shared memory:
        what the engine keeps of that changes with it.

        :param timeout: seconds to wait for the answer; None waits as long as the engine lives
        :raises TypeError: if ``method`` is not a string or ``timeout`` not a number
        :raises ValueError: if ``timeout`` is not a positive number
        :raises UtilityError: if the engine has no such utility, or the utility raised
        :raises UtilityTimeoutError: if no answer came in time
        :raises UnencodableError: if an argument cannot travel
        :raises UnencodableResultError: if the result cannot travel
        :raises EngineDeadError: if the engine is dead or dies before it answers
        :raises EngineClosedError: if the client is closed, before or meanwhile
        """
        self._session.belonging.require()
        return await call_utility(self._session, method, args, timeout)

    async def connect_client(self, address: str, *, keys: str | os.PathLike[str] | None = None) -> None:
        """Let another client share this engine: the one that listens at ``address``, now or whenever there is one.

        That is a client opened with ``open_engine_client(address=...)``, in this process or another. Each gets the
        outputs of its own requests; if one leaves or dies, its requests are aborted and the others notice nothing. An
        engine that is started again connects to it again.

        :param keys: the file of keys that it has, on the engine's machine
        :raises UtilityError: if the address is malformed or the keys cannot be used
        :raises EngineDeadError: if the engine is dead
        :raises EngineClosedError: if the client is closed
        """
        path = None if keys is None else os.fspath(keys)
        await self.call_utility("connect_client", address, path)
        self._session.guests[address] = path

    def _prepare(
        self,
        token_ids: Any,
        sampling: SamplingParams,
        pooling: PoolingParams | None,
        embeds: Any,
        request_id: str | None,
        stall_limit: float | None,
        options: RequestKeywords,
    ) -> RequestStream:
        tokens, checked = self._check(token_ids, sampling, pooling, embeds, request_id, options)
        if stall_limit is not None:
            check_seconds("stall_limit", stall_limit)
        self._session.admission.check()
        return RequestStream(self._session, tokens, embeds, sampling, checked, request_id, stall_limit)

    def _check(
        self,
        token_ids: Any,
        sampling: SamplingParams,
        pooling: PoolingParams | None,
        embeds: Any,
        request_id: str | None,
        options: RequestKeywords,
    ) -> tuple[Sequence[int] | LongPrompt | None, RequestOptions]:
        self._session.belonging.require()
        self._session.check_open()
        info = self.info
        tokens = accept_prompt(token_ids, embeds, info)
        checked = check_options(info, options, pooling)
        check_sampling(sampling, info)
        if pooling is None:
            token_limit(sampling, embeds.shape[0] if tokens is None else len(tokens), info.max_model_len)
        check_features(checked.features, tokens)
        self._session.ids.check_free(check_request_id(request_id))
        return tokens, checked


async def _complete(request: RequestStream) -> Completion:
    async with request:
        return await request.completion()


def session_of(client: EngineClient) -> EngineSession:
    """What is behind a client, for the other kinds of client that are built on it."""
    return client._session  # pyright: ignore[reportPrivateUsage] - no business of users
