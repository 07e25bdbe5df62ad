"""Stop strings against a naive reference that sees the whole text, and their assembly with tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.text import kinds

from anyengine.errors import EngineError, RequestRefusedError
from anyengine.text import ModelText, TextOutput
from anyengine.text.assembler import TextAssembler
from anyengine.text.stop_strings import StopMatcher, check_stop
from anyengine.types import RequestOutput

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def reference(text: str, stops: Sequence[str], begin: int = 0) -> tuple[int, int] | None:
    """Start and end of the first match that ends after ``begin`` characters; the longest of those."""
    for end in range(begin + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end - max(map(len, found)), end
    return None


@given(parts=st.lists(LETTERS, max_size=6), stops=STOPS, include=st.booleans(), counts_from=st.integers(0, 6))
@example(parts=["aaa"], stops=["aa"], include=False, counts_from=0)
@example(parts=["ab", "c"], stops=["abc", "bc", "b" * 4], include=False, counts_from=0)
def test_any_split_ends_where_the_whole_does(
    parts: list[str], stops: list[str], include: bool, counts_from: int
) -> None:
    text = "".join(parts)
    found = reference(text, stops, len("".join(parts[:counts_from])))
    expected = text if found is None else text[: found[1] if include else found[0]]
    matcher = StopMatcher(stops, include=include)
    shown = ""
    for index, part in enumerate(parts):
        shown += matcher.feed(part, counts=index >= counts_from)
        so_far = "".join(parts[: index + 1])
        assert expected.startswith(shown)
        if matcher.matched is not None:
            break
        # What stays back is no more than what may become a stop string.
        back = so_far[len(shown) :]
        assert back == "" or not include
        assert back == "" or any(stop.startswith(back) for stop in stops)
    else:
        shown += matcher.finish()
    assert shown == expected
    assert matcher.matched == (None if found is None else text[found[0] : found[1]])


def test_text_comes_out_when_it_cannot_become_a_stop_string() -> None:
    matcher = StopMatcher(["\n\nUser:", "\n\nEnd"], include=False)
    assert matcher.feed("Yes.\n") == "Yes."
    assert matcher.feed("\nU") == ""
    assert matcher.feed("nder\n") == "\n\nUnder"
    assert matcher.feed("\nEn") == ""
    assert matcher.matched is None
    assert matcher.feed("d of it") == ""
    assert matcher.matched == "\n\nEnd"


@pytest.mark.parametrize(
    ("stop", "error", "message"),
    [
        ("", RequestRefusedError, r"stop\[0\]='': expected at least one"),
        (["a", ""], RequestRefusedError, r"stop\[1\]=''"),
        ([1], TypeError, r"stop\[0\]=1 \(int\): expected a string"),
        (5, TypeError, "expected a string or a list of strings"),
        (b"ab", TypeError, "expected a string or a list of strings"),
        ({"a"}, TypeError, "expected a string or a list of strings"),
    ],
)
def test_bad_stop_strings(stop: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_stop(stop)
    assert check_stop("ab") == ("ab",)


# ---- with tokens ----

TEXT = ModelText(kinds.byte_level())


def output(token_ids: Sequence[int], **more: Any) -> RequestOutput:
    return RequestOutput(request_id="r", token_ids=list(token_ids), **more)


def assembler(stop: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0) -> TextAssembler:
    return TextAssembler(TEXT.detokenizer(), stop, include_stop=include_stop, min_tokens=min_tokens)


def run(machine: TextAssembler, token_ids: Sequence[int], cuts: Sequence[int], **ending: Any) -> list[TextOutput]:
    """Feed the tokens in pieces, the last of which ends the request."""
    ends = [*sorted({cut % (len(token_ids) + 1) for cut in cuts} - {len(token_ids)}), len(token_ids)]
    outputs: list[TextOutput] = []
    for start, end in itertools.pairwise([0, *ends]):
        last = {"finish_reason": "length", **ending} if end == len(token_ids) else {}
        logprobs = [{token: -1.0} for token in token_ids[start:end]]
        outputs.append(machine.feed(output(token_ids[start:end], logprobs=logprobs, **last)))
        if machine.ended:
            break
    return outputs


@given(
    text=st.text("héllo 日w\n", max_size=20),
    stops=st.lists(st.text("hélo 日w", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 20),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_tokens_against_the_whole_text(
    text: str, stops: list[str], include: bool, min_tokens: int, cuts: list[int]
) -> None:
    token_ids = tokens_of(text)
    found = reference(text, stops, len(text.encode()[:min_tokens].decode(errors="ignore")))
    machine = assembler(stops, include_stop=include, min_tokens=min_tokens)
    outputs = run(machine, token_ids, cuts)
    assert machine.ended
    shown = "".join(part.text for part in outputs)
    tokens = [token for part in outputs for token in part.token_ids]
    logprobs = [position for part in outputs for position in part.logprobs or ()]
    assert [list(position) for position in logprobs] == [[token] for token in tokens]
    if found is None:
        assert (shown, tokens) == (text, token_ids)
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("length", None)
    else:
        start, end = found
        assert shown == text[: end if include else start]
        # The last token is the one that completed the stop string, however many had come with it.
        assert tokens == token_ids[: len(text[:end].encode())]
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", text[start:end])
    assert all(part.finish_reason is None for part in outputs[:-1])


BYTE_TOKENS = {TEXT.token_bytes(token)[0]: token for token in range(256)}


def tokens_of(text: str) -> list[int]:
    return [BYTE_TOKENS[byte] for byte in text.encode()]


def test_a_stop_string_does_not_count_before_min_tokens() -> None:
    machine = assembler(["ab"], min_tokens=4)
    outputs = run(machine, tokens_of("abxabxab"), [1, 2, 3, 4, 5, 6])
    assert "".join(part.text for part in outputs) == "abx"
    assert sum(len(part.token_ids) for part in outputs) == 5
    assert outputs[-1].stop_reason == "ab"


@pytest.mark.parametrize("stop", [[], ["zz"]])
def test_the_text_of_a_stop_token(stop: list[str]) -> None:
    token_ids = tokens_of("ab!")
    ending = {"finish_reason": "stop", "stop_reason": token_ids[-1]}
    (left_out,) = run(assembler(stop), token_ids, [], **ending)
    assert (left_out.text, left_out.token_ids, left_out.stop_reason) == ("ab", token_ids, token_ids[-1])
    (included,) = run(assembler(stop, include_stop=True), token_ids, [], **ending)
    assert included.text == "ab!"


def test_what_stays_back_comes_out_at_the_end() -> None:
    token_ids = tokens_of("so far: \N{PARTY POPPER}")
    machine = assembler(["far: \N{PARTY POPPER}!"])
    first, last = run(machine, token_ids[:-1], [5])
    assert first.text == "so "
    assert last.text == "far: \N{REPLACEMENT CHARACTER}"
    assert last.finish_reason == "length"


def test_an_error_comes_after_the_text_from_before_it_and_once() -> None:
    machine = assembler(["far!"])
    assert machine.feed(output(tokens_of("so fa"))).text == "so "
    error = EngineError("gone")
    rest = machine.fail(error, "r")
    assert rest is not None
    assert (rest.text, rest.token_ids, rest.finish_reason) == ("fa", [], None)
    with pytest.raises(EngineError) as raised:
        machine.raise_error()
    assert raised.value is error
    machine.raise_error()
    assert machine.ended
    assert machine.fail(error, "r") is None
