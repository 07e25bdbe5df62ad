"""One request, streamed.

    python examples/streaming.py [--backend trio|asyncio] [--engine default|scripted]

What to see: the engine loads in a child process and says how far it is; then the text comes piece by piece while the
engine goes on working. An output holds all that came since the last one, so a slow reader never falls behind. At the
end it is gone: the block has taken the process with it.
"""

import anyio

from _common import ending_on_ctrl_c, model, parser, show_progress
from anyengine import SamplingParams, open_engine_client

PROMPT = "Once upon a time, in a village by the sea,"


async def main(engine: str) -> None:
    smol = model(engine)
    async with open_engine_client(smol.spec, on_progress=show_progress) as client:
        print(f"[{client.info.engine}, pid {client.health().pid}]\n{PROMPT}", end="")
        sampling = SamplingParams(max_tokens=48, temperature=0.0)
        async with smol.text.open_stream(client, PROMPT, sampling) as stream:
            async for output in stream:
                print(output.text, end="", flush=True)
                if output.finish_reason is not None:
                    print(f"\n[finished: {output.finish_reason}]")


if __name__ == "__main__":
    options = parser(__doc__).parse_args()
    with ending_on_ctrl_c():
        anyio.run(main, options.engine, backend=options.backend)
