"""A live client driven by a list of operations, and beside it a small model of what must come of each request.

The operations come one after the other; readers run in tasks of their own, each behind a gate, so that some are slow.
A request's tokens are checked as they come. Of its end the model knows which reasons are possible: an operation that
ends requests adds one to those of the requests that were live, and demands at once that they have ended.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup
from tests.contract.steps import eventually, nothing_is_left

from anyengine import CrashReport, EngineClient, EngineClosedError, EngineDeadError, SamplingParams, UtilityError
from anyengine.utilities import PauseMode

Operation = tuple[Any, ...]
"""The name of a method of :class:`LiveMachine`, and its arguments."""


class Request:
    """One request and what has come of it."""

    def __init__(self, number: int, max_tokens: int) -> None:
        self.prompt = number * 100
        self.sampling = SamplingParams(max_tokens=max_tokens)
        self.count = 0
        self.possible = {"length"}  # outcomes: a finish reason, "dead" or "cancelled"
        self.outcome: str | None = None
        self.held = False  # in a pause, so that no token may come
        self.scope = anyio.CancelScope()
        self.gate = anyio.Event()

    def take(self, tokens: Any) -> None:
        """The next tokens, which follow those before."""
        assert self.outcome is None, f"tokens {list(tokens)} came after the end: {self.outcome}"
        assert not (self.held and len(tokens)), "tokens came of a request that is held"
        assert list(tokens) == [self.prompt + 1 + self.count + number for number in range(len(tokens))]
        self.count += len(tokens)
        assert self.count <= self.sampling.max_tokens

    def end(self, outcome: str) -> None:
        """Its end, which comes once, and for a reason that there was."""
        assert self.outcome is None, f"ended twice: {self.outcome}, then {outcome}"
        assert outcome in self.possible, f"ended by {outcome}: expected one of {self.possible}"
        assert outcome != "length" or self.count == self.sampling.max_tokens
        self.outcome = outcome


class LiveMachine:
    """Drives ``client``, which starts a dead engine again; ``can_be_killed`` by a signal, or else by an error."""

    def __init__(self, client: EngineClient, group: TaskGroup, *, can_be_killed: bool) -> None:
        self.client = client
        self._group = group
        self._can_be_killed = can_be_killed
        self._requests: list[Request] = []
        self._streams: list[Request] = []
        self._added: dict[int, Request] = {}  # by handle
        self._gate = anyio.Event()  # of the reader of get_output
        self._gate.set()
        self._deaths = 0
        self._reports: list[CrashReport] = []
        # Of the engine.
        self._paused = False
        self._asleep: set[str] = set()
        self._level = 0

    async def run(self, operations: list[Operation]) -> None:
        """Do all of them, then let everything come to its end."""
        self._group.start_soon(self._read_steps)
        for name, *arguments in operations:
            with anyio.fail_after(30):
                await getattr(self, name)(*arguments)
                await self._check()
        with anyio.fail_after(30):
            await self._finish()

    async def _finish(self) -> None:
        await self.wake_up(None)
        await self._have_ended(self._requests)
        await eventually(lambda: nothing_is_left(self.client))
        assert len(self._reports) <= self._deaths

    # ---- what must always be ----

    async def _check(self) -> None:
        """A paused engine makes no step: the rows of one would come before the second answer."""
        if self._paused:
            counts: list[int] = []
            for number in range(2):
                assert await self.client.call_utility("echo", number) == number
                counts.append(self.client.health().steps)
            assert counts[0] == counts[1], "a paused engine made a step"
            assert await self.client.is_scheduler_paused()
        found = self.client.statistics()
        assert found.pending_calls == 0
        assert found.live_requests <= len(self._live())  # of some the last output has come, and is not read yet

    def _live(self) -> list[Request]:
        return [request for request in self._requests if request.outcome is None]

    def _new_request(self, max_tokens: int) -> Request:
        request = Request(len(self._requests), max_tokens)
        request.held = self._paused
        self._requests.append(request)
        return request

    async def _have_ended(self, requests: list[Request]) -> None:
        """Each of these has its end. Slow readers get theirs when they read, and nothing before it can be lost."""
        self._gate.set()
        for request in requests:
            request.gate.set()
        await eventually(lambda: all(request.outcome for request in requests))

    # ---- requests ----

    async def add(self, max_tokens: int, is_slow: bool) -> None:
        """A request with a reader of its own; it has been sent when this returns."""
        request = self._new_request(max_tokens)
        if not is_slow:
            request.gate.set()
        self._streams.append(request)
        await self._group.start(self._read, request)

    async def _read(self, request: Request, *, task_status: Any) -> None:
        with request.scope:
            try:
                async with self.client.open_request([request.prompt], request.sampling) as stream:
                    task_status.started()
                    while request.outcome is None:
                        await request.gate.wait()
                        output = await anext(stream)
                        request.take(output.token_ids)
                        if output.finish_reason is not None:
                            request.end(output.finish_reason)
                    assert await anext(stream, None) is None
            except EngineDeadError:
                request.end("dead")
        if request.outcome is None:
            request.end("cancelled")

    async def add_for_get_output(self, max_tokens: int) -> None:
        """A request whose rows come with ``get_output``."""
        request = self._new_request(max_tokens)
        handle = await self.client.add_request([request.prompt], request.sampling)
        self._added[handle] = request

    async def _read_steps(self) -> None:
        while True:
            await self._gate.wait()
            try:
                step = await self.client.get_output()
            except EngineClosedError:
                return
            except EngineDeadError as error:
                assert all(error.report is not known for known in self._reports)  # each death is told once
                self._reports.append(error.report)
                for request in self._added.values():
                    if request.outcome is None:
                        request.end("dead")
                continue
            for handle, tokens, details in step.rows():
                while handle not in self._added:  # it came before add_request returned
                    await anyio.lowlevel.checkpoint()
                self._added[handle].take(tokens)
                if details is not None and details.finish_reason is not None:
                    self._added[handle].end(details.finish_reason)

    async def read_steps_later(self) -> None:
        """From now on steps wait for ``get_output``, until somebody's end is waited for."""
        if self._gate.is_set():
            self._gate = anyio.Event()

    async def read_some(self, which: int) -> None:
        """Let a slow reader take what there is; if its engine runs, there is something, or its end."""
        waiting = [request for request in self._streams if not request.gate.is_set()]
        if waiting:
            request = waiting[which % len(waiting)]
            before = request.count
            gate, request.gate = request.gate, anyio.Event()
            gate.set()
            if not self._paused:
                await eventually(lambda: request.count > before or request.outcome)

    async def cancel(self, which: int) -> None:
        """Cancel a reader."""
        live = [request for request in self._streams if request.outcome is None]
        if live:
            request = live[which % len(live)]
            request.possible.add("cancelled")
            request.scope.cancel()
            await eventually(lambda: request.outcome)

    async def abort(self, which: list[int]) -> None:
        """Abort requests of ``get_output``; some have ended, some never were."""
        handles = list(self._added)
        chosen = [handles[number % len(handles)] for number in which] if handles else []
        await self.client.abort_requests([*chosen, 10**9])
        for handle in chosen:
            request = self._added[handle]
            if request.outcome is None:  # and nothing comes after this: see Request.take
                request.possible.add("abort")
                request.end("abort")

    # ---- calls ----

    async def call(self, value: Any) -> None:
        """A call is answered, and a failure of one stays there."""
        assert await self.client.call_utility("echo", value) == value
        with pytest.raises(UtilityError, match="as it was told"):
            await self.client.call_utility("raise_error", "as it was told")

    async def cancel_call(self, seconds: float) -> None:
        """A call that is not waited for."""
        with anyio.move_on_after(0.001):
            await self.client.call_utility("sleep_for", seconds)

    # ---- pausing and sleeping ----

    async def _kept(self) -> int:
        """How many requests a paused engine has beside those that it holds; exact after an answer."""
        await self.client.call_utility("echo", "after all rows")
        return self.client.statistics().live_requests - sum(request.held for request in self._live())

    async def _pause(self, mode: PauseMode, level: int, call: Callable[[], Any]) -> None:
        fits = not level or not self._asleep or (level == self._level and len(self._asleep) == 2)
        if not fits or (mode == "wait" and self._asleep and await self._kept()):
            with pytest.raises(UtilityError):
                await call()
            return
        running = [request for request in self._live() if not request.held]
        ending = {"abort": self._live(), "wait": running, "keep": []}[mode]
        if mode == "abort":
            for request in ending:
                request.possible.add("abort")
        await call()
        held = sum(request.held for request in self._live()) if mode == "wait" else 0
        assert mode == "keep" or self.client.statistics().live_requests == held
        self._paused = True
        if level and not self._asleep:
            self._asleep, self._level = {"weights", "kv_cache"}, level
        await self._have_ended(ending)
        for request in ending:
            request.held = False

    async def pause(self, mode: PauseMode) -> None:
        """Pause in one of the modes."""
        await self._pause(mode, 0, lambda: self.client.pause_scheduler(mode))

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Fall asleep."""
        await self._pause(mode, level, lambda: self.client.sleep(level, mode))

    def _resumed(self) -> None:
        self._paused = False
        for request in self._requests:
            request.held = False

    async def resume(self) -> None:
        """End a pause."""
        if self._asleep:
            with pytest.raises(UtilityError, match="wake_up"):
                await self.client.resume_scheduler()
            return
        self._resumed()
        await self.client.resume_scheduler()

    async def wake_up(self, tags: list[str] | None) -> None:
        """Wake up, in part or altogether, which also ends a pause."""
        self._asleep = set() if tags is None else self._asleep - set(tags)
        if not self._asleep:
            self._resumed()
        await self.client.wake_up(tags)

    # ---- death ----

    async def die(self, calls: int, wait: bool) -> None:
        """The engine dies while calls wait; everybody is told, and it is started again."""
        await self.client.call_utility("echo", "up")
        if not self._can_be_killed:
            await self.wake_up(None)  # its death comes with a step
        live = self._live()
        for request in live:
            request.possible.add("dead")
        self._deaths += 1
        told = len(self._reports)
        # A request whose last row comes just before the death leaves its reader on its way to the next call.
        waits_for_steps = self._gate.is_set() and not any(request in live for request in self._added.values())
        async with anyio.create_task_group() as group:
            for _ in range(calls if self._can_be_killed else 0):
                group.start_soon(self._call_in_vain)
            if self._can_be_killed:
                await eventually(lambda: self.client.statistics().pending_calls == calls)
            await group.start(self._wait_dead)
            await self._strike()
        self._paused, self._asleep = False, set()
        await self._have_ended(live)
        if waits_for_steps:  # else it is told only if a request of its own ends
            await eventually(lambda: len(self._reports) == told + 1)
        if wait:
            await self.client.call_utility("echo", "up")
            assert self.client.health().state == "alive"

    async def _strike(self) -> None:
        if self._can_be_killed:
            os.kill(self.client.health().pid, signal.SIGKILL)
        else:
            with suppress(EngineDeadError):  # of a death before the answer
                await self.client.call_utility("raise_in_step", "boom-123")

    async def _wait_dead(self, *, task_status: Any) -> None:
        task_status.started()
        with pytest.raises(EngineDeadError, match="SIGKILL" if self._can_be_killed else "boom-123"):
            await self.client.wait_dead()

    async def _call_in_vain(self) -> None:
        with pytest.raises(EngineDeadError):
            await self.client.call_utility("sleep_for", 60)
