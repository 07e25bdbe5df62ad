"""What a client's parts share: the engine's link, the sockets, the tables, and the delivery of what arrives."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import anyio
import zmq
from anyio.lowlevel import checkpoint

from anyengine.client.admission import Admission, WhenFull
from anyengine.client.belonging import Belonging
from anyengine.client.delivery import Delivery
from anyengine.client.limits import Limits
from anyengine.client.link import EngineLink
from anyengine.client.output_relay import OutputRelay
from anyengine.client.prompts import LongPrompt
from anyengine.client.request_group import RequestGroup
from anyengine.client.request_ids import RequestIds
from anyengine.client.request_stream import RELEASE_LIMIT, RequestStream
from anyengine.client.staging import release, size_to_stage, stage, stage_features
from anyengine.client.turns import Turns
from anyengine.client.waiters import ErrorFactory, OutputQueue
from anyengine.errors import CrashReport, EngineClosedError, EngineDeadError, EngineError
from anyengine.params import RequestOptions, SamplingParams
from anyengine.process.blocks import Lease
from anyengine.process.remote_engine import RemoteEngine
from anyengine.protocol.client_events import ClientState, StepReceived
from anyengine.protocol.requests import Frames
from anyengine.transport.endpoints import Endpoints
from anyengine.transport.wakeup import Wakeup, wakeup_type
from anyengine.types import EngineSpec, Health, HealthState, ProgressCallback

E = TypeVar("E", bound=Exception)

HEALTH_TIMEOUT = 2.0
"""Seconds without an answer, or without a step while there is work, after which an engine counts as unresponsive."""

_ABORTED_ALONE = 8
"""Streams left in one turn of the event loop that are aborted by a message each; fewer, if others have taken turns."""


class EngineSession:
    """One client's engine, from the start of its process to its end."""

    def __init__(
        self,
        endpoints: Endpoints,
        max_requests: int | None,
        when_full: WhenFull,
        *,
        spec: EngineSpec | None,
        token: bytes | None,
        on_progress: ProgressCallback | None,
    ) -> None:
        self.belonging: Belonging = Belonging()
        self.endpoints = endpoints
        self.spec = spec
        self.on_progress = on_progress
        self.early_hello: Sequence[bytes | memoryview] | None = None
        self._token = token
        self._handles = itertools.count()  # of all lives, so that a handle names one request
        self.link: EngineLink = EngineLink(0, self._handles, time.monotonic, token)
        self.delivery: Delivery = Delivery()
        self.wakeup_type: type[Wakeup] = wakeup_type()
        self.turns: Turns = Turns(self.wakeup_type)
        self.queue: OutputQueue = OutputQueue(self.wakeup_type)
        self.admission: Admission = Admission(max_requests, when_full, lambda: self.link.machine.held, self.turns)
        self.staging: anyio.CapacityLimiter = anyio.CapacityLimiter(4)
        self.checking: anyio.Lock = anyio.Lock(fast_acquire=True)  # of long prompts, one at a time
        self.limits: Limits = Limits()
        self.relay: OutputRelay = OutputRelay()
        self.ending: bool = False  # the engine has ended; its last outputs are being read
        self.closing = False
        self.closed = False
        self.death_told: bool = False
        self.last_report: CrashReport | None = None  # of the last death, which a restart may have followed
        self.restarted: anyio.Event | None = None  # while a dead engine is started again; set when that has an end
        self.waits_for_restart = False
        self.refused_messages = 0
        self.guests: dict[str, str | None] = {}  # other clients that share the engine: addresses, and files of keys
        self.ids: RequestIds = RequestIds()
        self._leaving: list[int] = []  # handles of streams that are left, and aborted in the loop's next turn
        self._trackers: list[zmq.MessageTracker] = []
        self._stagings: set[anyio.CancelScope] = set()

    def health(self, timeout: float) -> Health:
        """How the engine fares, which has ``timeout`` seconds to answer and to make a step."""
        state: HealthState | None = None
        if self.closed:
            state = "closed"
        elif self.closing:
            state = "closing"
        elif self.restarted is not None:
            state = "restarting"
        elif self.link.report is not None:
            state = "dead"
        return self.link.health(timeout, state)

    # ---- requests ----

    def told(self, error: E) -> E:
        """``error`` itself; remembers that somebody was told of the engine's death."""
        if isinstance(error, EngineDeadError) and error.report is self.link.report:
            self.death_told = True
        return error

    def abort_stream(self, handle: int) -> bool:
        """Abort a stream's request, now or in the loop's next turn; whether it was live, so that its end will come.

        Of many that are left at one moment, most are aborted by one message.
        """
        if self.link.report is not None or handle not in self.link.machine.requests:
            return False
        if self._leaving or not self.turns.take(_ABORTED_ALONE):
            if not self._leaving:
                self.turns.call_next(self._abort_leaving)
            self._leaving.append(handle)
        else:
            self.abort([handle])
        return True

    def _abort_leaving(self) -> None:
        handles, self._leaving = self._leaving, []
        self.abort(handles)

    async def await_trackers(self, trackers: list[zmq.MessageTracker]) -> None:
        """Return when ZeroMQ has read these frames, so that the caller may change the memory; or the engine is dead.

        :raises EngineDeadError: if the engine dies first
        :raises EngineClosedError: if the client is closed first
        """
        pause = 0.0002
        ended = self.link.ended
        while not all(tracker.done for tracker in trackers):
            # pyzmq reports it to a thread of its own, which cannot wake a task; at most a few milliseconds are lost.
            with anyio.move_on_after(pause):
                await ended.wait()
            if ended.is_set():
                raise self.told(self.ending_error())
            pause = min(pause * 2, 0.002)

    def check_open(self) -> None:
        """:raises EngineClosedError: if the client is closed, EngineDeadError if its engine is dead"""
        if self.closing:
            raise EngineClosedError("the client is closed: its block was left, or is being left")
        if self.restarted is not None and self.waits_for_restart:
            return
        report = self.link.report if self.restarted is None else self.last_report
        if report is not None:
            raise self.told(EngineDeadError(report))

    async def stage(self, value: Any, leases: list[Lease]) -> Any:
        """``value`` with its large arrays where they can be handed over; without any, without a checkpoint.

        If the engine dies meanwhile, ``value`` as it was: whoever goes on with it is told.

        :param leases: gets what the caller has to release if the call does not go through
        """
        lane = self.link.lane
        if lane is None or not (size := size_to_stage(value)):
            return value
        with anyio.CancelScope() as scope:
            self._stagings.add(scope)
            try:
                return await stage(value, size, lane, self.staging, leases)
            finally:
                self._stagings.remove(scope)
        return value

    async def add(
        self,
        owner: RequestStream | OutputQueue,
        token_ids: Sequence[int] | LongPrompt | None,
        embeds: Any,
        sampling: SamplingParams,
        options: RequestOptions,
        request_id: str | None,
    ) -> tuple[int, list[zmq.MessageTracker]]:
        """Check a long prompt, stage a request's large arrays, and send it as soon as the engine takes it.

        Registering and sending is the last that happens: if this raises, nothing has been sent.

        :returns: its handle and the trackers
        :raises TypeError: if a token of a long prompt is no integer
        :raises RequestRefusedError: if one is not u32, a live request has the same id, or it cannot travel
        :raises Exception: as :meth:`admit`
        """
        if isinstance(token_ids, LongPrompt):
            # One at a time: the pieces of several in one turn of the loop would add up.
            async with self.checking:
                for _ in token_ids.check():
                    await checkpoint()
            token_ids = token_ids.token_ids
        leases: list[Lease] = []
        try:
            embeds, options = await self.admit(embeds, options, leases)
            prompts = None if token_ids is None else [token_ids]
            (handle,), trackers = self.register(owner, prompts, embeds, sampling, options, request_id)
        except BaseException:
            release(leases)
            raise
        return handle, trackers  # what did not go by the lane is copied, or ZeroMQ's, which reads it in place

    async def admit(self, embeds: Any, options: RequestOptions, leases: list[Lease]) -> tuple[Any, RequestOptions]:
        """Return when the engine takes one more request, which must then be registered without a checkpoint between.

        :param leases: as of :meth:`stage`
        :returns: both with their large arrays staged
        :raises TooManyRequestsError: if it does not, and the request is not to wait
        :raises EngineClosedError: if the client is closed, before or meanwhile
        :raises EngineDeadError: if the engine is dead, or stays dead
        """
        while True:
            await self.available()
            if not self.turns.take():
                await self.turns.wait()
                await self.available()
            try:
                await self.admission.enter()
            except EngineDeadError as error:
                if self.restarted is None or not self.waits_for_restart:
                    raise self.told(error) from None
            else:
                with self.admission.hold():
                    embeds = await self.stage(embeds, leases)
                    if options.features:
                        features = await stage_features(options.features, lambda data: self.stage(data, leases))
                        options = dataclasses.replace(options, features=features)
                if self.restarted is None and self.link.fault is None:
                    return embeds, options

    async def available(self) -> None:
        """Return when the engine takes calls: at once, or after a restart that is under way.

        :raises EngineClosedError: if the client is closed, before or meanwhile
        :raises EngineDeadError: if the engine is dead, or stays dead
        """
        self.check_open()
        while self.restarted is not None or self.link.fault is not None:
            # An engine that this side has given up may take some time to be known as dead.
            await (self.link.ended if self.restarted is None else self.restarted).wait()
            self.check_open()

    def ending_error(self) -> EngineError:
        """A fresh error for somebody who waited for the end."""
        if self.closing or self.last_report is None:
            return EngineClosedError("the client was closed")
        return EngineDeadError(self.last_report)

    @property
    def takes_requests_now(self) -> bool:
        """Whether a request could be registered without waiting for anything."""
        return self.restarted is None and self.link.fault is None and self.admission.room > 0

    def register(
        self,
        owner: RequestStream | OutputQueue | RequestGroup,
        prompts: Sequence[Sequence[int]] | None,
        embeds: Any,
        sampling: SamplingParams,
        options: RequestOptions,
        request_id: str | None = None,
    ) -> tuple[range, list[zmq.MessageTracker]]:
        """Send requests for ``owner``, alike in all but their prompts; their handles, and the trackers of large frames.

        A ``request_id`` names the first of them.
        """
        # No await from here to the end of the send: requests are registered and sent, or neither.
        try:
            self.check_open()
            self.ids.check_free(request_id)
            handles, frames = self.link.machine.add(prompts, embeds, sampling, options, owner)
        except BaseException:
            self.admission.update()  # the place that was meant for it
            raise
        if request_id is not None:
            self.ids.add(request_id, handles[0])
        return handles, self.send(frames)

    def abort(self, handles: Iterable[int]) -> None:
        """Abort these requests, whoever made them; unknown handles are ignored."""
        if self.link.machine.state not in (ClientState.SERVING, ClientState.CLOSING):
            return
        handles = list(handles)
        frames = self.link.machine.abort(handles)
        if frames is not None:
            for handle in handles:
                self.ids.forget(handle)
            self.send(frames)
            self.admission.update()

    def abort_added(self, handles: Iterable[int]) -> Sequence[int]:
        """Abort those of these requests that ``add_request`` made, and forget what is queued of them.

        :returns: those that were live
        """
        handles = list(handles)
        live = [handle for handle in dict.fromkeys(handles) if self.link.machine.requests.get(handle) is self.queue]
        self.abort(live)
        self.queue.drop(handles)
        return live

    async def await_release(self, handles: Sequence[int], *, shield: bool) -> None:
        """Return when the engine has let go of requests that ``add_request`` made and were aborted; bounded."""
        aborting = self.link.machine.aborting
        with self.limits.within(RELEASE_LIMIT, shield=shield):
            await self.queue.released([handle for handle in handles if handle in aborting])

    def send(self, frames: Frames) -> list[zmq.MessageTracker]:
        """Send a message to the engine, at once and without waiting; the trackers of large frames."""
        if self.link.shares_memory:
            self.send_copied(frames)
            return []
        assert self.link.identity is not None
        try:
            trackers = self.endpoints.router.send([self.link.identity, *self.link.hand_over(frames)])
        except zmq.ZMQError as error:
            self._unreachable(error)
            return []
        if trackers:
            self._trackers = [tracker for tracker in self._trackers if not tracker.done] + trackers
        return trackers

    def send_copied(self, frames: Frames) -> None:
        """Send a message of which ZeroMQ takes copies."""
        assert self.link.identity is not None
        try:
            self.endpoints.router.send_copied([self.link.identity, *self.link.hand_over(frames)])
        except zmq.ZMQError as error:
            self._unreachable(error)

    def _unreachable(self, error: zmq.ZMQError) -> None:
        if error.errno != errno.EHOSTUNREACH:
            raise error
        # The engine's socket is gone. Its death, which tells everybody, is a moment away; should its process live on,
        # the supervisor ends it.
        if isinstance(self.link.host, RemoteEngine):
            self.link.host.end("lost")
        self.link.is_unreachable = True

    @property
    def tracked_buffers(self) -> int:
        """How many large frames ZeroMQ still reads; any thread may ask."""
        return sum(not tracker.done for tracker in self._trackers)

    def deliver(self, event: StepReceived[Any]) -> None:
        """Hand one step to those who wait for it."""
        self.delivery.deliver(event, wake=not self.ending)
        if not (event.outputs.details or event.released):
            return
        if self.ids:
            for row, details in event.outputs.details.items():
                if details.finish_reason is not None:
                    self.ids.forget(event.outputs.handles[row])
        for handle, owner in event.released:
            owner.release(handle)
        self.admission.update()

    def close_waiters(self, error: ErrorFactory) -> None:
        """Everybody who waits for the engine gets a fresh ``error``, after what came before it."""
        requests, aborting, calls = self.link.machine.died()
        for owner in dict.fromkeys((*requests, *aborting, *calls)):
            if owner is not self.queue:
                owner.close(error)
        self.queue.close(error, owed=self.queue in requests)
        self.admission.dismiss(error)
        for scope in self._stagings:
            scope.cancel()
        while self.delivery.unparked:  # those whose requests had ended before
            self.turns.call(self.delivery.unparked.popleft().wake)
        self.ids.clear()
        self.delivery.forget_owners()

    def report_death(self, report: CrashReport) -> None:
        """The engine is dead: everybody is told."""
        self.link.report = self.last_report = report
        self.close_waiters(lambda: EngineDeadError(report))
        for event in (self.link.greeted, self.link.ready, self.link.ended):
            event.set()

    def renew(self) -> None:
        """Begin the engine's next life. What is known of the engine stays, until it says it anew."""
        info = self.link.info
        self.link = EngineLink(self.link.rank, self._handles, time.monotonic, self._token)
        self.link.info = info
        self.ending = False
        self.death_told = False
        self.queue.reopen()
