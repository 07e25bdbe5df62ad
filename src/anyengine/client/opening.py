"""``open_engine_client``: the block that owns an engine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint_if_cancelled

from anyengine import notices
from anyengine.client.admission import WhenFull
from anyengine.client.engine_client import EngineClient
from anyengine.client.keeper import EngineKeeper, RestartPolicy
from anyengine.client.not_entered import not_entered
from anyengine.client.one_error import one_error
from anyengine.client.options import ClientOptions, OnDeath, Placement
from anyengine.client.output_relay import FLUSH_LIMIT
from anyengine.client.services import (
    keep_limits,
    keep_pulse,
    read_pull,
    read_router,
    show_output,
    watch_connections,
)
from anyengine.client.session import EngineSession
from anyengine.client.supervisor import ShutdownPolicy, StartLimits
from anyengine.directories import sweep_directories
from anyengine.errors import EngineClosedError, EngineDeadError
from anyengine.keys import ConnectionKeys
from anyengine.process.launcher import ProcessLauncher
from anyengine.process.threads import run_in_thread
from anyengine.transport.endpoints import Endpoints
from anyengine.types import EngineSpec, ProgressCallback

_START_LIMITS = StartLimits()
_SHUTDOWN = ShutdownPolicy()

OTHER_TASK = (
    "the client's block was left by another task than the one that entered it; the engine has been ended. One task has "
    "to do both: with pytest take the fixtures of AnyIO's plugin (@pytest.mark.anyio) in place of pytest-asyncio's; "
    "elsewhere have a task of its own hold `async with open_engine_client(...)` open until an event is set; in a "
    "notebook use open_sync_engine_client. See docs/whose-client.md"
)
"""What leaving a block in a foreign task says."""


def open_engine_client(
    spec: EngineSpec | None = None,
    *,
    placement: Placement = "process",
    address: str | None = None,
    keys: str | os.PathLike[str] | None = None,
    on_death: OnDeath = "notify",
    on_progress: ProgressCallback | None = None,
    start_limits: StartLimits = _START_LIMITS,
    shutdown: ShutdownPolicy = _SHUTDOWN,
    restart: RestartPolicy | None = None,
    max_requests: int | None = None,
    when_full: WhenFull = "refuse",
    transport: Literal["ipc", "tcp"] | None = None,
    launcher: ProcessLauncher | None = None,
) -> EngineClientBlock:
    """Run an engine, or serve one that was started elsewhere, for the length of an ``async with`` block.

    The block is entered when the engine is READY. Leaving it, however that happens, ends the engine and all that it
    started. An error of the block's body comes out bare; if the body ends without one though the engine died and
    nobody was told, ``EngineDeadError`` comes out, so that a crash never goes unseen.

    :param spec: which engine to start; None with ``address``
    :param placement: ``"process"`` runs it in a child process, ``"thread"`` in a thread of this one: it then starts at
        once and shares this process's memory and devices, but a native crash takes this process along, and leaving the
        block waits for a step that hangs no longer than ``shutdown.grace``, then warns and leaves it behind
    :param address: where an engine comes to that somebody else starts by ``anyengine engine SPEC --connect ADDRESS``:
        ``tcp://HOST:PORT`` of an interface of this machine, with ``keys``, or ``ipc:///PATH``. The block is entered
        when one has come and is READY; leaving it tells that engine so, and does not end its process
    :param keys: a file that ``anyengine keys FILE`` made, of which the engine has a copy
    :param on_death: ``"notify"`` fails whoever waits for the engine; ``"cancel"`` also cancels the body, and the block
        then raises ``EngineDeadError``
    :param on_progress: called in the event loop with a stage and a fraction (0.0 to 1.0, or None) while loading
    :param start_limits: how long the steps of the start may take
    :param shutdown: how the engine is ended
    :param restart: how often a dead engine is started again; None leaves it dead
    :param max_requests: live requests that the client may have; None for no limit
    :param when_full: what becomes of one more: ``"refuse"`` raises ``TooManyRequestsError``, ``"wait"`` has it wait for
        its turn
    :param transport: of a child process: ``"ipc"`` (the default) for sockets in a private directory, ``"tcp"`` for
        loopback TCP with CURVE keys
    :param launcher: which interpreter and environment a child process gets
    :raises TypeError: if an argument has the wrong type
    :raises ValueError: if an argument has an impossible value, or two contradict each other
    :raises AddressError: if ``address`` is malformed, or TCP without keys; on entering, if it cannot be bound
    :raises KeysError: if ``keys`` cannot be used
    :raises RuntimeError: if a child process needs this process's own interpreter, and that cannot be started, because
        the application is frozen or Python is embedded in another program
    :raises UnencodableError: if an argument of the engine cannot travel
    :raises EngineStartError: on entering, if the engine dies, is too slow, or is refused before it is READY
    """
    options = ClientOptions(
        placement=placement,
        address=address,
        keys=None if keys is None else ConnectionKeys.load(keys),
        on_death=on_death,
        on_progress=on_progress,
        start_limits=start_limits,
        shutdown=shutdown,
        restart=restart,
        max_requests=max_requests,
        when_full=when_full,
        transport=transport,
        launcher=launcher,
    )
    options.check_spec(spec)
    return EngineClientBlock(spec, options)


class EngineClientBlock:
    """The async context manager that :func:`open_engine_client` returns.

    A class and not a generator: if a loop ends without leaving the block, no generator is finalized in a foreign task.
    """

    def __init__(self, spec: EngineSpec | None, options: ClientOptions) -> None:
        self._spec = spec
        self._options = options
        self._entered = False

    if not TYPE_CHECKING:  # for checkers of types the block has no such attributes

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(not_entered(self, name, EngineClient, "async with open_engine_client(...) as client"))

    async def __aenter__(self) -> EngineClient:
        """Start the engine.

        :raises EngineStartError: if it does not get ready
        """
        if self._entered:
            raise RuntimeError("this block was entered before; call open_engine_client again")
        self._entered = True
        await run_in_thread(sweep_directories, name="sweep", abandon_on_cancel=True)
        # Without a thread, though it takes a millisecond: a native cancellation could separate us from the result.
        options = self._options
        endpoints = Endpoints(options.sockets, address=options.address, keys=options.keys)
        self._session = EngineSession(
            endpoints,
            options.max_requests,
            options.when_full,
            spec=self._spec,
            token=options.token,
            on_progress=options.on_progress,
        )
        self._session.waits_for_restart = options.restart is not None and options.restart.while_down == "wait"
        self._keeper = EngineKeeper(
            self._session,
            options.make_launcher(endpoints.context),
            options.start_limits,
            options.restart,
            self._cancel_body,
        )
        self._group = anyio.create_task_group()
        self._services_scope = anyio.CancelScope(shield=True)
        self._services: TaskGroup
        self._services_ended: anyio.Event | None = None
        self._body_scope: anyio.CancelScope | None = None
        self._engine_ended: anyio.Event | None = None
        await self._group.__aenter__()
        try:
            # Not by the group's start(): cancelled meanwhile, that cancels the task and waits for it, shield or not.
            serving = anyio.Event()
            self._group.start_soon(self._serve, serving)
            await serving.wait()
            await self._keeper.start(self._services)
        except BaseException as error:
            await self._close(error)
            raise
        self._body_scope = anyio.CancelScope()
        self._body_scope.__enter__()
        if self._session.link.report is not None:
            self._cancel_body()
        return EngineClient(self._session)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        assert self._body_scope is not None
        belonging = self._session.belonging
        if belonging.is_forked:
            if belonging.in_trio:  # asyncio runs no task in a fork
                await self._unwind_fork(kind, error, traceback)
            return False
        if belonging.loop_has_ended:
            self._end_at_once()
        belonging.require()
        if not belonging.is_own_task:
            await self._end_engine()
            raise RuntimeError(OTHER_TASK)
        replaced: BaseException | None = None
        try:
            self._body_scope.__exit__(kind, error, traceback)
        except BaseException as remainder:
            # A group of errors from which the scope has taken its own cancellations: it goes on in place of the group.
            replaced = remainder
        cancelled_by_death = self._body_scope.cancelled_caught
        if cancelled_by_death:
            error = None
        swallowed = await self._close(error)
        if replaced is not None:
            raise replaced
        report = self._session.link.report
        # A cancellation does not answer a death that nobody was told of: a stopped service must exit with an error.
        quiet = error is None or isinstance(error, anyio.get_cancelled_exc_class())
        if report is not None and quiet and (cancelled_by_death or not self._session.death_told):
            raise EngineDeadError(report)
        return swallowed

    def _cancel_body(self) -> None:
        if self._options.on_death == "cancel" and self._body_scope is not None:
            self._body_scope.cancel()

    async def _serve(self, serving: anyio.Event) -> None:
        # Shielded, because the engine must be ended in good order when the block around it is cancelled; _close ends
        # this scope, and every way out of the block leads through _close.
        with self._services_scope, self._while_serving():
            await checkpoint_if_cancelled()  # it may have been ended before its first turn, and the sockets closed
            async with anyio.create_task_group() as services:
                services.start_soon(read_pull, self._session)
                services.start_soon(read_router, self._session)
                services.start_soon(keep_limits, self._session)
                services.start_soon(keep_pulse, self._session)
                services.start_soon(show_output, self._session)
                if (connections := self._session.endpoints.connections) is not None:
                    services.start_soon(watch_connections, self._session, connections)
                self._services = services
                serving.set()
                await anyio.sleep_forever()

    @contextmanager
    def _while_serving(self) -> Generator[None]:
        self._services_ended = anyio.Event()
        try:
            yield
        finally:
            self._services_ended.set()

    async def _close(self, error: BaseException | None) -> bool:
        """End everything; whether ``error`` was a cancellation of our own group and ends here."""
        try:
            await self._end_engine()
        finally:
            swallowed = await self._leave_group(error)
        return swallowed

    async def _end_engine(self) -> None:
        """End the engine and all that serves it, once. Any task of the loop may do that; another one waits for it."""
        if self._engine_ended is not None:
            with anyio.CancelScope(shield=True):
                await self._engine_ended.wait()
            return
        self._engine_ended = anyio.Event()
        try:
            await self._end_engine_now()
        finally:
            self._engine_ended.set()

    async def _end_engine_now(self) -> None:
        session = self._session
        session.closing = True
        session.link.phase = "close"
        # Nested, because a native cancellation may come into any of these waits: what follows must happen all the same.
        try:
            try:
                await self._keeper.stop(self._options.shutdown)
                await self._flush()
            finally:
                session.closed = True
                session.close_waiters(lambda: EngineClosedError("the client was closed"))
                session.link.ended.set()
                await self._end_services()
        finally:
            session.endpoints.close_sockets()
            if session.link.host is not None:
                session.link.host.close()
            session.endpoints.close()

    async def _unwind_fork(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the scopes and end the tasks, of which a fork has copies, and touch nothing that is the parent's."""
        assert self._body_scope is not None
        self._services_scope.cancel()
        with contextlib.suppress(BaseExceptionGroup):  # the body's own goes on
            self._body_scope.__exit__(kind, error, traceback)
        await self._leave_group(error)

    def _end_at_once(self) -> None:
        """Leave nothing behind of a block whose loop has ended before it was left."""
        session = self._session
        if session.closed:
            return
        session.closing = session.closed = True
        # What the loop still had registered goes with it: RuntimeError says that there is none to tell.
        with contextlib.ExitStack() as steps:
            steps.enter_context(contextlib.suppress(RuntimeError))
            steps.callback(session.endpoints.close)
            if (host := session.link.host) is not None:
                for step in (host.close, host.reap, host.kill):
                    steps.callback(step)
            steps.callback(session.endpoints.close_sockets)

    async def _flush(self) -> None:
        """Let the engine's last words and the warnings about its end come out, which a blocked stderr may prevent."""
        host = self._session.link.host
        with anyio.move_on_after(FLUSH_LIMIT, shield=True):
            if host is not None and host.output is not None:
                await self._session.relay.flush(host.output)
            while notices.are_pending():  # noqa: ASYNC110 - the thread that logs belongs to no loop
                await anyio.sleep(0.001)

    async def _end_services(self) -> None:
        self._services_scope.cancel()
        if self._services_ended is not None:
            with anyio.CancelScope(shield=True):
                await self._services_ended.wait()

    async def _leave_group(self, error: BaseException | None) -> bool:
        """Leave the task group as a nursery would, but with bare errors: the body's own comes first."""
        cancelled = error if isinstance(error, anyio.get_cancelled_exc_class()) else None
        try:
            if cancelled is None:
                await self._group.__aexit__(None, None, None)
                return False
            return bool(await self._group.__aexit__(type(cancelled), cancelled, cancelled.__traceback__))
        except BaseExceptionGroup as group:
            bodys_own = error if cancelled is None else None
            failure = one_error(group, bodys_own)
            if bodys_own is not None:
                return False
            raise failure from None
        except anyio.get_cancelled_exc_class():
            if error is not None:
                return False  # ``error`` goes on by itself
            raise
