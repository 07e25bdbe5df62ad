"""The event loop behind the client, a client on it, and interrupts at a moment that a test chooses."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from tests.helpers import until_sync

from anyengine import SyncEngineClient, open_sync_engine_client
from anyengine.sync_client.loop_handle import Backend
from anyengine.testing import scripted_spec

Opener = Callable[..., AbstractContextManager[SyncEngineClient]]
Interrupting = Callable[..., AbstractContextManager[None]]


@pytest.fixture(params=["asyncio", "trio"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


@pytest.fixture
def open_scripted(backend: Backend) -> Opener:
    """Opens a client of a scripted engine with the arguments ``engine``; the others are the client's own."""

    def open_client(engine: dict[str, Any] | None = None, **options: Any) -> AbstractContextManager[SyncEngineClient]:
        return open_sync_engine_client(scripted_spec(**(engine or {})), backend=backend, **options)

    return open_client


@pytest.fixture
def interrupting() -> Iterator[Interrupting]:
    """Within the block, SIGINT comes to the main thread as soon as a condition is true."""
    # Whoever starts this suite in a shell's background has SIGINT ignored.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)

    @contextlib.contextmanager
    def interrupt_when(condition: Callable[[], object]) -> Iterator[None]:
        def interrupt() -> None:
            until_sync(condition, 30)  # the engine may have to start first
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            yield
        finally:
            thread.join()

    try:
        yield interrupt_when
    finally:
        signal.signal(signal.SIGINT, previous)
