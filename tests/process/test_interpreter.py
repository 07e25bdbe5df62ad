"""The interpreter of an engine's process: what it inherits, what it does not, and where there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

import anyengine
from anyengine import (
    EngineSpec,
    ProcessLauncher,
    SamplingParams,
    open_engine_client,
    open_sync_engine_client,
)
from anyengine.testing import scripted_spec

SPEC = EngineSpec("tests.process.inherited_engine:InheritedEngine")
ROOT = Path(__file__).parents[2]
PACKAGES = sysconfig.get_path("purelib")
OTHER_NAME = str(Path(sys.executable).with_name("python" if sys.executable.endswith("python3") else "python3"))
"""This interpreter under a name that is not that of this process."""


async def inherited(**arguments: Any) -> dict[str, Any]:
    async with open_engine_client(SPEC, **arguments) as client:
        return dict(await client.call_utility("inherited"))


def run(program: str, *options: str, limit: float = 60, **arguments: Any) -> str:
    """Run a program in this interpreter and return what it prints."""
    command = [sys.executable, *options, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, **arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- no interpreter ----


@pytest.mark.parametrize("opener", [open_engine_client, open_sync_engine_client])
@pytest.mark.parametrize("launcher", [None, {}, {"python": sys.executable}])
def test_a_frozen_application_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, opener: Any, launcher: dict[str, str] | None
) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(RuntimeError, match=r"frozen application, and starting .*launcher=ProcessLauncher\(python="):
        opener(scripted_spec(), launcher=None if launcher is None else ProcessLauncher(**launcher))


@pytest.mark.parametrize("executable", [None, ""])
def test_an_embedded_interpreter_without_a_path_is_refused(
    monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(RuntimeError, match=r"embedded in another program.*ProcessLauncher\(python="):
        open_engine_client(scripted_spec())


@pytest.mark.anyio
@pytest.mark.usefixtures("leaves_nothing")
async def test_a_frozen_application_runs_engines_in_an_interpreter_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/the/bundle")
    for arguments in ({"launcher": ProcessLauncher(python=OTHER_NAME)}, {"placement": "thread"}):
        async with open_engine_client(scripted_spec(), **arguments) as client:
            assert (await client.generate([1], SamplingParams(max_tokens=1))).token_ids == [2]


@pytest.mark.parametrize("passed_on", ['"$@"', ""], ids=["arguments", "no arguments"])
def test_a_program_that_does_not_know_that_it_is_frozen_starts_itself_once(tmp_path: Path, passed_on: str) -> None:
    # What freezes programs and does not say so looks like this: its executable runs the program, whatever it is given.
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import sys
            sys.executable = sys.argv[1]
            with open(sys.argv[2], "a+") as starts:
                starts.write("started\\n")
                starts.seek(0)
                assert len(starts.readlines()) < 5
            from anyengine import open_sync_engine_client
            from anyengine.testing import scripted_spec
            with open_sync_engine_client(scripted_spec()):
                pass
        """)
    )
    application = tmp_path / "application"
    application.write_text(f"#!/bin/sh\nexec {sys.executable} {program} {application} {tmp_path}/starts {passed_on}\n")
    application.chmod(0o755)
    done = subprocess.run([application], capture_output=True, text=True, timeout=60, check=False)
    assert (tmp_path / "starts").read_text().count("started") == 2
    assert done.returncode == 1
    last = done.stderr[done.stderr.rindex("EngineStartError") :]
    assert "it is no Python interpreter" in last
    assert "launcher=ProcessLauncher(python=" in last


# ---- what it finds ----

FOUND = """
    import sys
    sys.path.insert(0, {home!r})
    sys.path += [{root!r}, {packages!r}]
    import anyengine
    from anyengine import EngineSpec, open_sync_engine_client
    with open_sync_engine_client(EngineSpec("tests.process.inherited_engine:InheritedEngine")) as client:
        found = client.call_utility("inherited")
    assert found["anyengine"] == anyengine.__path__[0] == {package!r}, found["anyengine"]
    for name, value in found["flags"].items():
        assert name in ("safe_path", "no_user_site") or value == getattr(sys.flags, name), name
    assert found["flags"]["safe_path"]
    print("done", found["flags"]["isolated"], found["flags"]["optimize"], found["flags"]["dev_mode"])
"""


def test_a_child_has_its_parents_anyengine_if_that_is_only_on_the_parents_path(tmp_path: Path) -> None:
    home = tmp_path / "vendored"
    home.mkdir()
    (home / "anyengine").symlink_to(anyengine.__path__[0])
    # In front of the child's own path this directory would hide a module of the standard library.
    (home / "runpy.py").write_text("raise RuntimeError('not the standard library')")
    program = FOUND.format(home=str(home), root=str(ROOT), packages=PACKAGES, package=str(home / "anyengine"))
    # Without site-packages an installed anyengine is not found.
    assert run(program, "-S", "-I", "-X", "dev") == "done 1 0 1\n"


def test_a_child_has_its_parents_anyengine_out_of_an_archive(tmp_path: Path) -> None:
    archive = tmp_path / "application.zip"
    source = Path(anyengine.__path__[0])
    with zipfile.ZipFile(archive, "w") as file:
        for path in source.rglob("*.py"):
            file.write(path, path.relative_to(source.parent))
    program = FOUND.format(home=str(archive), root=str(ROOT), packages=PACKAGES, package=str(archive / "anyengine"))
    assert run(program, "-S", "-E", "-OO") == "done 0 2 0\n"


@pytest.mark.anyio
async def test_another_interpreter_does_not_get_this_process_s_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marker = "/no/such/place"
    monkeypatch.setattr(sys, "path", [*sys.path, marker])
    assert marker in (await inherited())["path"]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    other = await inherited(launcher=ProcessLauncher(python=OTHER_NAME))
    assert marker not in other["path"]
    assert other["executable"] == OTHER_NAME


# ---- what it inherits ----


@pytest.mark.anyio
async def test_what_the_application_blocks_and_ignores_is_the_applications_alone() -> None:
    numbers = {signal.SIGTERM, signal.SIGUSR1}
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGUSR2)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        found = await inherited()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in previous.items():
            signal.signal(number, handler)
    assert found["blocked"] == 0
    # Ctrl-C is the application's; the others are Python's own.
    by_python = {signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ}
    assert {number for number in signal.valid_signals() if found["ignored"] >> (number - 1) & 1} == by_python


def test_an_engine_works_where_nothing_is_utf_8_and_the_directory_is_gone(tmp_path: Path) -> None:
    place = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(place)
    program = """
        import os, sys
        os.rmdir(os.getcwd())
        sys.path.append("/data/\\udcff")
        from anyengine import EngineSpec, open_sync_engine_client
        with open_sync_engine_client(EngineSpec("tests.process.inherited_engine:InheritedEngine")) as client:
            found = client.call_utility("inherited")
        print(found["odd"], "/data/\\\\udcff" in found["path"])
    """
    environment = {
        **os.environb,
        b"ODD": b"\xfe",
        b"TMPDIR": os.fsencode(tmp_path) + b"\xff",
        b"PYTHONPATH": os.fsencode(ROOT),
    }
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment, cwd=place)
    assert done.stdout == "b'\\xfe' True\n", done.stderr


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_process_without_stdin_stdout_and_stderr_has_engines(tmp_path: Path, backend: str) -> None:
    program = f"""
        import sys
        assert sys.stdin is sys.stdout is sys.stderr is None
        from anyengine import open_sync_engine_client
        from anyengine.testing import scripted_spec
        with open_sync_engine_client(scripted_spec(), backend={backend!r}) as client:
            tokens = client.generate([1]).token_ids
        with open({str(tmp_path / "tokens")!r}, "w") as file:
            file.write(str(tokens[:2]))
    """
    command = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", sys.executable, "-c", textwrap.dedent(program)]
    subprocess.run(command, timeout=60, check=True)
    assert (tmp_path / "tokens").read_text() == "[2, 3]"


# ---- what it is given ----


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"python": "/bin/\ud800"}, r"ProcessLauncher\.python='/bin/\\ud800'.*cannot be encoded"),
        ({"module": "a\0b"}, r"ProcessLauncher\.module='a\\x00b': a NUL character"),
        ({"environment": {"A": "\ud800"}}, r"ProcessLauncher\.environment\['A'\]='\\ud800'"),
        ({"environment": {"A=B": "1"}}, r"ProcessLauncher\.environment has the name 'A=B'"),
        ({"environment": {"": "1"}}, r"ProcessLauncher\.environment has the name ''"),
    ],
)
def test_what_no_process_can_be_given_is_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ProcessLauncher(**arguments)
