"""Log-probabilities of a prompt's tokens, against transformers' own forward pass."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from tests.engines.runs import Run, load, save_tiny

from anyengine.engine.core import EngineRequest
from anyengine.engines.transformers import TransformersEngine
from anyengine.errors import RequestRefusedError
from anyengine.params import SamplingParams
from anyengine.types import TokenLogprobs

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]


def check(found: list[TokenLogprobs] | None, prompt: list[int], expected: torch.Tensor, count: int) -> None:
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] == {}
    for token, row, entry in zip(prompt[1:], expected, found[1:], strict=False):
        best = row.topk(count).indices.tolist()
        assert list(entry) == [token, *(other for other in best if other != token)]
        assert list(entry.values()) == pytest.approx([row[other].item() for other in entry], abs=1e-4)


def requests(prompt: list[int]) -> list[tuple[list[int], int | None]]:
    return [(prompt, 3), (prompt[:17], 0), (prompt[:30], None), (prompt[:1], 4), (prompt[:2], 1), (prompt, 2)]


def start(engine: TransformersEngine, prompt: list[int]) -> Run:
    return Run(
        engine,
        [
            (tokens, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=count))
            for tokens, count in requests(prompt)
        ],
    )


def check_all(run: Run, prompt: list[int], expected: torch.Tensor) -> None:
    for (tokens, count), outcome in zip(requests(prompt), run.finish(), strict=True):
        assert len(outcome.tokens) == 3
        if count is None:
            assert outcome.prompt_logprobs is None
        else:
            check(outcome.prompt_logprobs, tokens, expected, count)


def test_with_prompts_in_pieces(engine: TransformersEngine, prompt: list[int], expected: torch.Tensor) -> None:
    assert engine._arguments.max_num_batched_tokens == 16
    check_all(start(engine, prompt), prompt, expected)


@pytest.mark.parametrize("steps", [1, 2, 4, 6])
def test_with_a_sleep_in_the_middle(
    engine: TransformersEngine, prompt: list[int], expected: torch.Tensor, steps: int
) -> None:
    run = start(engine, prompt)
    for _ in range(steps):
        run.step()
    engine.sleep(1)
    engine.wake_up(["weights", "kv_cache"])
    check_all(run, prompt, expected)


def test_with_preemption(stand_in: Path, prompt: list[int], expected: torch.Tensor) -> None:
    token_bytes = 3 * 2 * 16 * 2 * 4  # layers x heads x dimension x keys and values x bytes
    engine = load(
        stand_in, block_size=1, kv_cache_bytes=token_bytes * 68, max_model_len=66, max_num_seqs=8,
        max_num_batched_tokens=20,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, prompt_logprobs=1)
    run = Run(engine, [(prompt[:9], params), (prompt[:8], params), (prompt[:45], params)])
    preempted, waiting = 0, 3.0
    while engine.has_work():
        run.step()
        preempted += engine.statistics()["waiting"] > waiting
        waiting = engine.statistics()["waiting"]
    assert preempted
    for length, outcome in zip((9, 8, 45), run.outcomes.values(), strict=True):
        check(outcome.prompt_logprobs, prompt[:length], expected, 1)


def test_a_step_holds_the_logits_of_a_bounded_number_of_tokens(tiny: Path) -> None:
    engine = load(save_tiny(tiny, max_position_embeddings=1024), max_num_batched_tokens=2048)
    tokens = [index % 90 + 3 for index in range(600)]
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    run = Run(engine, [(tokens[:100], params)])
    run.step()
    scored = [run.add(tokens, dataclasses.replace(params, prompt_logprobs=1)) for _ in range(2)]
    forward, rows = engine._model.forward, []

    def watch(chunks: Any, cache: Any) -> Any:
        rows.append(sum(chunk.stop - chunk.start for chunk in chunks))
        return forward(chunks, cache)

    engine._model.forward = watch  # pyright: ignore[reportAttributeAccessIssue]
    run.finish()
    assert max(rows) <= 257  # one of them is the token of the first request
    reference = transformers.LlamaForCausalLM.from_pretrained(tiny)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
    for handle in scored:
        check(run.outcomes[handle].prompt_logprobs, tokens, expected, 1)


def test_it_comes_with_a_request_that_fails(
    engine: TransformersEngine, prompt: list[int], expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does for which the model computes NaN."""
    sample = engine._sampler.sample
    monkeypatch.setattr(engine._sampler, "sample", lambda logits, states: sample(logits * float("nan"), states))
    params = SamplingParams(max_tokens=3, prompt_logprobs=1)
    (outcome,) = Run(engine, [(prompt[:20], params)]).finish()
    assert (outcome.finish_reason, outcome.tokens) == ("error", [])
    check(outcome.prompt_logprobs, prompt[:20], expected, 1)


def test_a_prompt_of_embeddings_has_none(engine: TransformersEngine) -> None:
    with pytest.raises(RequestRefusedError, match=r"prompt_logprobs: a prompt of embeddings has no tokens to score"):
        engine.add_request(
            EngineRequest(
                handle=1,
                prompt_token_ids=None,
                prompt_embeds=numpy.zeros((3, 64), numpy.float32),
                sampling=SamplingParams(prompt_logprobs=0),
            )
        )
    assert not engine.has_work()
