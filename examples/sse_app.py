"""A small frontend: server-sent events over one engine. sse_trio.py and sse_asyncio.py serve this application.

    POST /generate     {"prompt": "...", "max_tokens": 32, "stop": ["..."]}; a stream of  data: {"text": ...}
                       {"messages": [{"role": "user", "content": "..."}]} in place of a prompt, for a chat
    GET /health        the engine's health; 503 if it is not alive
    GET /statistics    what the client and the engine hold right now

A client that disconnects aborts its request. When the engine dies, streams that are under way end with an event
``error``, and new requests get 503.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
import sys
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from _common import Model
from anyengine import (
    EngineClient,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    ModelError,
    RequestFailedError,
    RequestStalledError,
    SamplingParams,
    TooManyRequestsError,
)
from anyengine.text import TextStream


def make_app(client: EngineClient, model: Model, ending: anyio.Event) -> Starlette:
    """The application for an engine that is ready. Set ``ending`` to have its streams end, each with an error event."""
    text = model.text  # read here, before there is anybody whom it would hold up

    async def generate(request: Request) -> Response:
        try:
            prompt, sampling, stop = parse(await request.json())
            stream = text.open_stream(client, prompt, sampling, stop=stop)
        except (EngineError, TypeError, ValueError) as error:
            return failure(error)
        return EventStream(stream, ending)

    async def health(request: Request) -> Response:
        report = client.health()
        return JSONResponse(dataclasses.asdict(report), status_code=200 if report else 503)

    async def statistics(request: Request) -> Response:
        return JSONResponse(dataclasses.asdict(client.statistics()))

    return Starlette(
        routes=[
            Route("/generate", generate, methods=["POST"]),
            Route("/health", health),
            Route("/statistics", statistics),
        ]
    )


def parse(body: Any) -> tuple[Any, SamplingParams, Any]:
    """A request's prompt (text or messages), parameters and stop strings.

    :raises ValueError: if the body is not what it should be
    """
    prompt = body.get("messages", body.get("prompt")) if isinstance(body, dict) else None
    is_chat = isinstance(prompt, list) and "messages" in body and all(isinstance(message, dict) for message in prompt)
    if not prompt or not (is_chat or (isinstance(prompt, str) and "messages" not in body)):
        raise ValueError('expected a JSON object {"prompt": "some text", "max_tokens": 32}, or with "messages"')
    return prompt, SamplingParams(max_tokens=body.get("max_tokens", 32), temperature=0.0), body.get("stop", [])


class EventStream(Response):
    """The response to one request; it ends early when ``ending`` is set.

    Starlette's StreamingResponse takes an async generator, and a generator that is dropped half-way leaves its blocks
    at some later time. Here the request's block is in the task that serves the response and ends with it.
    """

    def __init__(self, stream: TextStream, ending: anyio.Event) -> None:
        self._stream = stream
        self._ending = ending
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        error: Exception | None = None
        async with anyio.create_task_group() as group:
            streaming = anyio.CancelScope()
            group.start_soon(self._await_disconnect, receive, group.cancel_scope)
            group.start_soon(self._await_ending, streaming)
            try:
                with streaming:
                    await self._send_events(send)
            except (EngineError, TypeError) as its_own:  # a prompt that cannot be is found when the stream is entered
                error = its_own
            if streaming.cancelled_caught:
                error = EngineClosedError("the server is shutting down")
            if error is not None and self._started:
                await self._send_event(send, {"error": summary(error)}, "event: error\n", last=True)
            elif error is not None:
                await failure(error)(scope, receive, send)
            group.cancel_scope.cancel()

    async def _await_ending(self, scope: anyio.CancelScope) -> None:
        await self._ending.wait()
        scope.cancel()

    async def _await_disconnect(self, receive: Receive, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    async def _send_events(self, send: Send) -> None:
        async with self._stream as request:
            async for output in request:
                if not self._started:
                    # Only now, so that a request which the engine refuses gets a status of its own.
                    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    self._started = True
                event = {"text": output.text, "finish_reason": output.finish_reason}
                await self._send_event(send, event, last=output.finish_reason is not None)

    async def _send_event(self, send: Send, event: dict[str, Any], prefix: str = "", *, last: bool = False) -> None:
        data = f"{prefix}data: {json.dumps(event)}\n\n".encode()
        await send({"type": "http.response.body", "body": data, "more_body": not last})


STATUS: list[tuple[type[Exception] | tuple[type[Exception], ...], int]] = [
    (TooManyRequestsError, 429),
    (RequestStalledError, 504),
    (RequestFailedError, 500),
    ((EngineDeadError, EngineClosedError), 503),
    ((TypeError, ValueError, ModelError), 400),  # a request that cannot be
]


def failure(error: Exception) -> Response:
    """The status says whose fault it was, the first line of the message what was wrong."""
    status = next((status for kind, status in STATUS if isinstance(error, kind)), 500)
    return JSONResponse({"error": summary(error)}, status_code=status)


def summary(error: Exception) -> str:
    """The first line; a crash report goes on with tracebacks, which are for the log."""
    return str(error).partition("\n")[0]


def listen(port: int) -> socket.socket:
    """A listening socket, made before the engine loads: if the port is taken, that is known at once."""
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        sys.exit(f"cannot listen: {error.strerror}")
    except OverflowError:
        sys.exit(f"cannot listen: port {port} is not from 0 to 65535")
    host, chosen = listener.getsockname()
    print(f"listening on http://{host}:{chosen}; answers come when the engine is ready", flush=True)
    return listener


class Shutdown:
    """SIGINT and SIGTERM ask the server to end. Before it runs, and the second time, they cancel everything.

    ``requested`` is set by the first signal. Set ``serving`` to True when somebody waits for it.
    """

    def __init__(self) -> None:
        self.requested = anyio.Event()
        self.serving = False

    async def watch(self, scope: anyio.CancelScope) -> None:
        """Run this in the task group of which ``scope`` is the cancel scope."""
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                if self.requested.is_set() or not self.serving:
                    scope.cancel()
                self.requested.set()
