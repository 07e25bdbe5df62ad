"""The commands and their arguments."""

from __future__ import annotations

import enum
import importlib.util
import os
import secrets
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from anyengine.cli import INSTALL
from anyengine.cli.generate import MAX_TOKENS, Job, run
from anyengine.cli.plain import COMMANDS, PlainCommand, version
from anyengine.engines.transformers.checkpoint import check_default_model
from anyengine.params import SamplingParams
from anyengine.text.model_files import DEFAULT

app: typer.Typer = typer.Typer(
    name="anyengine",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_PACKAGES = ("torch", "transformers", "safetensors", "jinja2")
"""What a model needs, and is imported late."""


class Backend(enum.StrEnum):
    """The async libraries that the client runs on."""

    TRIO = "trio"
    ASYNCIO = "asyncio"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version())
        raise typer.Exit


@app.callback()
def anyengine(
    shows_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run an LLM engine in a child process."""


class _Generate(TyperCommand):
    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        # An optional argument before a required one is more than Typer's parser knows, see _model_and_prompt.
        return ["[OPTIONS]", "[MODEL] PROMPT"]


@app.command(cls=_Generate)
def generate(
    texts: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] PROMPT",
            help="The model, a directory in Hugging Face's format or 'default' (SmolLM2-135M-Instruct, converted once "
            "into a cache), and the text to go on from; '-' reads it from stdin, as UTF-8 and without its last "
            "newline. With one argument the model is 'default'.",
            show_default=False,
        ),
    ],
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Generate at most so many tokens; refused if prompt and tokens are longer than the model's length.",
            show_default=f"{MAX_TOKENS}, or as many as fit",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.", show_default="random")] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text; may be given several times.", show_default=False),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads.", show_default="one for each core, fewer while others use them"),
    ] = None,
    backend: Annotated[Backend, typer.Option(help="The async library to run on.")] = Backend.ASYNCIO,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Ask the prompt as a question, by the model's chat template.")
    ] = False,
) -> None:
    """Load a model in a child process and stream its answer.

    The text goes to stdout, everything else to stderr. Ctrl-C aborts the request and ends the engine.
    """
    model, prompt = _model_and_prompt(texts)
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if backend is Backend.TRIO and importlib.util.find_spec("trio") is None:
        sys.exit("anyengine: --backend trio needs the package 'trio': pip install trio")
    if missing:
        sys.exit(f"anyengine: generating needs {' and '.join(missing)}: {INSTALL}")
    try:
        if model == DEFAULT:
            check_default_model()
    except (ModuleNotFoundError, OSError) as error:
        sys.exit(f"anyengine: {error}")
    if prompt == "-":
        prompt = _read_prompt()
    for text, option in ((prompt, "PROMPT"), *((text, "--stop") for text in stop or ())):
        _check_text(text, option)
    try:
        sampling = SamplingParams(
            max_tokens=MAX_TOKENS if max_tokens is None else max_tokens,
            temperature=temperature,
            seed=secrets.randbits(31) if seed is None else seed,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    job = Job(model, prompt, sampling, chat, tuple(stop or ()), threads, cuts_to_fit=max_tokens is None)
    raise typer.Exit(run(job, backend.value))


def _add_plain_command(name: str, command: PlainCommand) -> None:
    """List a command that :func:`anyengine.cli.main` runs by itself, before Typer is imported."""

    def run(words: Annotated[list[str] | None, typer.Argument()] = None) -> None:
        raise typer.Exit(command.run(words or []))

    settings: dict[str, Any] = {"ignore_unknown_options": True, "help_option_names": []}
    app.command(name, help=command.summary, add_help_option=False, context_settings=settings)(run)


for _name, _command in COMMANDS.items():
    _add_plain_command(_name, _command)


def _read_prompt() -> str:
    """The prompt on stdin, whatever the locale's encoding is."""
    if sys.stdin.isatty():
        typer.echo("reading the prompt from the terminal; Ctrl-D at the start of a line ends it", err=True)
    try:
        text = sys.stdin.buffer.read().decode()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:  # a directory, or a terminal of another session
        raise typer.BadParameter(f"stdin cannot be read: {error.strerror}", param_hint="PROMPT") from error
    except UnicodeDecodeError as error:
        problem = f"stdin is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
        raise typer.BadParameter(problem, param_hint="PROMPT") from error
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise typer.BadParameter("stdin is empty", param_hint="PROMPT")
    return text


def _check_text(text: str, option: str) -> None:
    """Refuse what a tokenizer would refuse, before a model is loaded."""
    if not text:
        raise typer.BadParameter("it is empty", param_hint=option)
    try:
        text.encode()
    except UnicodeEncodeError:  # what the locale cannot read comes as halves of surrogate pairs
        encoding = sys.getfilesystemencoding()
        raise typer.BadParameter(
            f"it is not text in this locale's encoding ({encoding}); in a UTF-8 terminal set LANG=C.UTF-8",
            param_hint=option,
        ) from None


def _model_and_prompt(texts: list[str]) -> tuple[str, str]:
    model, prompt = (DEFAULT, texts[0]) if len(texts) == 1 else texts[:2]
    if len(texts) > 2:
        raise typer.BadParameter(f"{len(texts)} arguments are too many; put the prompt in quotes", param_hint="PROMPT")
    if len(texts) == 1 and (prompt == DEFAULT or os.path.isdir(prompt)):
        raise typer.BadParameter(f"there is only the model {prompt!r}, and no prompt", param_hint="PROMPT")
    return model, prompt
