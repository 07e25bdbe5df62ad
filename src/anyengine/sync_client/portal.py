"""A blocking portal: an async context manager held open by an event loop in a thread of its own, callable from others.

It does what ``anyio.from_thread.start_blocking_portal`` does, which cannot be used here for three reasons. Its calls
wait twice, for the start of a task and for its end, and an interrupt of the first wait leaves a task that nobody can
cancel. It refuses calls from the thread of a running trio loop, and leaving it there waits for ever. And an interrupt
while its loop starts waits for the end of a loop that nobody ends. Here a call is handed over without waiting, by the
one function of either loop that any thread may call at any time.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

import anyio

from anyengine.errors import EngineClosedError
from anyengine.forks import Origin
from anyengine.sync_client.loop_handle import Backend, LoopHandle
from anyengine.sync_client.portal_call import Latch, Listener, PortalCall, PortalWait, TakeBack
from anyengine.thread_limits import none_left

T = TypeVar("T")
R = TypeVar("R")

INTERRUPT_LIMIT = 2.0
"""Seconds that an interrupted call waits for the end of its task, and the end of the loop for that of its calls. An
abort is sent at once; the engine acknowledges it within one step, and leaving a request waits for that no longer than a
second."""


class Portal(Generic[T]):
    """Holds ``block`` open from :meth:`open` to :meth:`close`, in a loop of ``backend``.

    Every call ends: when the loop does, what is still under way gets :class:`EngineClosedError`.
    """

    def __init__(self, block: AbstractAsyncContextManager[T, Any], backend: Backend) -> None:
        self._block = block
        self._origin = Origin()
        self.loop: LoopHandle = LoopHandle(backend)
        self._entered: list[T] = []  # what entering the block returned
        self._error: BaseException | None = None
        self._interrupted = False
        self._accepting = True
        self._lock = threading.Lock()
        self._calls: set[PortalCall[Any] | Listener] = set()
        self._background: set[PortalCall[Any]] = set()  # those of the calls that nothing in the block ends
        self._opened = Latch()
        self._ended = Latch()
        self._thread = threading.Thread(target=self._run_loop, name=f"anyengine-{backend}", daemon=True)

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller runs in the loop's thread."""
        return threading.get_ident() == self._thread.ident

    @property
    def is_forked(self) -> bool:
        """Whether this is a process that was forked from the loop's, in which its thread does not run."""
        return self._origin.is_forked

    @property
    def is_left(self) -> bool:
        """Whether the block was left, so that nothing changes any more of what it held."""
        return not self._accepting

    # ---- the block ----

    def open(self) -> T:
        """Start the loop, enter the block, and return what that returned. An interrupt ends both again.

        :raises OSError: if the system has no thread for the loop
        """
        try:
            try:
                self._thread.start()
            except RuntimeError as error:
                raise none_left(f"a thread for the {self.loop.backend} loop") from error
            self._opened.wait()
            if not self._entered:
                self._join()
            return self._entered[0]
        except BaseException:
            self._interrupted = True
            if self._thread.ident is not None:
                self.loop.post_surely(self._cancel)
                self._ended.wait()  # bounded; a second interrupt leaves the rest to the loop's thread
            raise

    def close(self) -> None:
        """Leave the block and wait for the end of the loop; raises what leaving raised.

        An interrupt meanwhile comes out when the block has been left. A second one comes out at once; the rest goes on
        in the loop's thread.
        """
        if self.is_forked:
            return
        self.check_thread()
        try:
            self.loop.post(self._leave)
            self._ended.wait()
        except BaseException:
            self.loop.post_surely(self._leave)
            self._ended.wait()
            raise
        self._join()

    def _join(self) -> None:
        self._thread.join()
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame

    # ---- calls ----

    def call(self, function: Callable[[], Awaitable[R]], undo: Callable[[R], Awaitable[object]] | None = None) -> R:
        """Run an async function in the loop and wait for what comes of it.

        An interrupt (KeyboardInterrupt, or what another signal handler raises) cancels the function, and comes out when
        it has ended or :data:`INTERRUPT_LIMIT` is over. If it has returned a value all the same, ``undo`` takes it.

        :raises EngineClosedError: if the block was left, before or meanwhile
        :raises RuntimeError: if called in the loop's own thread, where it would wait for itself
        """
        self.check_open()
        call = PortalCall(function, undo)
        try:
            self._submit(call)
            call.done.wait()
        except BaseException:
            self.abandon(call)
            raise
        return call.result()

    def wait(self, listen: Callable[[PortalWait], TakeBack]) -> None:
        """Wait for something that the loop's own code brings; see :class:`PortalWait`. It takes no task.

        :raises EngineClosedError: if the block was left, before or meanwhile
        :raises RuntimeError: if called in the loop's own thread, where it would wait for itself
        """
        self.check_open()
        wait = PortalWait(listen)
        try:
            self._submit(wait)
            wait.done.wait()
        except BaseException:
            self.abandon(wait)
            raise
        finally:
            self._calls.discard(wait)
        wait.check()

    def subscribe(self, listener: Listener, earlier: Listener | None) -> None:
        """Have the loop bring something from now on, in place of what ``earlier`` brought, whatever interrupts this."""
        try:
            if earlier is not None:
                self._calls.discard(earlier)
            self._submit(listener)
        except BaseException:
            self.loop.post_surely(functools.partial(self._start, listener))
            raise

    def finish(self, function: Callable[[], Awaitable[R]]) -> R:
        """Run an async function that must happen and takes a moment only.

        An interrupt does not cancel it, and comes out when it has ended or :data:`INTERRUPT_LIMIT` is over.

        :raises EngineClosedError: if the block was left, before or meanwhile
        :raises RuntimeError: if called in the loop's own thread, where it would wait for itself
        """
        self.check_open()
        self.check_thread()
        call = PortalCall(function, None)
        try:
            self._submit(call)
            call.done.wait()
        except BaseException:
            self.loop.post_surely(functools.partial(self._start, call))
            call.done.wait(INTERRUPT_LIMIT)
            raise
        return call.result()

    def call_now(self, function: Callable[[], R]) -> R:
        """The same for a function that is not async."""

        async def run() -> R:
            return function()

        return self.call(run)

    def start(self, call: PortalCall[object]) -> None:
        """Have a call run in the loop without waiting for it; :meth:`abandon` must follow. It ends with the block.

        :raises EngineClosedError: if the block was left
        :raises RuntimeError: if called in the loop's own thread
        """
        self.check_open()
        self._background.add(call)
        self._submit(call)

    def abandon(self, call: PortalCall[Any] | PortalWait) -> None:
        """Cancel a call and wait, bounded, until nothing of it runs. It waits for nothing in the loop's own thread."""
        if self.is_forked:
            return
        self._background.discard(call)
        self.loop.post_surely(functools.partial(self._abandon, call))
        if not self.is_own_thread:
            call.gone.wait(INTERRUPT_LIMIT)

    def check_open(self) -> None:
        """:raises EngineClosedError: if the block was left, or in a process that was forked from the client's"""
        self._origin.require_process()
        if self._ended.is_set:
            raise EngineClosedError("the client is closed: its block was left")

    def check_thread(self) -> None:
        """:raises RuntimeError: if called in the loop's own thread, which would wait for itself"""
        if self.is_own_thread:
            raise RuntimeError(
                "a blocking call in the thread that serves it would wait for itself; "
                "make it in another thread than that of on_progress, a finalizer or a logging handler"
            )

    def _submit(self, call: PortalCall[Any] | Listener) -> None:
        self.check_thread()
        # A call is in the table before the loop ends, and is ended with it, or it comes after that and is told.
        with self._lock:
            if self._ended.is_set:
                call.close()
                return
            self._calls.add(call)
        self.loop.post(functools.partial(self._start, call))

    # ---- in the loop's thread ----

    def _run_loop(self) -> None:
        try:
            # A context of its own: nothing of the caller's, who may be in a loop of another kind, belongs in here.
            contextvars.Context().run(anyio.run, self._hold, backend=self.loop.backend)
        except BaseException as error:
            self._error = error
        finally:
            with self._lock:
                self._ended.set()
            for call in list(self._calls):
                call.close()
            self._opened.set()

    async def _hold(self) -> None:
        self._leaving = anyio.Event()
        with anyio.CancelScope() as self._scope:
            async with anyio.create_task_group() as self._group:
                self.loop.begin()
                if self._interrupted:
                    self._scope.cancel()
                try:
                    async with self._block as entered:
                        self._entered.append(entered)
                        self._opened.set()
                        await self._leaving.wait()
                except anyio.get_cancelled_exc_class():
                    raise
                except BaseException as error:  # for whoever opens or closes, without the group's wrapping
                    self._error = error
                finally:
                    # Every other call ends by itself now, most of them with what the client's end brought them.
                    self._accepting = False
                    for call in tuple(self._background):
                        call.abandon()
                    self._group.cancel_scope.deadline = anyio.current_time() + INTERRUPT_LIMIT

    def _leave(self) -> None:
        self._leaving.set()

    def _cancel(self) -> None:
        self._scope.cancel()

    def _start(self, call: PortalCall[Any] | Listener) -> None:
        if call.started:
            return
        call.started = True
        self._calls.add(call)  # if an interrupt came before it was
        if not self._accepting:
            self._calls.discard(call)
            call.close()
        elif isinstance(call, Listener):
            call.begin()
        else:
            self._group.start_soon(self._run, call)

    async def _run(self, call: PortalCall[Any]) -> None:
        try:
            await call.run()
        finally:
            self._calls.discard(call)

    def _abandon(self, call: PortalCall[Any] | PortalWait) -> None:
        if isinstance(call, PortalWait):
            call.started = True  # or never will be
            call.abandon()
            return
        if not call.abandon():
            return
        if self._accepting:
            self._group.start_soon(call.take_back)
        else:
            call.close()
