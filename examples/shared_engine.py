"""Two frontends, each a process of its own, share one engine.

    python examples/shared_engine.py [--backend trio|asyncio] [--engine default|scripted]

What to see: the first frontend opens the engine and tells it where a second one listens; the second is this program
again, with ``--second ADDRESS``. Both stream at the same time, and each line says whose it is. Then the second is
killed in the middle of its stream: the engine aborts its request, as the engine's own figures show, while the first
one's stream goes on without a gap. Ctrl-C ends all three processes; the exit code is then 130.
"""

import dataclasses
import sys
import tempfile
import time

import anyio

from _common import Model, model, parser, show_progress
from _programs import program, run_until_signal
from anyengine import EngineClient, EngineDeadError, SamplingParams, open_engine_client

SAMPLING = SamplingParams(max_tokens=900, temperature=0.0)


@dataclasses.dataclass
class Tally:
    """What has come of a stream so far, in tokens, and the longest time between two outputs of it, in seconds."""

    tokens: int = 0
    longest_pause: float = 0.0


async def stream(client: EngineClient, smol: Model, name: str, prompt: str, tally: Tally) -> None:
    """Print lines of text as they fill; when a request has come to its end, make another."""
    while True:
        line = ""
        async with smol.text.open_stream(client, prompt, SAMPLING) as request:
            came_at: float | None = None
            async for output in request:
                now = time.perf_counter()
                tally.tokens += len(output.token_ids)
                tally.longest_pause = max(tally.longest_pause, now - (came_at or now))
                came_at = now
                line += output.text.replace("\n", " ")
                if len(line) >= 40:
                    print(f"{name:6} |{line}", flush=True)
                    line = ""


async def until_running(client: EngineClient, count: int) -> None:
    """Wait for the engine's own figures, which it sends once a second, to say that it runs ``count`` requests."""
    with anyio.fail_after(30):
        while client.statistics().engine.get("running") != count:  # noqa: ASYNC110
            await anyio.sleep(0.02)
    figures = ", ".join(f"{name} {value:g}" for name, value in client.statistics().engine.items())
    print(f"[the engine says: {figures}]", flush=True)


async def show_sharing(client: EngineClient, again: list[str], tally: Tally) -> None:
    """Let a second frontend have its share, and kill it; ``again`` is this program's command line."""
    await until_running(client, 1)
    with tempfile.TemporaryDirectory(prefix="anyengine-") as directory:
        address = f"ipc://{directory}/second"
        await client.connect_client(address)
        async with program([*again, "--second", address]) as second:
            await until_running(client, 2)
            await anyio.sleep(2)
            print(f"[killing the second frontend, pid {second.pid}]", flush=True)
            before, killed_at = tally.tokens, time.perf_counter()
            second.kill()
            await second.wait()
            await until_running(client, 1)
    await anyio.sleep(1)
    seconds = time.perf_counter() - killed_at
    print(f"[the first one's stream: {tally.tokens - before} tokens in the {seconds:.1f} s since then, ", end="")
    print(f"and never more than {tally.longest_pause * 1000:.0f} ms without one]", flush=True)


async def run_first(smol: Model, again: list[str]) -> int:
    """Open the engine and stream all the while."""
    code, tally = 0, Tally()
    try:
        async with (
            open_engine_client(smol.spec, on_progress=show_progress) as client,
            anyio.create_task_group() as group,
        ):
            group.start_soon(stream, client, smol, "first", "Once upon a time", tally)
            await show_sharing(client, again, tally)
            group.cancel_scope.cancel()
    except* EngineDeadError as deaths:
        print(f"first: {deaths.exceptions[0]}", file=sys.stderr)
        code = 1
    return code


async def run_second(smol: Model, address: str) -> int:
    """Listen at ``address``, to which the engine comes, and use it like one of our own."""
    try:
        async with open_engine_client(address=address) as client:
            await stream(client, smol, "second", "The sea is", Tally())
    except EngineDeadError as error:
        print(f"second: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--second", metavar="ADDRESS", help="be the second frontend, and listen there")
    options = arguments.parse_args()
    smol = model(options.engine)
    if options.second is None:
        again = [sys.executable, __file__, "--backend", options.backend, "--engine", options.engine]
        sys.exit(anyio.run(run_until_signal, run_first, smol, again, backend=options.backend))
    sys.exit(anyio.run(run_until_signal, run_second, smol, options.second, backend=options.backend))
