"""Offline batch inference: a file of prompts in, a file of completions out.

    python examples/offline_batch.py PROMPTS COMPLETIONS [--max-tokens N] [--concurrency N]
                                     [--backend trio|asyncio] [--engine default|scripted]

Both files hold JSON lines in UTF-8. PROMPTS: ``{"id": "a", "prompt": "The sea is"}``, ids being strings or integers.
COMPLETIONS, in the order in which requests end: ``{"id": "a", "text": " blue", "tokens": 5, "finish_reason":
"length"}``, or ``{"id": "a", "error": "..."}`` for a request that the engine refused; the others go on.

What to see: the engine always has ``--concurrency`` requests, and a bar shows how far it is. Press Ctrl-C, kill it, or
pull the plug: what is finished is written. Run it again, and it does what is missing: ids that COMPLETIONS has are
skipped, and a last line that was cut off is cut away and done again. After Ctrl-C the exit code is 130.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from _common import Model, model, parser
from anyengine import Completion, EngineError, RequestError, SamplingParams, open_sync_engine_client


class FileError(Exception):
    """A line of a file is not what it should be; the message says which and what."""


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file of JSON lines, each with an id.

    :raises FileError: if a line is anything else
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode())
            except ValueError as error:
                raise FileError(f"{path}, line {number}: not JSON in UTF-8: {error}") from None
            if not isinstance(value, dict) or type(value.get("id")) not in (str, int):
                raise FileError(f'{path}, line {number}: expected an object with a string or integer "id"')
            yield value


def read_prompts(path: Path) -> dict[str | int, str]:
    """Prompts by id, in the order of the file.

    :raises FileError: if a prompt is missing, or an id comes twice
    """
    prompts: dict[str | int, str] = {}
    for line in lines_of(path):
        if not isinstance(line.get("prompt"), str):
            raise FileError(f'{path}: id {line["id"]!r}: expected a "prompt" that is a string')
        if line["id"] in prompts:
            raise FileError(f"{path}: id {line['id']!r} comes twice")
        prompts[line["id"]] = line["prompt"]
    return prompts


def read_finished(path: Path) -> set[str | int]:
    """The ids that are done. A last line that was cut off is cut away, so that what follows begins a line.

    :raises FileError: if another line is damaged, which no interrupt does
    """
    if not path.exists():
        return set()
    with path.open("r+b") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)
    return {line["id"] for line in lines_of(path)}


def as_line(identity: str | int, result: Completion | RequestError, smol: Model) -> str:
    """One line of COMPLETIONS."""
    if isinstance(result, RequestError):
        line: dict[str, Any] = {"id": identity, "error": str(result)}
    else:
        text = smol.text.decode(result.token_ids)
        line = {"id": identity, "text": text, "tokens": len(result.token_ids), "finish_reason": result.finish_reason}
    return json.dumps(line, ensure_ascii=False) + "\n"


def run(options: argparse.Namespace) -> None:
    """Do what is missing."""
    prompts = read_prompts(options.prompts)
    finished = read_finished(options.completions)
    missing = [identity for identity in prompts if identity not in finished]
    print(f"{len(missing)} of {len(prompts)} prompts to do", flush=True)
    if not missing:
        return
    smol = model(options.engine)
    sampling = SamplingParams(max_tokens=options.max_tokens, temperature=0.0)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        options.completions.open("a", encoding="utf-8") as output,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        bar = progress.add_task("starting the engine", total=len(prompts), completed=len(prompts) - len(missing))
        with open_sync_engine_client(smol.spec, backend=options.backend) as client:
            progress.update(bar, description="prompts")
            encoded = (smol.text.encode(prompts[identity]) for identity in missing)
            for index, result in client.generate_many(encoded, sampling, max_concurrency=options.concurrency):
                output.write(as_line(missing[index], result, smol))
                output.flush()  # so that not even SIGKILL takes a whole line away
                progress.advance(bar)


def main() -> int:
    """The exit code: 0, 1 after an error, 130 after Ctrl-C."""
    options = parser(__doc__)
    options.add_argument("prompts", type=Path, metavar="PROMPTS")
    options.add_argument("completions", type=Path, metavar="COMPLETIONS")
    options.add_argument("--max-tokens", type=int, default=32)
    options.add_argument("--concurrency", type=int, default=256)
    try:
        run(options.parse_args())
    except KeyboardInterrupt:
        print("interrupted; run it again to do the rest", file=sys.stderr)
        return 130
    except (FileError, EngineError, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


sys.exit(main())
