"""An engine that is started by hand, in another terminal, on another machine, in a container, or by systemd.

    python examples/attached_engine.py [--address tcp://HOST:PORT] [--demo]
                                       [--backend trio|asyncio] [--engine default|scripted]

What to see: this program prints two commands. Type them into another terminal; the first makes the keys by which both
sides recognize each other, the second starts an engine, which comes to this program and is served. Then end that
engine, in any way, and start it again: the stream that is under way says how the engine went, nothing is sent a second
time behind its back, and the next request waits until an engine has come back. Ctrl-C there says goodbye, ``kill -9``
loses the connection, and an exception comes with its message. Ctrl-C here ends this program with exit code 130; the
engine stays where it is, for the next client.

With ``--demo`` it plays the other terminal itself: it kills the engine, starts it again, ends it politely, starts it
once more, and leaves after two whole requests.
"""

import json
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio

from _common import Model, model, parser
from _programs import program, run_until_signal
from anyengine import (
    CrashReport,
    EngineClient,
    EngineDeadError,
    EngineError,
    EngineSpec,
    RestartPolicy,
    SamplingParams,
    StartLimits,
    open_engine_client,
)

PROMPT = "Once upon a time"
SAMPLING = SamplingParams(max_tokens=40, temperature=0.0)

RESTART = RestartPolicy(limit=1000, backoff=0, while_down="wait")


def engine_command(spec: EngineSpec, address: str, keys: Path) -> list[str]:
    """What starts ``spec`` by hand."""
    arguments = [
        f"{name}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"
        for name, value in spec.arguments.items()
    ]
    return ["anyengine", "engine", spec.path, *arguments, "--connect", address, "--keys", str(keys)]


class OtherTerminal:
    """What a person does there, in a demonstration. ``streaming`` is to be set in the middle of a request."""

    def __init__(self) -> None:
        self.streaming = anyio.Event()
        # The engine outlives the client, also when both are cancelled: a death that nobody awaits would be an error.
        self._scope = anyio.CancelScope(shield=True)

    def close(self) -> None:
        """End what runs there."""
        self._scope.cancel()

    async def run(self, keys_command: Sequence[str], engine_command: Sequence[str]) -> None:
        """Make keys, then start engines one after the other; the last is left alone until :meth:`close`."""
        with self._scope:
            await self._type(keys_command, engine_command)

    async def _type(self, keys_command: Sequence[str], engine_command: Sequence[str]) -> None:
        await anyio.run_process(self._found(keys_command), stdin=subprocess.DEVNULL, stdout=None, stderr=None)
        for number in (signal.SIGKILL, signal.SIGTERM):
            async with program(self._found(engine_command)) as engine:
                self.streaming = anyio.Event()
                await self.streaming.wait()
                print(f"\n[$ kill -{number.name.removeprefix('SIG')} {engine.pid}]", flush=True)
                engine.send_signal(number)
                await engine.wait()
        async with program(self._found(engine_command)):
            await anyio.sleep_forever()

    def _found(self, command: Sequence[str]) -> list[str]:
        # The script of this environment, which need not be on the path.
        return [str(Path(sys.executable).with_name(command[0])), *command[1:]]


async def until_written(keys: anyio.Path) -> None:
    """Wait for somebody to make the keys."""
    while not (await keys.exists() and (await keys.stat()).st_size):  # noqa: ASYNC110
        await anyio.sleep(0.1)


def how_it_went(report: CrashReport) -> str:
    """Its own last word if it had one; else what is known from outside."""
    if report.exception_type is not None:
        return f"it died: {report.exception_type}: {report.exception_message}"
    return report.ending


async def stream(client: EngineClient, smol: Model, other: OtherTerminal) -> None:
    """One request, printed as it comes.

    :raises EngineDeadError: if the engine goes before its end
    """
    tokens = 0
    async with smol.text.open_stream(client, PROMPT, SAMPLING) as request:
        async for output in request:
            if not tokens:
                print(f"[{client.info.engine}, pid {client.health().pid}] {PROMPT}", end="")
            tokens += len(output.token_ids)
            print(output.text, end="", flush=True)
            if tokens >= 10:
                other.streaming.set()
            if output.finish_reason is not None:
                print(f" [finished: {output.finish_reason}]", flush=True)


async def serve(smol: Model, address: str, keys: Path, other: OtherTerminal, limit: int | None) -> int:
    """Stream one request after the other, until ``limit`` of them have come to their end.

    A person may take any time to start an engine; a demonstration in which none comes has failed.
    """
    finished, patience = 0, StartLimits(hello=None if limit is None else 300)
    try:
        async with open_engine_client(address=address, keys=keys, start_limits=patience, restart=RESTART) as client:
            while finished != limit:
                try:
                    await stream(client, smol, other)
                    finished += 1
                except EngineDeadError as error:
                    if client.health().state == "dead":  # for good
                        raise
                    print(f"\n[engine {error.report.pid} is gone: {how_it_went(error.report)}]", flush=True)
                    print("[the next request waits for it to come back]", flush=True)
    except EngineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


async def main(engine: str, address: str | None, demo: bool) -> int:
    # A short script, because its tokens are in the command. The last one ends it, and is no text.
    script = {"script": list(b", and on it goes, and on, and on\0"), "step_delay": 0.05} if engine == "scripted" else {}
    smol, other = model(engine, **script), OtherTerminal()
    with tempfile.TemporaryDirectory(prefix="anyengine-") as directory:
        keys = Path(directory, "keys")
        address = address or f"ipc://{directory}/engine"
        commands = ["anyengine", "keys", str(keys)], engine_command(smol.spec, address, keys)
        print("Type this into another terminal:\n")
        for command in commands:
            print(f"    {shlex.join(command)}")
        print(flush=True)
        code = 0
        async with anyio.create_task_group() as group:
            try:
                if demo:
                    group.start_soon(other.run, *commands)
                await until_written(anyio.Path(keys))
                code = await serve(smol, address, keys, other, 2 if demo else None)
            finally:
                other.close()
    return code


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--address", help="where the engine comes to; by default a socket in a private directory")
    arguments.add_argument("--demo", action="store_true", help="play the other terminal, too")
    options = arguments.parse_args()
    parameters = options.engine, options.address, options.demo
    sys.exit(anyio.run(run_until_signal, main, *parameters, backend=options.backend))
