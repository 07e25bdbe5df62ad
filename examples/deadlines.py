"""Many requests, each with a deadline of its own.

    python examples/deadlines.py [--backend trio|asyncio] [--engine default|scripted]

What to see: twelve requests run at the same time, and each has half a second more than the one before. A deadline is
an ordinary cancel scope around the request; what came in time is kept. When a deadline passes, the request is aborted
in the engine and its place in the batch is free for the others, which is why the statistics at the end are all zero.
"""

import anyio

from _common import Model, ending_on_ctrl_c, model, parser, show_progress, until_idle
from anyengine import EngineClient, SamplingParams, open_engine_client

SUBJECTS = ("rivers", "bread", "the moon", "chess", "whales", "glass", "rain", "salt", "bees", "maps", "tea", "winter")


async def ask(client: EngineClient, smol: Model, subject: str, seconds: float) -> None:
    text, state = "", "finished"
    with anyio.move_on_after(seconds) as deadline:
        sampling = SamplingParams(max_tokens=60, temperature=0.0)
        async with smol.text.open_stream(client, f"A short story about {subject}:", sampling) as stream:
            async for output in stream:
                text += output.text
    if deadline.cancelled_caught:
        state = "deadline"
    start = " ".join(text.split())[:50]
    print(f"{subject:9} {seconds:3.1f} s  {state:9} {len(text):3} characters: {start}", flush=True)


async def main(engine: str) -> None:
    smol = model(engine)
    async with open_engine_client(smol.spec, on_progress=show_progress) as client:
        async with anyio.create_task_group() as group:
            for number, subject in enumerate(SUBJECTS, start=1):
                group.start_soon(ask, client, smol, subject, number / 2)
        await until_idle(client)
        print(client.statistics())


if __name__ == "__main__":
    options = parser(__doc__).parse_args()
    with ending_on_ctrl_c():
        anyio.run(main, options.engine, backend=options.backend)
