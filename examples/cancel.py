"""Cancelling a request, and seeing its slot freed.

    python examples/cancel.py [--backend trio|asyncio] [--engine default|scripted]

What to see: the engine has room for one request. The first one takes it, the second one waits in the engine. Leaving
the first one's block early aborts it, here by a cancel scope (a ``break``, an exception or a timeout do the same), and
the second one's tokens come within a step or two.
"""

import time

import anyio

from _common import ending_on_ctrl_c, model, parser, show_progress, until_idle
from anyengine import EngineClient, SamplingParams, open_engine_client

SAMPLING = SamplingParams(max_tokens=500, temperature=0.0)


async def hold(client: EngineClient, prompt: list[int], scope: anyio.CancelScope, holding: anyio.Event) -> None:
    with scope:
        async with client.open_request(prompt, SAMPLING) as request:
            async for _ in request:
                holding.set()


def show(client: EngineClient, when: str) -> None:
    statistics = client.statistics()
    figures = ", ".join(f"{name} {value:g}" for name, value in statistics.engine.items())
    print(f"{when}: the client has {statistics.live_requests} live requests; the engine says: {figures}", flush=True)


async def main(engine: str) -> None:
    smol = model(engine, max_num_seqs=1)
    scope, holding = anyio.CancelScope(), anyio.Event()
    async with (
        open_engine_client(smol.spec, on_progress=show_progress) as client,
        anyio.create_task_group() as group,
    ):
        group.start_soon(hold, client, smol.text.encode("First,"), scope, holding)
        await holding.wait()
        async with client.open_request(smol.text.encode("Second,"), SAMPLING) as request:
            with anyio.move_on_after(1.5) as waiting:
                await anext(request)
            print(f"the second request has waited for {1.5 if waiting.cancelled_caught else 0} s, without a token")
            show(client, "before")
            cancelled_at = time.perf_counter()
            scope.cancel()
            output = await anext(request)
            print(f"its first token came {(time.perf_counter() - cancelled_at) * 1000:.0f} ms after the cancellation")
            assert output.token_ids
        await until_idle(client)
        show(client, "after")


if __name__ == "__main__":
    options = parser(__doc__).parse_args()
    with ending_on_ctrl_c():
        anyio.run(main, options.engine, backend=options.backend)
