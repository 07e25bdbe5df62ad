"""One contestant in a process of its own: it opens a client on one event loop and runs what it is told to.

Commands come as lines of JSON on stdin, ``[name, arguments]``, and each is answered by one line on stdout. So several
contestants take turns in one run, none of them in another's event loop, memory or CPU time.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from anyio import to_thread

from anyengine import EngineSpec, open_engine_client
from benchmarks import bursts, churn, latency, lifecycle, sync, tensors, throughput
from benchmarks.baseline import BaselineClient

EMBEDS = EngineSpec("benchmarks.engines:EmbedsEngine", {"vocab_size": 2**31})

_OURS: dict[str, Callable[..., Awaitable[Any]]] = {
    "whole_steps": throughput.whole_steps,
    "streams": throughput.streams,
    "utility": latency.utility,
    "first_output": latency.first_output,
    "prompt_embeds": tensors.prompt_embeds,
    "prompt_embeds_in_frames": tensors.prompt_embeds_in_frames,
    "prompt_embeds_in_shared_storage": tensors.prompt_embeds_in_shared_storage,
    "longest_pause": tensors.longest_pause,
    "memory": lifecycle.memory,
    "churn_steps": churn.whole_steps,
    "churn_streams": churn.streams,
    "bursts": bursts.streams,
}
_OURS_ALONE: dict[str, Callable[..., Awaitable[Any]]] = {
    "open_and_close": lifecycle.open_and_close,
    "death": lifecycle.death,
}
_BASELINE: dict[str, Callable[..., Awaitable[Any]]] = {
    "whole_steps": throughput.whole_steps_of_baseline,
    "streams": throughput.streams_of_baseline,
    "utility": latency.utility_of_baseline,
    "first_output": latency.first_output_of_baseline,
    "prompt_embeds": tensors.prompt_embeds_of_baseline,
    "churn_steps": churn.whole_steps_of_baseline,
    "churn_streams": churn.streams_of_baseline,
}

_answers = sys.stdout


async def serve_ours() -> None:
    """Run commands against anyengine."""
    async with open_engine_client(EMBEDS) as client:
        answer([os.getpid(), client.health().pid])
        while (command := await next_command()) is not None:
            name, arguments = command
            if name in _OURS_ALONE:
                answer(await _OURS_ALONE[name](**arguments))
            else:
                answer(await _OURS[name](client, **arguments))


async def serve_baseline() -> None:
    """Run commands against the rival."""
    async with BaselineClient() as client:
        answer([os.getpid(), client.process.pid])
        while (command := await next_command()) is not None:
            name, arguments = command
            answer(await _BASELINE[name](client, **arguments))


async def next_command() -> tuple[str, dict[str, Any]] | None:
    """The next command from stdin; None when there are no more."""
    line = await to_thread.run_sync(sys.stdin.readline)
    return json.loads(line) if line else None


def answer(value: object) -> None:
    """Answer the last command."""
    print(json.dumps(value), file=_answers, flush=True)


def keep_stdout_for_answers() -> None:
    """Have everything else that this process and its children print go to stderr."""
    global _answers
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def main(contestant: str, backend: str) -> None:
    """``contestant`` is ``ours``, ``baseline`` or one of ``sync.CONTESTANTS``.

    ``backend`` is one of ``asyncio``, ``uvloop``, ``trio``.
    """
    if contestant in sync.CONTESTANTS:
        sync.serve(contestant, backend)
        return
    serve = serve_ours if contestant == "ours" else serve_baseline
    if backend == "trio":
        anyio.run(serve, backend="trio")
    else:
        anyio.run(serve, backend="asyncio", backend_options={"use_uvloop": backend == "uvloop"})


if __name__ == "__main__":
    main(*sys.argv[1:])
