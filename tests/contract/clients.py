"""Every kind of client behind one face, that of ``EngineClient``, and the table of what a kind cannot do.

The clients of a process and of a thread are what the face is taken from. The blocking ones are called in worker
threads. The in-process one is stepped here, by a dispatcher as a frontend would have it.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from importlib import import_module
from typing import Any, Literal, NamedTuple, Self, cast

import anyio
import pytest
from anyio import to_thread
from anyio.lowlevel import checkpoint

from anyengine import (
    ClientStatistics,
    Completion,
    EngineClient,
    EngineError,
    EngineInfo,
    EngineSpec,
    Health,
    OutputDetails,
    RequestOutput,
    StepOutputs,
    open_engine_client,
)
from anyengine.client.waiters import without_rows
from anyengine.inproc_client import InprocEngineClient
from anyengine.sync_client.opening import open_sync_engine_client
from anyengine.sync_client.portal import Backend
from anyengine.sync_client.sync_engine_client import SyncEngineClient
from anyengine.testing import scripted_spec

Kind = Literal["process", "thread", "attached", "sync", "inproc"]
Ability = Literal["signal", "status", "restart", "cancel", "watch", "wait", "encode", "options"]

CANNOT: dict[Kind, dict[Ability, str]] = {
    "process": {},
    "thread": {
        "signal": "thread: a signal, or a crash of native code, ends the whole process",
    },
    "attached": {
        "status": "attached: how its process ended, whoever started it is told",
        "restart": "attached: whoever started the engine starts it again; see tests/attached",
    },
    "sync": {
        "cancel": "sync: a thread's blocking call ends by an interrupt only; see tests/sync_client",
    },
    "inproc": {
        "status": "inproc: there is no process",
        "restart": "inproc: there is nobody to start it again",
        "signal": "inproc: a signal, or a crash of native code, ends the whole process",
        "cancel": "inproc: no call of the client waits, so there is nothing to cancel",
        "watch": "inproc: nothing happens between its calls, so it has no health, statistics or wait_dead",
        "wait": "inproc: nobody steps the engine while a call waits, so a call ends at once or is refused",
        "encode": "inproc: values do not travel, they are handed over",
        "options": "inproc: it has none of the options of open_engine_client, and no stall_limit",
    },
}
"""What a kind of client cannot do, and why. Tests are skipped for no other reason."""


def needs(*abilities: Ability) -> pytest.MarkDecorator:
    """Skip a test for clients that cannot do one of these."""
    return pytest.mark.needs(*abilities)


class Setting(NamedTuple):
    """A kind of client, the loop that the test runs on, and for a blocking client the loop behind it."""

    kind: Kind
    backend: Backend = "asyncio"
    use_uvloop: bool = False
    portal: Backend = "asyncio"

    def __str__(self) -> str:
        return f"{self.kind}-{self.portal if self.kind == 'sync' else 'uvloop' if self.use_uvloop else self.backend}"

    @property
    def backend_options(self) -> dict[str, bool]:
        return {"use_uvloop": True} if self.use_uvloop else {}

    def can(self, ability: Ability) -> bool:
        return ability not in CANNOT[self.kind]


SETTINGS: list[Setting] = [
    Setting("process", "asyncio"),
    Setting("process", "asyncio", use_uvloop=True),
    Setting("process", "trio"),
    Setting("thread", "asyncio"),
    Setting("thread", "trio"),
    Setting("attached", "asyncio"),
    Setting("attached", "trio"),
    Setting("sync", portal="asyncio"),
    Setting("sync", portal="trio"),
    Setting("inproc"),
]

Opener = Callable[..., AbstractAsyncContextManager[EngineClient]]
"""``open_client(engine_arguments, **options)``: a client of a scripted engine."""


def open_client_of(
    setting: Setting, engine: dict[str, Any] | EngineSpec | None = None, **options: Any
) -> AbstractAsyncContextManager[EngineClient]:
    """A client of the setting's kind, with the face of an ``EngineClient``."""
    spec = engine if isinstance(engine, EngineSpec) else scripted_spec(**(engine or {}))
    if setting.kind == "inproc":
        return cast("AbstractAsyncContextManager[EngineClient]", _open_inproc(spec))
    if setting.kind == "sync":
        return cast("AbstractAsyncContextManager[EngineClient]", _open_sync(spec, setting.portal, **options))
    if setting.kind == "attached":
        return _open_attached(spec, **options)
    return open_engine_client(spec, placement=setting.kind, **options)


@asynccontextmanager
async def _open_attached(spec: EngineSpec, **options: Any) -> AsyncIterator[EngineClient]:
    with tempfile.TemporaryDirectory() as directory:
        address = f"ipc://{directory}/engine"
        arguments = [f"{name}={json.dumps(value)}" for name, value in spec.arguments.items()]
        command = [sys.executable, "-m", "anyengine.engine.attach", spec.path, *arguments, "--connect", address]
        path = os.pathsep.join(sys.path)
        engine = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path})
        try:
            async with open_engine_client(address=address, **options) as client:
                yield client
        finally:
            engine.kill()
            engine.wait()


class _BlockingFace:
    """A client whose blocking methods are awaited here."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._client, name)

        async def call(*args: Any, **options: Any) -> Any:
            return await self._run(functools.partial(method, *args, **options))

        return call

    async def _run(self, function: Callable[[], Any]) -> Any:
        raise NotImplementedError


# ---- blocking, in worker threads ----


@asynccontextmanager
async def _open_sync(spec: EngineSpec, backend: Backend, **options: Any) -> AsyncIterator[_SyncFace]:
    block = open_sync_engine_client(spec, backend=backend, **options)
    client = await to_thread.run_sync(block.__enter__)
    try:
        yield _SyncFace(client)
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(block.__exit__, *sys.exc_info())


class _SyncFace(_BlockingFace):
    _client: SyncEngineClient

    async def _run(self, function: Callable[[], Any]) -> Any:
        # Only a test that fails cancels this: the thread then gets its error when the client is closed.
        return await to_thread.run_sync(function, abandon_on_cancel=True)

    def health(self, timeout: float = 2.0) -> Health:
        return self._client.health(timeout)

    def statistics(self) -> ClientStatistics:
        return self._client.statistics()

    def open_request(self, *args: Any, **options: Any) -> _SyncStreamFace:
        return _SyncStreamFace(self._client.stream(*args, **options), self._run)


class _SyncStreamFace:
    def __init__(self, stream: Any, run: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        self._stream = stream
        self._run = run

    @property
    def request_id(self) -> str | None:
        return self._stream.request_id

    async def __aenter__(self) -> Self:
        await self._run(self._stream.__enter__)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        with anyio.CancelScope(shield=True):
            await self._run(functools.partial(self._stream.__exit__, *exc_info))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        output = await self._run(lambda: next(self._stream, None))
        if output is None:
            raise StopAsyncIteration
        return output

    async def completion(self) -> Completion:
        return await self._run(self._stream.completion)


# ---- in process, stepped by whoever wants an output ----


@asynccontextmanager
async def _open_inproc(spec: EngineSpec) -> AsyncIterator[_InprocFace]:
    module, _, name = spec.path.partition(":")
    engine = getattr(import_module(module), name)(**spec.arguments)
    with InprocEngineClient(engine) as client:
        yield _InprocFace(client)


class _InprocFace(_BlockingFace):
    """Steps the engine for whoever waits, and gives each stream its rows; the others are for ``get_output``."""

    _client: InprocEngineClient

    def __init__(self, client: InprocEngineClient) -> None:
        super().__init__(client)
        self.streams: dict[int, _InprocStream] = {}
        self._steps: deque[StepOutputs] = deque()
        self._count = 0

    async def _run(self, function: Callable[[], Any]) -> Any:
        await checkpoint()
        return function()

    def health(self) -> Health:
        """Alive as far as anybody knows; the steps are those that brought something."""
        return Health(state="alive", rank=0, pid=0, steps=self._count, last_step_age=None)

    def statistics(self) -> ClientStatistics:
        """Of the client only this is known: whether it has unfinished requests."""
        return ClientStatistics(
            live_requests=int(self._client.has_unfinished_requests()),
            aborting_requests=0,
            pending_calls=0,
            unread_outputs=len(self._steps),
            waiting_requests=0,
            tracked_buffers=0,
        )

    async def abort_requests(self, handles: Any) -> None:
        await self._run(lambda: self._client.abort_requests(handles))
        self._steps = without_rows(set(handles), self._steps)

    async def get_output(self) -> StepOutputs:
        while not self._steps:
            await self.step()
        return self._steps.popleft()

    async def step(self) -> None:
        await checkpoint()
        outputs = self._client.get_output()
        self._count += bool(len(outputs))
        for handle, tokens, details in outputs.rows():
            if handle in self.streams:
                self.streams[handle].rows.append((tokens, details))
        others = [handle not in self.streams for handle in outputs.handles]
        if any(others):
            self._steps.append(outputs.select(others))

    def open_request(self, *args: Any, **options: Any) -> _InprocStream:
        return _InprocStream(self, functools.partial(self._client.add_request, *args, **options))

    async def generate(self, *args: Any, **options: Any) -> Completion:
        async with self.open_request(*args, **options) as request:
            return await request.completion()


class _InprocStream:
    def __init__(self, face: _InprocFace, add: Callable[[], int]) -> None:
        self.rows: list[tuple[Any, OutputDetails | None]] = []
        self._face = face
        self._add = add
        self._ended = False

    async def __aenter__(self) -> Self:
        self._handle = self._add()
        self._face.streams[self._handle] = self
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        with suppress(EngineError), anyio.CancelScope(shield=True):
            if not self._ended:
                await self._face.abort_requests([self._handle])
                await self._face.step()  # brings its last row
        del self._face.streams[self._handle]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        while not self.rows:
            await self._face.step()
        rows, self.rows = self.rows, []
        last = rows[-1][1]
        self._ended = last is not None and last.finish_reason is not None
        if last is not None and last.finish_reason == "error":
            raise last.to_error(self._handle)
        known = [details for _, details in rows if details is not None]
        return RequestOutput(
            request_id=str(self._handle),
            token_ids=[token for tokens, _ in rows for token in tokens],
            finish_reason=None if last is None else last.finish_reason,
            stop_reason=None if last is None else last.stop_reason,
            logprobs=[position for details in known for position in details.logprobs or ()] or None,
        )

    async def completion(self) -> Completion:
        outputs = [output async for output in self]
        return Completion(
            request_id=str(self._handle),
            token_ids=[token for output in outputs for token in output.token_ids],
            finish_reason=outputs[-1].finish_reason,
            stop_reason=outputs[-1].stop_reason,
            logprobs=[position for output in outputs for position in output.logprobs or ()] or None,
        )
