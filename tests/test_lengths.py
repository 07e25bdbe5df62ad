"""How many tokens a request may generate beside its prompt."""

from __future__ import annotations

import pytest

from anyengine import RequestRefusedError, SamplingParams
from anyengine.lengths import token_limit
from anyengine.types import U32_MAX


@pytest.mark.parametrize(
    ("sampling", "prompt_length", "expected"),
    [
        (SamplingParams(max_tokens=2), 30, 2),
        (SamplingParams(max_tokens=1), 31, 1),
        (SamplingParams(max_tokens=None), 30, 2),
        (SamplingParams(max_tokens=None, min_tokens=2), 30, 2),
        (SamplingParams(max_tokens=3), 30, r"max_tokens=3: expected at most 2, .* 30 tokens .* 32 .* max_tokens=None"),
        (SamplingParams(max_tokens=None, min_tokens=3), 30, r"min_tokens=3: expected at most 2"),
        (SamplingParams(max_tokens=1), 32, r"prompt has 32 tokens, but max_model_len is 32 .* prompt of at most 31"),
        (SamplingParams(max_tokens=None), 33, r"prompt has 33 tokens, but max_model_len is 32"),
    ],
)
def test_tokens_beside_a_prompt(sampling: SamplingParams, prompt_length: int, expected: int | str) -> None:
    if isinstance(expected, int):
        assert token_limit(sampling, prompt_length, 32) == expected
        return
    with pytest.raises(RequestRefusedError, match=expected):
        token_limit(sampling, prompt_length, 32)


def test_as_many_as_fit_are_no_more_than_a_request_can_ask_for() -> None:
    limit = token_limit(SamplingParams(max_tokens=None), 1, 2**33)
    assert SamplingParams(max_tokens=limit).max_tokens == U32_MAX
