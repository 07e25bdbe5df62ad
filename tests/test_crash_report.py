"""What a crash report says, and that it says it once."""

from __future__ import annotations

from anyengine.errors import CrashReport

TRACEBACK = "Traceback (most recent call last):\n" + "".join(f"  line {n}\n" for n in range(60)) + "ValueError: bad\n"


def report(**fields: object) -> str:
    return CrashReport(**{"rank": 0, "pid": 7, "phase": "serve", **fields}).describe()  # type: ignore[arg-type]


def test_a_traceback_that_was_printed_too_comes_once() -> None:
    whole = report(traceback=TRACEBACK, stderr_tail=TRACEBACK)
    assert whole.count("ValueError: bad") == 1
    assert "last output" not in whole
    only_its_end = report(traceback=TRACEBACK, stderr_tail="\n".join(TRACEBACK.splitlines()[-40:]))
    assert only_its_end == whole
    after_other_lines = report(traceback=TRACEBACK, stderr_tail=f"a warning\n{TRACEBACK}")
    assert after_other_lines.count("line 59") == 1
    assert "--- last output ---\n  a warning\n" in after_other_lines


def test_output_that_is_no_part_of_the_traceback_is_kept() -> None:
    text = report(traceback=TRACEBACK, stderr_tail="ValueError: bad\nmore")
    assert "--- last output ---\n  ValueError: bad\n  more\n" in text
    assert "--- last output ---\n  alone\n" in report(stderr_tail="alone")


def test_an_end_whose_status_is_not_known() -> None:
    assert report().startswith("engine 0 (pid 7) died while it was serving: exit status unknown\n")
    raised = report(exception_type="ValueError", exception_message="bad", traceback=TRACEBACK)
    assert raised.startswith("engine 0 (pid 7) died while it was serving: by an exception\nValueError: bad\n")


def test_what_the_client_found_comes_first_and_its_own_signal_is_blamed_for_nothing() -> None:
    text = report(phase="hello", signal=9, reason="no HELLO came within 2.0 s; the limit is ...")
    first, *_, advice = text.splitlines()
    assert (
        first
        == "engine 0 (pid 7) was ended by the client before it said HELLO: no HELLO came within 2.0 s; the limit is ..."
    )
    assert "SIGKILL" not in text and advice == "The client ended this engine for the reason above."
    refused = report(pid=None, phase="launch", reason="/nowhere could not be started", exception_type="OSError")
    assert refused.startswith("engine 0 was not started: /nowhere could not be started\nOSError")
    assert report(attached=True, pid=None, reason="none came in 2 s").startswith("no engine came: none came in 2 s\n")
