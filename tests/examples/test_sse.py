"""The SSE frontends: streams, disconnects, a dead engine, and how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from tests.cli.programs import Sandbox, sandbox
from tests.helpers import until_sync

__all__ = ["sandbox"]

SENTENCE = " a scripted engine recites this sentence to everybody"
FRONTENDS = ["sse_asyncio", "sse_trio"]
LONG = {"prompt": "Say it", "max_tokens": 900}  # 18 seconds


class Frontend:
    """A frontend under test, and a client for it."""

    def __init__(self, sandbox: Sandbox, name: str) -> None:
        self.sandbox = sandbox
        command = [sys.executable, "-u", f"examples/{name}.py", "--engine", "scripted", "--port", "0"]
        self.process = sandbox.start(command)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found is not None, line
        self.client = httpx.Client(base_url=found[0], timeout=20)

    def engine(self) -> int:
        """The engine's pid; returns when the engine is ready."""
        return self.client.get("/health").json()["pid"]

    def statistics(self) -> dict[str, Any]:
        return self.client.get("/statistics").json()

    def end(self, number: signal.Signals | None) -> None:
        """Send a signal, if one is given, and wait for the end, which must be in good order."""
        if number is not None:
            self.process.send_signal(number)
        _, stderr = self.process.communicate(timeout=20)
        assert self.process.returncode == 0, stderr
        assert not self.sandbox.processes()
        assert "Traceback" not in stderr
        assert "rror" not in stderr


@contextmanager
def running(sandbox: Sandbox, name: str) -> Iterator[Frontend]:
    frontend = Frontend(sandbox, name)
    try:
        yield frontend
    finally:
        frontend.client.close()
        if frontend.process.poll() is None:
            frontend.process.kill()


@pytest.fixture(params=FRONTENDS)
def frontend(request: pytest.FixtureRequest, sandbox: Sandbox) -> Iterator[Frontend]:
    with running(sandbox, request.param) as frontend:
        yield frontend


@pytest.fixture(scope="module", params=FRONTENDS)
def lasting_frontend(request: pytest.FixtureRequest) -> Iterator[Frontend]:
    """One for all tests that leave it as it was, which ends in good order after them."""
    sandbox = Sandbox()
    try:
        with running(sandbox, request.param) as frontend:
            yield frontend
            frontend.end(signal.SIGTERM)
    finally:
        sandbox.close()


def events(response: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a stream, each with its name."""
    name = "message"
    for line in response.iter_lines():
        key, _, value = line.partition(": ")
        if key == "event":
            name = value
        elif key == "data":
            yield name, json.loads(value)
            name = "message"


def test_tokens_are_streamed(lasting_frontend: Frontend) -> None:
    with lasting_frontend.client.stream("POST", "/generate", json={"prompt": "Hi", "max_tokens": 20}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream"
        received = [event for _, event in events(response)]
    assert "".join(event["text"] for event in received) == SENTENCE[:20]
    assert [event["finish_reason"] for event in received] == [None] * (len(received) - 1) + ["length"]
    assert len(received) > 5, "it came in one piece"
    health = lasting_frontend.client.get("/health")
    assert health.status_code == 200
    assert health.json()["state"] == "alive"


def test_chats_and_stop_strings(lasting_frontend: Frontend) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 900, "stop": ["to every", "nothing"]}
    with lasting_frontend.client.stream("POST", "/generate", json=body) as response:
        received = [event for _, event in events(response)]
    assert "".join(event["text"] for event in received) == " a scripted engine recites this sentence "
    assert received[-1]["finish_reason"] == "stop"
    statistics = lasting_frontend.statistics()
    assert statistics["live_requests"] == statistics["aborting_requests"] == 0


def test_a_client_that_disconnects_frees_its_slot(lasting_frontend: Frontend) -> None:
    with lasting_frontend.client.stream("POST", "/generate", json=LONG) as response:
        stream = events(response)  # (dropping this generator would close the connection already)
        next(stream)
        assert lasting_frontend.statistics()["live_requests"] == 1

    # Leaving the block has closed the connection.
    def freed() -> bool:
        now = lasting_frontend.statistics()
        return now["live_requests"] == now["aborting_requests"] == 0 and not now["engine"].get("running")

    until_sync(freed, 10)  # by itself it would have ended after 18


def test_bad_requests(lasting_frontend: Frontend) -> None:
    for body, message in (
        (b"{", "Expecting"),
        (b"[]", "expected a JSON object"),
        (b'{"prompt": ""}', "expected a JSON object"),
        (b'{"prompt": 5}', "expected a JSON object"),
        (b'{"messages": "a"}', "expected a JSON object"),
        (b'{"messages": ["a"]}', "expected a JSON object"),
        (b'{"messages": [5]}', "expected a JSON object"),
        (b'{"messages": [{"role": "user", "content": "a"}, 5]}', "expected a JSON object"),
        (b'{"messages": "a", "prompt": "a"}', "expected a JSON object"),
        (b'{"messages": [{"role": "usr", "content": "a"}]}', "the role 'usr'"),
        (b'{"prompt": "a", "stop": [""]}', "stop[0]=''"),
        (b'{"prompt": "a", "stop": 5}', "stop=5"),
        (b'{"prompt": "\\ud83c"}', "surrogate"),
        (b'{"prompt": "a", "max_tokens": 0}', "SamplingParams.max_tokens=0"),
        (b'{"prompt": "a", "max_tokens": "b"}', "SamplingParams.max_tokens='b'"),
        (json.dumps({"prompt": "a" * 5000}).encode(), "max_model_len"),  # which the engine refuses
    ):
        response = lasting_frontend.client.post("/generate", content=body)
        assert response.status_code == 400
        assert message in response.json()["error"]
    assert lasting_frontend.statistics()["live_requests"] == 0


def test_the_engine_dies_during_a_stream(frontend: Frontend) -> None:
    engine = frontend.engine()
    with frontend.client.stream("POST", "/generate", json=LONG) as response:
        stream = events(response)
        name, _ = next(stream)
        assert name == "message"
        os.kill(engine, signal.SIGKILL)
        *_, (name, event) = stream
    assert name == "error"
    assert event == {"error": f"engine 0 (pid {engine}) died while it was serving: signal SIGKILL (9)"}
    health = frontend.client.get("/health")
    assert (health.status_code, health.json()["state"]) == (503, "dead")
    refused = frontend.client.post("/generate", json=LONG)
    assert refused.status_code == 503
    assert refused.json() == event
    frontend.end(signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_streams_run_ends_everything(frontend: Frontend, number: signal.Signals) -> None:
    with frontend.client.stream("POST", "/generate", json=LONG) as response:
        stream = events(response)
        next(stream)
        frontend.process.send_signal(number)
        *_, last = stream
        frontend.end(None)
    assert last == ("error", {"error": "the server is shutting down"})


def test_a_signal_while_the_engine_loads(sandbox: Sandbox) -> None:
    for name in FRONTENDS:
        frontend = Frontend(sandbox, name)
        sandbox.engine(frontend.process)
        frontend.end(signal.SIGTERM)


@pytest.mark.parametrize("name", FRONTENDS)
def test_a_port_that_there_is_not(sandbox: Sandbox, name: str) -> None:
    result = sandbox.run([sys.executable, f"examples/{name}.py", "--engine", "scripted", "--port", "99999"], 20)
    assert (result.returncode, result.stderr) == (1, "cannot listen: port 99999 is not from 0 to 65535\n")


def test_a_port_that_is_taken(frontend: Frontend, sandbox: Sandbox) -> None:
    port = str(frontend.client.base_url.port)
    result = sandbox.run([*frontend.process.args[:-1], port], 20)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "Address already in use" in result.stderr
    frontend.engine()  # loading may be interrupted too, but this is about the other one
    frontend.end(signal.SIGINT)
