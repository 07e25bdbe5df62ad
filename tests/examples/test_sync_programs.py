"""The examples without an event loop: a plain script, and offline batch inference that can be interrupted anywhere."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.programs import Sandbox, Terminal, default_model_converted, sandbox
from tests.examples.running import run
from tests.helpers import until_sync

__all__ = ["default_model_converted", "sandbox"]

COUNT = 60


def test_sync_generate(sandbox: Sandbox) -> None:
    recited = " a scripted engine recit"
    for shown in run(sandbox, "sync_generate"):
        assert f"The sea is{recited}\nOnce upon a time{recited}\n[finished: length]\n" in shown
        for subject in ("Rivers", "Bread", "Glass", "Winter"):
            assert f"\n{subject} can be{recited}\n" in shown


@pytest.mark.engines
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("default_model_converted")
def test_sync_generate_with_the_real_model(sandbox: Sandbox) -> None:
    (shown,) = run(sandbox, "sync_generate", backends=["asyncio"], engine="default")
    assert "[loading weights: done]" in shown
    assert "[finished: length]" in shown
    for subject in ("Rivers", "Bread", "Glass", "Winter"):
        assert f"\n{subject} can be " in shown


class Batch:
    """The two files of a batch, and the program on them."""

    def __init__(self, sandbox: Sandbox, directory: Path) -> None:
        self._sandbox = sandbox
        self.prompts = directory / "prompts.jsonl"
        self.completions = directory / "completions.jsonl"
        self.write_prompts([{"id": f"p{number}", "prompt": f"Prompt {number}"} for number in range(COUNT)])

    def write_prompts(self, lines: list[dict[str, Any]]) -> None:
        self.prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def command(self, *options: str) -> list[str]:
        files = [str(self.prompts), str(self.completions)]
        return [sys.executable, "examples/offline_batch.py", *files, "--engine", "scripted", *options]

    def run(self, *options: str) -> tuple[int, str, str]:
        result = self._sandbox.run(self.command(*options), 50)
        return result.returncode, result.stdout, result.stderr

    def finished(self) -> list[dict[str, Any]]:
        """The whole lines so far."""
        text = self.completions.read_text() if self.completions.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@pytest.fixture
def batch(sandbox: Sandbox, tmp_path: Path) -> Batch:
    return Batch(sandbox, tmp_path)


def assert_complete(batch: Batch) -> None:
    assert batch.completions.read_text().endswith("\n")
    finished = batch.finished()
    assert sorted(line["id"] for line in finished) == sorted(f"p{number}" for number in range(COUNT))


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_batch_to_its_end_and_then_nothing_is_left_to_do(batch: Batch, backend: str) -> None:
    code, shown, errors = batch.run("--backend", backend, "--max-tokens", "10")
    assert (code, shown, errors) == (0, f"{COUNT} of {COUNT} prompts to do\n", "")
    assert_complete(batch)
    for line in batch.finished():
        assert line == {"id": line["id"], "text": " a scripte", "tokens": 10, "finish_reason": "length"}
    before = batch.completions.read_bytes()
    assert batch.run()[:2] == (0, f"0 of {COUNT} prompts to do\n")
    assert batch.completions.read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_is_finished_is_kept_and_another_run_does_the_rest(
    batch: Batch, sandbox: Sandbox, number: signal.Signals
) -> None:
    options = ("--max-tokens", "5", "--concurrency", "4")
    process = sandbox.start(batch.command(*options))
    until_sync(lambda: len(batch.finished()) >= 8, 30)
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    if number == signal.SIGINT:
        assert (process.returncode, errors) == (130, "interrupted; run it again to do the rest\n")
    kept = batch.finished()
    assert 8 <= len(kept) < COUNT
    assert batch.run(*options)[0] == 0
    assert batch.finished()[: len(kept)] == kept
    assert_complete(batch)


def test_a_line_that_was_cut_off_is_done_again(batch: Batch) -> None:
    assert batch.run("--max-tokens", "2")[0] == 0
    whole = batch.completions.read_bytes()
    batch.completions.write_bytes(whole[:-7])
    code, shown, _ = batch.run("--max-tokens", "2")
    assert (code, shown) == (0, f"1 of {COUNT} prompts to do\n")
    assert_complete(batch)
    assert batch.completions.read_bytes() == whole


def test_a_request_that_the_engine_refuses_does_not_stop_the_others(batch: Batch) -> None:
    batch.write_prompts([{"id": 1, "prompt": "fine"}, {"id": 2, "prompt": "long " * 1000}, {"id": 3, "prompt": ""}])
    assert batch.run("--max-tokens", "2")[0] == 0
    finished = {line["id"]: line for line in batch.finished()}
    assert finished[1]["tokens"] == 2
    assert "max_model_len is 4096" in finished[2]["error"]
    assert "at least one token" in finished[3]["error"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": "a", "prompt": "x"}\n{"id": ', "line 2: not JSON"),
        ('{"prompt": "x"}\n', 'line 1: expected an object with a string or integer "id"'),
        ('{"id": "a"}\n', "id 'a': expected a \"prompt\" that is a string"),
        ('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n', "id 'a' comes twice"),
    ],
)
def test_a_damaged_file_is_refused_by_name_before_anything_starts(batch: Batch, text: str, message: str) -> None:
    batch.prompts.write_text(text)
    code, _, errors = batch.run()
    assert code == 1
    assert message in errors
    assert str(batch.prompts) in errors
    assert not batch.completions.exists()


def test_a_file_that_is_not_utf_8_is_refused_by_its_line(batch: Batch) -> None:
    batch.prompts.write_bytes(b'{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "caf\xe9"}\n')
    code, _, errors = batch.run()
    assert code == 1
    assert f"{batch.prompts}, line 2: not JSON in UTF-8: " in errors


def test_a_terminal_shows_a_bar_and_ctrl_c_ends_it(batch: Batch, sandbox: Sandbox) -> None:
    with Terminal(sandbox, batch.command("--max-tokens", "5", "--concurrency", "4")) as terminal:
        terminal.expect(r"prompts.*[1-9]\d*/60")
        terminal.press("\x03")
        assert terminal.wait(20) == 130
    assert re.search("interrupted; run it again", terminal.text)
    assert 0 < len(batch.finished()) < COUNT
