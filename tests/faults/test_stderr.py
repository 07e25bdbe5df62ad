"""A stderr that nobody reads, or that is no file at all, holds up no restart, no close, no loop and no exit."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import anyio
import pytest
from tests.helpers import until, until_sync

from anyengine import EngineClient, EngineDeadError, EngineSpec, RestartPolicy, SamplingParams, open_engine_client
from anyengine.client import output_relay, services
from anyengine.client.engine_client import session_of
from anyengine.notices import are_pending

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

ENGINE = """
    import sys
    from anyengine.engine import utility
    from anyengine.engines.scripted import ScriptedEngine
    class LoudEngine(ScriptedEngine):
        @utility
        def shout(self, line, times):
            for _ in range(times):
                sys.stderr.write(line + "\\n")
            sys.stderr.flush()
"""

AT_ONCE = RestartPolicy(limit=3, backoff=0)


@pytest.fixture
def loud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSpec:
    """An engine that prints what it is told to."""
    (tmp_path / "loud_engine.py").write_text(textwrap.dedent(ENGINE))
    monkeypatch.syspath_prepend(str(tmp_path))
    return EngineSpec("loud_engine:LoudEngine")


class Pipe:
    """A pipe that is full, until somebody reads it."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        self.stream: TextIO = os.fdopen(writer, "w", buffering=1)
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b".")
        os.set_blocking(writer, True)
        self._read = bytearray()
        self._ending = False
        self._thread = threading.Thread(target=self._run)

    def read(self) -> None:
        """Read from now on."""
        self._thread.start()

    def says(self, text: str) -> bool:
        """Whether this has been read."""
        return text.encode() in self._read

    def _run(self) -> None:
        while data := os.read(self._reader, 65536):
            self._read += data

    def close(self) -> None:
        if self._thread.ident is None:
            self.read()
        self.stream.close()
        self._thread.join()
        os.close(self._reader)


class DeafStream:
    """Has no descriptor that could be asked, and blocks in every write."""

    def __init__(self) -> None:
        self.heard = threading.Event()
        self._text = ""

    def write(self, text: str) -> None:
        self.heard.wait()
        self._text += text

    def read(self) -> None:
        self.heard.set()

    def says(self, text: str) -> bool:
        return text in self._text

    def close(self) -> None:
        self.heard.set()


@pytest.fixture(params=[Pipe, DeafStream], ids=["pipe", "object"])
def blocked(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A stream that blocks."""
    blocked = request.param()
    yield blocked
    blocked.close()
    until_sync(lambda: not are_pending())


@pytest.fixture
def as_stderr(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Makes a stream this process's stderr, to which the log goes as well."""
    handlers: list[logging.Handler] = []

    def install(blocked: Any) -> None:  # in the test itself: when that begins, pytest puts its own stream there
        stream = getattr(blocked, "stream", blocked)
        monkeypatch.setattr(sys, "stderr", stream)
        handlers.append(logging.StreamHandler(stream))
        logging.getLogger("anyengine").addHandler(handlers[0])

    yield install
    for handler in handlers:
        logging.getLogger("anyengine").removeHandler(handler)


@contextlib.asynccontextmanager
async def the_loop_goes_on(limit: float = 1.0) -> AsyncIterator[None]:
    """The loop is never held up for long, on a machine that may be busy with other things."""
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            before = time.monotonic()
            await anyio.sleep(0.005)
            longest = max(longest, time.monotonic() - before)

    async with anyio.create_task_group() as group:
        group.start_soon(tick)
        yield
        group.cancel_scope.cancel()
    assert longest < limit


async def kill(client: EngineClient) -> None:
    os.kill(client.health().pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        await client.wait_dead()


def held_for_output(client: EngineClient) -> int:
    """Bytes of memory that the engine's output takes."""
    host = session_of(client).link.host
    assert host is not None
    return os.fstat(host.output._file.fd).st_blocks * 512  # type: ignore[attr-defined, union-attr]


async def test_a_stderr_that_nobody_reads_holds_up_nothing_and_memory_is_bounded(
    loud: EngineSpec, blocked: Any, as_stderr: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_stderr(blocked)
    monkeypatch.setattr(output_relay, "STUCK", 0.05)
    with anyio.fail_after(30):
        async with the_loop_goes_on(), open_engine_client(loud, restart=AT_ONCE) as client:
            await client.call_utility("shout", "x" * 1023, 48 * 1024)
            await client.call_utility("shout", "last words", 1)
            await until(lambda: held_for_output(client) < 6 * 2**20)
            for _ in range(2):
                await kill(client)  # which is logged, too
                assert (await client.generate([1], SamplingParams(max_tokens=1))).token_ids == [2]
            os.kill(client.health().pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError) as caught:
                await client.wait_dead()
            await client.call_utility("shout", "heard", 1)
            blocked.read()
            await until(lambda: blocked.says("heard"))
            await until(lambda: blocked.says("restart 3 of 3"))
    assert blocked.says("MiB of the engine's output not shown ...]")
    assert caught.value.report.signal == signal.SIGKILL


async def test_the_report_has_the_last_words_that_nobody_read(
    loud: EngineSpec, blocked: Any, as_stderr: Callable[[Any], None]
) -> None:
    as_stderr(blocked)
    async with the_loop_goes_on(), open_engine_client(loud, restart=AT_ONCE) as client:
        await client.call_utility("shout", "x" * 1023, 8 * 1024)
        await client.call_utility("shout", "last words", 1)
        os.kill(client.health().pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError) as caught:
            await client.wait_dead()
    assert caught.value.report.stderr_tail.endswith("\nlast words")


async def test_leaving_the_block_waits_no_longer_than_the_flush_limit(
    loud: EngineSpec, blocked: Any, as_stderr: Callable[[Any], None]
) -> None:
    as_stderr(blocked)
    async with open_engine_client(loud, restart=AT_ONCE) as client:
        await client.call_utility("shout", "never read", 1)
        await kill(client)
        await client.call_utility("shout", "never read", 1)
        left_at = time.monotonic()
    assert time.monotonic() - left_at < output_relay.FLUSH_LIMIT + 0.5


async def test_a_fast_reader_gets_everything(loud: EngineSpec, capfd: pytest.CaptureFixture[str]) -> None:
    async with open_engine_client(loud) as client:
        await client.call_utility("shout", "x" * 1023, 8 * 1024)
        await client.call_utility("shout", "last words", 1)
    shown = capfd.readouterr().err
    assert "not shown" not in shown
    assert shown.count("x") == 1023 * 8 * 1024
    assert shown.endswith("last words\n")


async def test_a_slow_reader_gets_everything_however_long_it_takes(
    loud: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(OnlyWrites):
        def write(self, text: str) -> None:
            time.sleep(0.0003)
            super().write(text)

    monkeypatch.setattr(output_relay, "STUCK", 0.05)
    monkeypatch.setattr(output_relay, "MOST_UNREAD_IF_STUCK", 1024)
    async with open_engine_client(loud) as client:
        slow = Slow()
        monkeypatch.setattr(sys, "stderr", slow)
        await client.call_utility("shout", "x" * 1023, 2200)
        await until(lambda: slow.text.count("x") == 1023 * 2200 or "not shown" in slow.text)
        assert "not shown" not in slow.text
        monkeypatch.undo()


class OnlyWrites:
    """A stream as small as some applications make theirs."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


class Raises:
    """A stream that raises whatever it is given."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text
        raise self.error


class FlushRaises(OnlyWrites):
    """Takes it, and cannot pass it on."""

    def flush(self) -> None:
        raise OSError(28, "No space left on device")

    def fileno(self) -> Any:
        return "no number"


class CallsBack(OnlyWrites):
    """Asks the client and the loop, from a thread that is in no loop."""

    client: EngineClient

    def write(self, text: str) -> None:
        self.client.health()
        super().write(text)
        anyio.from_thread.run(anyio.sleep, 0)


async def test_an_stderr_of_the_applications_own_never_ends_the_client(
    loud: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    narrow = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(services, "PULSE", 0.05)
    calls_back = CallsBack()
    with anyio.fail_after(30):
        async with open_engine_client(loud) as client:
            calls_back.client = client
            output = session_of(client).link.host.output  # type: ignore[union-attr]
            assert output is not None
            for stream in (
                OnlyWrites(),
                FlushRaises(),
                Raises(OSError(5, "Input/output error")),
                Raises(KeyError("x")),
                Raises(SystemExit(3)),
                Raises(KeyboardInterrupt()),
                calls_back,
                object(),
                None,
                closed,
                io.BytesIO(),
                narrow,
            ):
                monkeypatch.setattr(sys, "stderr", stream)
                await client.call_utility("shout", "ünïcode", 1)
                await until(lambda: output.unread() == 0)
                await until(lambda: "anyengine-output" not in [thread.name for thread in threading.enumerate()])
                if hasattr(stream, "text"):
                    assert stream.text == "ünïcode\n"
            assert (await client.generate([1], SamplingParams(max_tokens=1))).token_ids == [2]


async def test_a_log_handler_that_raises_ends_nothing(loud: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append((record.getMessage().partition(" ")[0], record.filename))
            raise SystemExit(3)

    seen: list[tuple[str, str]] = []
    handler = Handler()
    logger = logging.getLogger("anyengine")
    logger.addHandler(handler)
    try:
        async with open_engine_client(loud, restart=AT_ONCE) as client:
            await kill(client)
            assert (await client.generate([1], SamplingParams(max_tokens=1))).token_ids == [2]
    finally:
        logger.removeHandler(handler)
    assert seen == [("engine", "keeper.py")]


SCRIPT = """
import os, signal, sys
import anyio
from anyengine import EngineDeadError, RestartPolicy, SamplingParams, open_engine_client
from anyengine.testing import scripted_spec

async def main():
    async with open_engine_client(scripted_spec(), restart=RestartPolicy(backoff=0)) as client:
        os.kill(client.health().pid, signal.SIGKILL)
        try:
            await client.wait_dead()
        except EngineDeadError:
            pass
        print((await client.generate([1], SamplingParams(max_tokens=1))).token_ids, flush=True)

anyio.run(main, backend={backend!r})
"""


def test_an_interpreter_whose_stderr_is_blocked_ends(anyio_backend: Any) -> None:
    """Nothing is configured, so Python's logging writes to stderr by itself."""
    assert end_of(SCRIPT.format(backend=anyio_backend[0])) == (0, b"[2]\n")


THREAD_SCRIPT = """
import sys
import anyio
from anyengine import RequestFailedError, SamplingParams, open_engine_client
from anyengine.engines.scripted import ScriptedEngine
from anyengine import EngineSpec

class Raising(ScriptedEngine):
    def add_request(self, request):
        if request.prompt_token_ids[0] == 13:
            raise RuntimeError("x" * 1000)
        super().add_request(request)

async def main():
    sys.modules["raising"] = sys.modules["__main__"]
    async with open_engine_client(EngineSpec("raising:Raising"), placement="thread") as client:
        for _ in range(20):
            try:
                await client.generate([13])
            except RequestFailedError:
                pass
        print((await client.generate([1], SamplingParams(max_tokens=1))).token_ids, flush=True)

anyio.run(main, backend={backend!r})
"""


def test_an_engine_in_a_thread_goes_on_though_nobody_reads_its_warnings(anyio_backend: Any) -> None:
    assert end_of(THREAD_SCRIPT.format(backend=anyio_backend[0])) == (0, b"[2]\n")


def end_of(script: str) -> tuple[int, bytes]:
    """The exit code and output of a program whose stderr nobody reads."""
    pipe = Pipe()
    try:
        command = [sys.executable, "-c", script]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=pipe.stream, timeout=30, check=False)
    finally:
        pipe.close()
    return result.returncode, result.stdout
