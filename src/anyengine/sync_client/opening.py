"""``open_sync_engine_client``: the block that owns an engine, for programs without an event loop."""

from __future__ import annotations

import importlib.util
import os
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn

from anyengine.brief import brief
from anyengine.client.admission import WhenFull
from anyengine.client.engine_client import EngineClient
from anyengine.client.keeper import RestartPolicy
from anyengine.client.not_entered import not_entered
from anyengine.client.opening import EngineClientBlock, open_engine_client
from anyengine.client.options import OnDeath, Placement
from anyengine.client.supervisor import ShutdownPolicy, StartLimits
from anyengine.process.launcher import ProcessLauncher
from anyengine.sync_client.loop_handle import Backend
from anyengine.sync_client.portal import Portal
from anyengine.sync_client.sync_engine_client import SyncEngineClient
from anyengine.types import EngineSpec, ProgressCallback

_START_LIMITS = StartLimits()
_SHUTDOWN = ShutdownPolicy()


def open_sync_engine_client(
    spec: EngineSpec | None = None,
    *,
    backend: Backend = "asyncio",
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
) -> SyncEngineClientBlock:
    """Run an engine for the length of a ``with`` block; the client's calls block.

    It is :func:`open_engine_client` behind an event loop in a thread of its own, with the same parameters, errors and
    promises. It works in any thread, in a notebook and inside a running event loop too, which it then blocks. An error
    of the block's body comes out bare, KeyboardInterrupt included, after the engine was ended; if the body ends without
    one though the engine died and nobody was told, ``EngineDeadError`` comes out.

    :param backend: which event loop runs in that thread
    :param on_death: ``"notify"``; a thread's code cannot be cancelled from outside
    :param on_progress: called in that thread, not in the caller's
    :raises ValueError: if ``backend`` is another, or ``on_death="cancel"``
    :raises ModuleNotFoundError: if ``backend="trio"`` and trio is not installed
    """
    if backend not in ("asyncio", "trio"):
        raise ValueError(f"backend={brief(backend)}: expected 'asyncio' or 'trio'")
    if importlib.util.find_spec(backend) is None:
        raise ModuleNotFoundError(f"backend={brief(backend)}: it is not installed here: pip install {backend}")
    if on_death == "cancel":
        raise ValueError(
            "on_death='cancel': the body of a blocking client is a thread's code, which cannot be cancelled; with "
            "'notify' every call that blocks gets EngineDeadError at once"
        )
    block = open_engine_client(
        spec,
        placement=placement,
        address=address,
        keys=keys,
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
    return SyncEngineClientBlock(block, backend)


class SyncEngineClientBlock:
    """The context manager that :func:`open_sync_engine_client` returns."""

    def __init__(self, block: EngineClientBlock, backend: Backend) -> None:
        self._block = block
        self._backend: Backend = backend
        self._portal: Portal[EngineClient] | None = None

    if not TYPE_CHECKING:  # for checkers of types the block has no such attributes

        def __getattr__(self, name: str) -> NoReturn:
            how = "with open_sync_engine_client(...) as client"
            raise AttributeError(not_entered(self, name, SyncEngineClient, how))

    def __enter__(self) -> SyncEngineClient:
        """Start the engine.

        :raises EngineStartError: if it does not get ready
        """
        if self._portal is not None:
            raise RuntimeError("this block was entered before; call open_sync_engine_client again")
        self._portal = Portal(self._block, self._backend)
        return SyncEngineClient(self._portal, self._portal.open())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._portal is not None
        try:
            self._portal.close()
        except Exception:
            if error is None:
                raise
            # The body's own error comes out, as from an async block.
