"""What a crash looks like.

    python examples/crash.py [--backend trio|asyncio]

What to see: an engine dies in four ways while a request streams: a segmentation fault in native code, SIGKILL from
outside, a Python exception in a step, an exception while it loads. Each time whoever waits for it, a request or a
utility call, gets ``EngineDeadError``, whose message alone says what happened and where to look. Nothing hangs, and no
process is left. This example uses the scripted engine, which can die on demand.
"""

import signal

import anyio

from _common import ending_on_ctrl_c, parser
from anyengine import EngineDeadError, EngineSpec, SamplingParams, open_engine_client

SCRIPTED = "anyengine.engines.scripted:ScriptedEngine"


async def crash(title: str, method: str, *arguments: object) -> None:
    print(f"\n===== {title} =====", flush=True)
    tokens = 0
    async with open_engine_client(EngineSpec(SCRIPTED, {"step_delay": 0.02})) as client:
        try:
            async with client.open_request([1], SamplingParams(max_tokens=1000)) as request:
                async for output in request:
                    tokens += len(output.token_ids)
                    if tokens >= 3:
                        await client.call_utility(method, *arguments)
        except EngineDeadError as error:
            print(f"after {tokens} tokens, {type(error).__name__}: {error}")
        print(f"health: {client.health().state}, {client.statistics().live_requests} live requests", flush=True)


async def main() -> None:
    await crash("a segmentation fault", "segfault")
    await crash("SIGKILL, as from the out-of-memory killer", "kill", int(signal.SIGKILL))
    await crash("an exception in a step", "raise_in_step", "the KV cache is full of sand")
    print("\n===== an exception while loading =====", flush=True)
    try:
        async with open_engine_client(EngineSpec(SCRIPTED, {"load_fault": "raise"})):
            print("never reached")
    except EngineDeadError as error:
        print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    options = parser(__doc__).parse_args()
    with ending_on_ctrl_c():
        anyio.run(main, backend=options.backend)
