"""How many log-probabilities a request may ask for at each token."""

from __future__ import annotations

import pytest

from anyengine import EngineInfo, RequestRefusedError, SamplingParams
from anyengine.logprob_limits import within_max_logprobs

ABOVE = r"expected at most 20, which is the max_logprobs of engine 'some'; .* max_logprobs=-1 to allow all"


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("limit", "vocab_size", "wanted", "expected"),
    [
        (20, 100, 0, 0),
        (20, 100, 20, 20),
        (20, None, 20, 20),
        (20, 100, 21, f"=21: {ABOVE}"),
        (20, None, 21, f"=21: {ABOVE}"),
        (20, 100, 2**32 - 1, f"=4294967295: {ABOVE}"),
        (20, 100, -1, f"=-1: {ABOVE}"),
        (20, None, -1, f"=-1: {ABOVE}"),
        (20, 10, -1, 10),  # all of them are few enough
        (0, 100, 0, 0),
        (0, 100, 1, "=1: expected at most 0"),
        (-1, 100, 100, 100),
        (-1, 100, -1, 100),
        (-1, 100, 101, "=101: expected at most 100, the tokens of the vocabulary of engine 'some', or -1 for all"),
        (-1, None, 10**6, 10**6),
        (-1, None, -1, "=-1: expected a number, for engine 'some' does not say how many tokens its vocabulary has"),
    ],
)
def test_as_many_as_the_engine_allows(
    field: str, limit: int, vocab_size: int | None, wanted: int, expected: int | str
) -> None:
    info = EngineInfo(engine="some", version="1", max_model_len=100, vocab_size=vocab_size, max_logprobs=limit)
    sampling = SamplingParams(**{field: wanted}, temperature=0.0)
    if isinstance(expected, str):
        with pytest.raises(RequestRefusedError, match=rf"SamplingParams\.{field}{expected}"):
            within_max_logprobs(sampling, info)
        return
    allowed = within_max_logprobs(sampling, info)
    assert allowed.differences == {field: expected, "temperature": 0.0}
    assert (allowed is sampling) == (wanted == expected)


def test_both_fields_are_looked_at() -> None:
    info = EngineInfo(engine="some", version="1", max_model_len=100, vocab_size=50, max_logprobs=-1)
    allowed = within_max_logprobs(SamplingParams(logprobs=-1, prompt_logprobs=-1), info)
    assert (allowed.logprobs, allowed.prompt_logprobs) == (50, 50)
    with pytest.raises(RequestRefusedError, match="prompt_logprobs=51"):
        within_max_logprobs(SamplingParams(logprobs=3, prompt_logprobs=51), info)
