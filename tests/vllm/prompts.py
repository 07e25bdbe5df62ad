"""Requests of mixed lengths, of which many begin alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from anyengine import SamplingParams

TEXT = (
    "The ferry left at six, and whoever came later had to take the long road around the lake. In winter the road was "
    "closed, so that the village on the other side heard no news until the ice was thick enough for a sledge. The "
    "baker kept a list of what people asked for: salt, needles, lamp oil, letters. Once a week he read it aloud, and "
    "everybody laughed, because the list was always the same. Then, one morning in March, somebody crossed the lake on "
    "foot, although the ice had begun to sing. He carried a box under his arm, went straight to the bakery, and put it "
    "on the counter. Nobody knew him. The baker asked what he wanted for it, and he said that it was not for sale; he "
    "only wanted to have it kept until somebody came who knew what was in it. "
)


def tokens_of(directory: Path, text: str = TEXT) -> list[int]:
    """The tokens of a text."""
    return Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids


def mixed_requests(directory: Path, count: int = 64) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of 1 to 160 tokens; greedy ones take turns with seeded ones, whose parameters differ."""
    text = tokens_of(directory, TEXT * 2)
    requests: list[tuple[list[int], dict[str, Any]]] = []
    for number in range(count):
        start = 0 if number % 3 else 2 * number
        prompt = text[start : start + 1 + (number * 37) % 160]
        params: dict[str, Any] = {"max_tokens": 3 + number % 6, "temperature": 0.0}
        if number % 2:
            params |= {"temperature": 0.7 + 0.01 * number, "seed": number, "top_p": 0.9, "top_k": 50}
        if number % 5 == 0:
            params |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.1}
        if number % 7 == 0:
            params |= {"min_tokens": 3, "min_p": 0.01 if number % 2 else 0.0}
        requests.append((prompt, params))
    return requests


def sampling(params: dict[str, Any]) -> SamplingParams:
    """The same parameters for our client."""
    return SamplingParams(**params)
