"""A chat whose answers end at a stop string.

    python examples/chat.py [--stop TEXT]... [--backend trio|asyncio] [--engine default|scripted]

What to see: two questions, the second of which only makes sense after the first, and answers that come piece by piece.
Each ends before the first comma or full stop, or before whatever ``--stop`` names. What may yet become a stop string is
held back, so that nothing has to be taken back; when one is complete, the request is aborted in the engine, which then
runs nothing, as its own figures show.
"""

import anyio

from _common import ending_on_ctrl_c, model, parser, show_progress, until_idle
from anyengine import SamplingParams, open_engine_client

QUESTIONS = ("What is the capital of France?", "And of Italy?")
SAMPLING = SamplingParams(max_tokens=60, temperature=0.0)


async def main(engine: str, stop: list[str]) -> None:
    smol = model(engine)
    messages: list[dict[str, str]] = []
    async with open_engine_client(smol.spec, on_progress=show_progress) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            print(f"> {question}\n", end="", flush=True)
            answer = ""
            async with smol.text.open_stream(client, messages, SAMPLING, stop=stop) as stream:
                async for output in stream:
                    answer += output.text
                    print(output.text, end="", flush=True)
            messages.append({"role": "assistant", "content": answer})
            print(f"\n[finished: {output.finish_reason}, {output.stop_reason!r}]")
            await until_idle(client)
        print(f"[the engine runs {client.statistics().engine['running']:g} requests]")


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--stop", action="append", metavar="TEXT", help="may be given several times")
    options = arguments.parse_args()
    with ending_on_ctrl_c():
        anyio.run(main, options.engine, options.stop or [",", "."], backend=options.backend)
