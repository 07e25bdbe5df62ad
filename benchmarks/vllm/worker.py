"""One contestant of the client layer in a process of its own, as :mod:`benchmarks.worker` has them."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from anyengine import EngineSpec, open_engine_client
from benchmarks import churn, latency, throughput
from benchmarks.vllm import bare, client_layer
from benchmarks.worker import answer, next_command

ENGINE = EngineSpec("benchmarks.vllm.engines:TorchEngine", {"vocab_size": 2**31})

_OURS: dict[str, Callable[..., Awaitable[Any]]] = {
    "whole_steps": throughput.whole_steps,
    "utility": latency.utility,
    "first_output": client_layer.first_output,
    "paced": client_layer.paced,
    "prompt_embeds": client_layer.prompt_embeds,
    "churn_steps": churn.whole_steps,
    "churn_streams": churn.streams,
}
_RIVAL: dict[str, Callable[..., Awaitable[Any]]] = {
    "whole_steps": throughput.whole_steps_of_baseline,
    "utility": latency.utility_of_baseline,
    "first_output": client_layer.first_output_of_rival,
    "paced": client_layer.paced_of_rival,
    "prompt_embeds": client_layer.prompt_embeds_of_rival,
    "churn_steps": churn.whole_steps_of_baseline,
}


async def serve_ours() -> None:
    """Run commands against anyengine."""
    async with open_engine_client(ENGINE) as client:
        gc.freeze()
        answer([os.getpid(), client.health().pid])
        while (command := await next_command()) is not None:
            name, arguments = command
            if name == "lifecycle":
                answer(await client_layer.lifecycle())
            else:
                answer(await _OURS[name](client, **arguments))


async def serve_rival() -> None:
    """Run commands against ``AsyncMPClient``."""
    from benchmarks.vllm.rival import AsyncRival

    client = AsyncRival()
    gc.freeze()
    answer([os.getpid(), client.process.pid])
    while (command := await next_command()) is not None:
        name, arguments = command
        if name == "lifecycle":
            answer(await client_layer.lifecycle_of_rival())
        else:
            answer(await _RIVAL[name](client, **arguments))
    client.shutdown()


async def serve_streaming_rival() -> None:
    """Run ``churn_streams``, the only command, against ``AsyncLLM``."""
    from benchmarks.vllm.rival import StreamingRival

    rival = StreamingRival()
    gc.freeze()
    answer([os.getpid(), rival.process.pid])
    while (command := await next_command()) is not None:
        answer(await client_layer.churn_streams_of_rival(rival, **command[1]))
    rival.shutdown()


def main(contestant: str, backend: str) -> None:
    """``contestant`` is ``ours``, ``vllm``, ``async_llm`` or ``bare``, on an event loop of asyncio, uvloop or trio."""
    serve = {
        "ours": serve_ours,
        "vllm": serve_rival,
        "async_llm": serve_streaming_rival,
        "bare": bare.serve,
    }[contestant]
    if backend == "trio":
        anyio.run(serve, backend="trio")
    else:
        anyio.run(serve, backend="asyncio", backend_options={"use_uvloop": backend == "uvloop"})


if __name__ == "__main__":
    main(*sys.argv[1:])
