"""The transformers engine, stepped in this process, against transformers' own ``generate``.

The real model is converted, loaded and compared; what does not depend on what a model says is tested on a stand-in.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from tests.engines.runs import save_stand_in

from anyengine.engine.core import EngineRequest
from anyengine.engines.transformers import TransformersEngine, default_model
from anyengine.errors import RequestFailedError, RequestRefusedError
from anyengine.params import SamplingParams, StructuredOutputs
from anyengine.protocol import arrays

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]

EOS = 2
NEW_TOKENS = 8
THREADS = 1  # more would have to wait for each other whenever another process is busy
TEXT = (
    "The library stood at the end of a narrow street, and in the evening its windows were the only light. A clerk "
    "counted the returned books twice, wrote the number on a card, and put the card into a drawer that nobody opened. "
    "On the day of the flood the drawer was found open and empty, and the river had risen to the third step."
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)

_handles = itertools.count(1)


@dataclasses.dataclass
class Outcome:
    """All that came of one request."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Any] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: object = None
    error: Exception | None = None


def submit(engine: TransformersEngine, prompt: Sequence[int] | None, params: SamplingParams, embeds: Any = None) -> int:
    handle = next(_handles)
    engine.add_request(EngineRequest(handle=handle, prompt_token_ids=prompt, prompt_embeds=embeds, sampling=params))
    return handle


def collect(engine: TransformersEngine, outcomes: dict[int, Outcome]) -> bool:
    """Make one step; whether it brought anything."""
    outputs = engine.step()
    if outputs is None:
        return False
    for handle, tokens, details in outputs.rows():
        outcome = outcomes.setdefault(handle, Outcome())
        assert outcome.finish_reason is None, "an output after the last one"
        outcome.tokens += tokens
        if details is not None:
            outcome.logprobs += details.logprobs or ()
            outcome.finish_reason, outcome.stop_reason = details.finish_reason, details.stop_reason
            outcome.error = details.to_error(handle) if details.finish_reason == "error" else None
    return True


def run(engine: TransformersEngine, requests: Iterable[tuple[Sequence[int], SamplingParams]]) -> list[Outcome]:
    """Run requests together, to their ends."""
    handles = [submit(engine, prompt, params) for prompt, params in requests]
    outcomes: dict[int, Outcome] = {}
    while engine.has_work():
        collect(engine, outcomes)
    assert idle(engine)
    return [outcomes[handle] for handle in handles]


def one(engine: TransformersEngine, prompt: Sequence[int], **params: Any) -> Outcome:
    return run(engine, [(prompt, SamplingParams(**params))])[0]


def idle(engine: TransformersEngine) -> bool:
    figures = engine.statistics()
    return figures["running"] == figures["waiting"] == figures["kv_blocks_used"] == 0


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model, converted into a cache of this module's own."""
    stages: list[tuple[str, float | None]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANYENGINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        path = default_model(lambda stage, fraction=None: stages.append((stage, fraction)))
        assert stages[0] == ("converting model", 0.0)
        assert stages[-1] == ("converting model", 1.0)
        stages.clear()
        assert default_model(lambda stage, fraction=None: stages.append((stage, fraction))) == path
        assert not stages, "it was converted a second time"
    return path


def load(directory: Path, **arguments: Any) -> TransformersEngine:
    arguments = {"kv_cache_bytes": 2**28} | arguments
    engine = TransformersEngine(model=str(directory), dtype="float32", device="cpu", num_threads=THREADS, **arguments)
    engine.load(lambda stage, fraction=None: None)
    return engine


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in."""
    return save_stand_in(tmp_path_factory.mktemp("stand_in") / "model")


@pytest.fixture(scope="module")
def engine(directory: Path) -> TransformersEngine:
    return load(directory)


def load_reference(directory: Path) -> Any:
    torch.set_num_threads(THREADS)
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def whole(converted: Path) -> tuple[Any, TransformersEngine]:
    """The default model, in transformers and in the engine."""
    return load_reference(converted), load(converted, max_num_seqs=16, max_num_batched_tokens=37)


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    return load_reference(directory)


@pytest.fixture(scope="module")
def prompts(converted: Path) -> list[list[int]]:
    """Sixteen prompts of 1 to 61 tokens, in an order that mixes short and long."""
    tokens = transformers.AutoTokenizer.from_pretrained(converted)(TEXT).input_ids
    lengths = [1 + 4 * (7 * index % 16) for index in range(16)]
    return [tokens[start : start + length] for start, length in enumerate(lengths)]


def generate(reference: Any, prompt: Sequence[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS} | options
    output = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def expected(reference: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [generate(reference, prompt) for prompt in prompts]


def logits_of(reference: Any, tokens: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0]


def bytes_of_blocks(reference: Any, blocks: int, block_size: int) -> int:
    config = reference.config
    return blocks * block_size * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 4


class TestConversion:
    """The default model as it lies in the cache, and what depends on what a model says."""

    def test_the_model_is_a_normal_directory(self, converted: Path) -> None:
        assert {file.name for file in converted.iterdir()} >= {
            "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja",
        }  # fmt: skip
        assert {file.stat().st_mode & 0o777 for file in converted.iterdir()} == {0o644}
        assert [path.name for path in converted.parent.iterdir() if "partial" in path.name] == []
        tokenizer = transformers.AutoTokenizer.from_pretrained(converted)
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        assert "<|im_start|>user\nHi<|im_end|>" in chat

    def test_loading_reports_every_stage(self, converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ANYENGINE_CACHE", str(converted.parent))
        stages: list[tuple[str, float | None]] = []
        engine = TransformersEngine(model="default", num_threads=THREADS)
        engine.load(lambda stage, fraction=None: stages.append((stage, fraction)))
        names = ["importing torch", "loading weights", "allocating KV cache", "warming up"]
        assert stages == [(name, fraction) for name in names for fraction in (0.0, 1.0)]
        assert engine.describe().dtype == "bfloat16"
        assert idle(engine)

    def test_its_greedy_tokens_are_those_of_generate(
        self, converted: Path, whole: tuple[Any, TransformersEngine], prompts: list[list[int]]
    ) -> None:
        reference, engine = whole
        tokenizer = transformers.AutoTokenizer.from_pretrained(converted)
        few = [tokenizer("The capital of France is").input_ids, *prompts[:3]]
        expected = [generate(reference, prompt) for prompt in few]
        assert tokenizer.decode(expected[0][0]) == " Paris"
        assert [outcome.tokens for outcome in run(engine, [(prompt, GREEDY) for prompt in few])] == expected

    def test_and_with_a_repetition_penalty(
        self, whole: tuple[Any, TransformersEngine], prompts: list[list[int]]
    ) -> None:
        reference, engine = whole
        longest = max(prompts, key=len)
        wanted = generate(reference, longest, repetition_penalty=1.3)
        assert wanted != generate(reference, longest)
        params = dataclasses.replace(GREEDY, repetition_penalty=1.3)
        assert run(engine, [(longest, params), (longest, GREEDY)])[0].tokens == wanted


class TestEqualToGenerate:
    """Greedy tokens in float32 are those that each prompt gets alone, whatever the engine does with it."""

    def test_together(self, engine: TransformersEngine, prompts: list[list[int]], expected: list[list[int]]) -> None:
        outcomes = run(engine, [(prompt, GREEDY) for prompt in prompts])
        assert [outcome.tokens for outcome in outcomes] == expected
        for outcome in outcomes:
            assert outcome.finish_reason == ("stop" if outcome.tokens[-1] == EOS else "length")

    def test_with_prompts_in_pieces_and_rows_of_very_different_length(
        self, directory: Path, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        engine = load(directory, max_num_seqs=16, max_num_batched_tokens=37, block_size=4)
        order = sorted(range(16), key=lambda index: -len(prompts[index]))
        handles = [submit(engine, prompts[index], GREEDY) for index in order]
        outcomes: dict[int, Outcome] = {}
        assert not collect(engine, outcomes), "the first prompt was not cut"
        while engine.has_work():
            collect(engine, outcomes)
        assert [outcomes[handle].tokens for handle in handles] == [expected[index] for index in order]

    def test_with_preemption(
        self, directory: Path, reference: Any, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        engine = load(
            directory, block_size=1, kv_cache_bytes=bytes_of_blocks(reference, 90, 1), max_num_batched_tokens=64
        )
        assert engine.describe().num_gpu_blocks == 90
        handles = [submit(engine, prompt, GREEDY) for prompt in prompts]
        outcomes: dict[int, Outcome] = {}
        preempted, waiting = 0, float(len(prompts))
        while engine.has_work():
            collect(engine, outcomes)
            preempted += engine.statistics()["waiting"] > waiting
            waiting = engine.statistics()["waiting"]
        assert preempted >= 2, "it takes several: after one, greedy tokens may come out right by luck"
        assert [outcomes[handle].tokens for handle in handles] == expected
        assert idle(engine)

    def test_with_aborts_in_between(
        self, engine: TransformersEngine, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        outcomes: dict[int, Outcome] = {}
        kept: list[int] = []
        doomed: list[int] = []
        for prompt in prompts:
            kept.append(submit(engine, prompt, GREEDY))
            doomed.append(submit(engine, prompt[::-1], GREEDY))
        while engine.has_work():
            collect(engine, outcomes)
            if doomed:
                used = engine.statistics()["kv_blocks_used"]
                engine.abort_requests([doomed.pop(), doomed.pop(0), 10**9])
                assert engine.statistics()["kv_blocks_used"] < used
        assert [outcomes[handle].tokens for handle in kept] == expected
        assert idle(engine)

    def test_whatever_the_blocks_held_before(
        self, engine: TransformersEngine, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        for cache in (engine._cache.keys, engine._cache.values):
            cache[:, 1:] = float("nan")
        outcomes = run(engine, [(prompt, GREEDY) for prompt in prompts])
        assert [outcome.tokens for outcome in outcomes] == expected

    @pytest.mark.parametrize("kind", ["torch", "numpy", "wire"])
    def test_with_a_prompt_of_embeddings(
        self,
        engine: TransformersEngine,
        reference: Any,
        prompts: list[list[int]],
        expected: list[list[int]],
        kind: str,
    ) -> None:
        embeds: Any = reference.get_input_embeddings()(torch.tensor(prompts[5])).detach()
        if kind != "torch":
            embeds = embeds.numpy()
        if kind == "wire":
            embeds = arrays.from_value(embeds)
        handles = [submit(engine, prompts[4], GREEDY), submit(engine, None, GREEDY, embeds)]
        outcomes: dict[int, Outcome] = {}
        while engine.has_work():
            collect(engine, outcomes)
        assert [outcomes[handle].tokens for handle in handles] == expected[4:6]


class TestRequests:
    """How requests end before their time, and what is refused."""

    def test_an_abort_frees_everything_at_once(self, engine: TransformersEngine, prompts: list[list[int]]) -> None:
        few = prompts[:7]
        handles = [submit(engine, prompt, GREEDY) for prompt in few]
        assert engine.statistics()["waiting"] == 7
        engine.step()
        assert engine.statistics()["running"] == 7
        assert engine.statistics()["kv_blocks_used"] == sum(-(-len(prompt) // 16) for prompt in few)
        engine.abort_requests(handles)
        assert idle(engine)
        assert not engine.has_work()
        assert engine.step() is None

    def test_a_waiting_request_can_be_aborted(self, engine: TransformersEngine, prompts: list[list[int]]) -> None:
        engine.abort_requests([submit(engine, prompts[0], GREEDY)])
        assert not engine.has_work()

    def test_max_model_len_ends_a_request(self, directory: Path, prompts: list[list[int]]) -> None:
        engine = load(directory, max_model_len=32)
        outcome = one(engine, prompts[1][:29], temperature=0.0, max_tokens=None, ignore_eos=True)
        assert (len(outcome.tokens), outcome.finish_reason) == (3, "length")
        with pytest.raises(RequestRefusedError, match=r"prompt has 32 tokens, but max_model_len is 32 .* at most 31"):
            submit(engine, range(32), GREEDY)
        with pytest.raises(RequestRefusedError, match=r"max_tokens=5: expected at most 1"):
            one(engine, range(31), max_tokens=5)
        assert len(one(engine, range(31), max_tokens=1).tokens) == 1

    def test_a_bad_request_is_refused_alone(
        self, engine: TransformersEngine, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        handle = submit(engine, prompts[0], GREEDY)
        engine.step()
        refused = [
            ([1, 49152], {}, "token 49152: the model has 49152 tokens"),
            ([], {}, "prompt is empty"),
            ([1], {"stop_token_ids": [2**31]}, r"stop_token_ids holds 2147483648"),
            ([1], {"logit_bias": {50000: 1.0}}, r"logit_bias holds 50000"),
            ([1], {"allowed_token_ids": [3, 60000]}, r"allowed_token_ids holds 60000"),
            ([1], {"allowed_token_ids": [3, 4], "stop_token_ids": [3, 4], "min_tokens": 1}, "min_tokens=1: all tokens"),
            ([1] * 200, {"prompt_logprobs": 2**32 - 1}, r"prompt_logprobs=4294967295: expected at most 20971"),
            ([1], {"structured_outputs": StructuredOutputs(regex="a")}, r"SamplingParams\.structured_outputs"),
            ([1], {"extra": {"best_of": 2}}, r"SamplingParams\.extra"),
        ]
        for prompt, params, message in refused:
            with pytest.raises(RequestRefusedError, match=message):
                submit(engine, prompt, SamplingParams(**params))
        outcomes = {handle: Outcome(expected[0][:1])}
        while engine.has_work():
            collect(engine, outcomes)
        assert outcomes[handle].tokens == expected[0]
        assert idle(engine)

    @pytest.mark.parametrize(
        ("embeds", "message"),
        [
            (numpy.zeros((3, 7), numpy.float32), r"shape \[3, 7\] .* expected \[tokens, 64\]"),
            (numpy.zeros((3, 64), numpy.int64), r"torch\.int64: expected"),
            (torch.full((2, 64), float("nan")), "NaN"),
            (torch.full((2, 64), 1e300, dtype=torch.float64), r"infinite in torch\.float32"),
            ({"a": 1}, "cannot become a torch tensor"),
        ],
    )
    def test_bad_embeddings_are_refused(self, engine: TransformersEngine, embeds: Any, message: str) -> None:
        with pytest.raises(RequestRefusedError, match=message):
            submit(engine, None, GREEDY, embeds)
        assert not engine.has_work()


class TestSampling:
    """Sampling parameters, on the model."""

    def test_a_seed_gives_the_same_tokens_whatever_else_runs(
        self, engine: TransformersEngine, prompts: list[list[int]]
    ) -> None:
        params = SamplingParams(max_tokens=8, seed=-5, top_p=0.9, ignore_eos=True)
        alone = run(engine, [(prompts[3], params)])[0]
        others = [
            SamplingParams(max_tokens=20, seed=6, top_p=0.9, ignore_eos=True),
            SamplingParams(max_tokens=3, temperature=1.5, top_k=20, min_p=0.01),
            GREEDY,
        ]
        batch = [(prompts[3], params), *((prompts[index], other) for index, other in enumerate(others))]
        for order in (batch, batch[::-1]):
            outcomes = run(engine, order)
            assert outcomes[order.index(batch[0])].tokens == alone.tokens
        assert run(engine, [(prompts[3], dataclasses.replace(params, seed=7))])[0].tokens != alone.tokens

    def test_requests_without_a_seed_differ(self, engine: TransformersEngine, prompts: list[list[int]]) -> None:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        first, second = run(engine, [(prompts[3], params)] * 2)
        assert first.tokens != second.tokens

    @pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-10}])
    def test_one_candidate_is_greedy(
        self, engine: TransformersEngine, prompts: list[list[int]], expected: list[list[int]], limit: dict[str, Any]
    ) -> None:
        params = SamplingParams(**{"max_tokens": 4, "temperature": 1.3, **limit})
        outcomes = run(engine, [(prompt, params) for prompt in prompts[:4]])
        assert [outcome.tokens for outcome in outcomes] == [tokens[:4] for tokens in expected[:4]]

    def test_a_stop_token_ends_the_request_and_is_part_of_it(
        self, engine: TransformersEngine, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        stop = expected[1][3]
        outcome = one(engine, prompts[1], temperature=0.0, max_tokens=NEW_TOKENS, stop_token_ids=[7, stop])
        assert outcome.tokens == expected[1][: expected[1].index(stop) + 1]
        assert (outcome.finish_reason, outcome.stop_reason) == ("stop", stop)

    def test_eos_ends_the_request_unless_it_is_ignored(
        self, engine: TransformersEngine, prompts: list[list[int]]
    ) -> None:
        eos = SamplingParams(temperature=0.0, max_tokens=4, logit_bias={EOS: 1000.0})
        outcomes = run(
            engine,
            [
                (prompts[1], eos),
                (prompts[1], dataclasses.replace(eos, ignore_eos=True)),
                (prompts[1], dataclasses.replace(eos, ignore_eos=True, stop_token_ids=[EOS])),
                (prompts[1], dataclasses.replace(eos, min_tokens=3)),
            ],
        )
        assert (outcomes[0].tokens, outcomes[0].finish_reason, outcomes[0].stop_reason) == ([EOS], "stop", None)
        assert (outcomes[1].tokens, outcomes[1].finish_reason) == ([EOS] * 4, "length")
        assert (outcomes[2].tokens, outcomes[2].finish_reason, outcomes[2].stop_reason) == ([EOS], "stop", EOS)
        assert outcomes[3].tokens.index(EOS) == 3
        assert outcomes[3].finish_reason == "stop"

    def test_only_allowed_tokens_come(self, engine: TransformersEngine, prompts: list[list[int]]) -> None:
        allowed = {300, 301, 302}
        outcome = one(engine, prompts[2], max_tokens=8, allowed_token_ids=sorted(allowed))
        assert set(outcome.tokens) <= allowed
        biased = one(engine, prompts[2], max_tokens=3, allowed_token_ids=sorted(allowed), logit_bias={301: 100.0})
        assert biased.tokens == [301] * 3

    def test_a_row_of_logits_that_are_no_numbers_is_the_engines_fault_and_fails_alone(
        self,
        engine: TransformersEngine,
        prompts: list[list[int]],
        expected: list[list[int]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        sample = engine._sampler.sample

        def sample_of_nan(logits: torch.Tensor, states: Any) -> Any:
            marked = torch.tensor([state.params.min_tokens == 1 for state in states])
            return sample(torch.where(marked[:, None], float("nan"), logits), states)

        monkeypatch.setattr(engine._sampler, "sample", sample_of_nan)
        marked = dataclasses.replace(GREEDY, min_tokens=1)
        failed, other = run(engine, [(prompts[0], marked), (prompts[1], GREEDY)])
        assert (failed.tokens, failed.finish_reason) == ([], "error")
        assert type(failed.error) is RequestFailedError and "no token can be sampled" in str(failed.error)
        assert other.tokens == expected[1]

    def test_logprobs_are_those_of_the_raw_logits(
        self, engine: TransformersEngine, reference: Any, prompts: list[list[int]]
    ) -> None:
        prompt = prompts[3]
        shape = {"max_tokens": 5, "ignore_eos": True}
        requests = [
            SamplingParams(temperature=0.0, logprobs=0, **shape),
            SamplingParams(temperature=2.0, seed=1, logprobs=5, top_k=50, logit_bias={9: 3.0}, **shape),
            SamplingParams(temperature=0.0, **shape),
        ]
        outcomes = run(engine, [(prompt, params) for params in requests])
        assert outcomes[2].logprobs == []
        for outcome, count in zip(outcomes[:2], (0, 5), strict=True):
            logprobs = logits_of(reference, prompt + outcome.tokens)[len(prompt) - 1 : -1].log_softmax(-1)
            assert len(outcome.logprobs) == len(outcome.tokens) == 5
            for row, token, found in zip(logprobs, outcome.tokens, outcome.logprobs, strict=True):
                best = row.topk(count).indices.tolist()
                assert list(found) == [token, *(other for other in best if other != token)]
                assert list(found.values()) == pytest.approx([row[other].item() for other in found], abs=1e-4)

    def test_all_logprobs_sum_to_one(self, engine: TransformersEngine, prompts: list[list[int]]) -> None:
        (found,) = one(engine, prompts[0], temperature=0.0, max_tokens=1, logprobs=49152).logprobs
        assert len(found) == 49152
        assert sum(map(math.exp, found.values())) == pytest.approx(1.0, abs=1e-4)


def test_describe_says_what_was_loaded(directory: Path) -> None:
    engine = load(directory, max_model_len=64, max_num_seqs=4, block_size=16, kv_cache_bytes=None, max_logprobs=50)
    info = engine.describe()
    assert (info.engine, info.version) == ("transformers", transformers.__version__)
    assert (info.dtype, info.vocab_size, info.max_model_len) == ("float32", 49152, 64)
    assert (info.num_gpu_blocks, info.block_size, info.kv_cache_size_tokens) == (16, 16, 256)
    assert info.kv_cache_max_concurrency == 4.0
    assert info.prompt_embeds
    assert info.max_logprobs == 50
    assert engine.statistics()["kv_blocks_total"] == 16
    assert "seed" in info.sampling_parameters
    assert "prompt_logprobs" in info.sampling_parameters
