"""What the transformers engine offers beside requests, on a real model: sleep, workers, profiles, files."""

from __future__ import annotations

import gzip
import json
import os
import pwd
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from tests.engines.runs import MIB, THREADS, Run, load, save_tiny, tokens_of

from anyengine import EngineSpec, UtilityError, open_engine_client
from anyengine.engine.core import utilities_of
from anyengine.engines.transformers import TransformersEngine
from anyengine.params import SamplingParams

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]


def resident_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- functions that collective_rpc calls ----


def count_parameters(worker: Any, scale: int = 1, *, plus: int = 0) -> int:
    return scale * sum(parameter.numel() for parameter in worker.model.parameters()) + plus


def halve_weights(worker: Any) -> None:
    for parameter in worker.model.parameters():
        parameter.mul_(0.5)


def first_weights(worker: Any) -> torch.Tensor:
    return worker.model.get_input_embeddings().weight[:2, :4]


NOT_A_FUNCTION = 7


class TestSleep:
    """The hooks ``sleep`` and ``wake_up``, as the control calls them: between two steps."""

    def requests(self, prompt: list[int]) -> list[tuple[list[int], SamplingParams]]:
        greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        drawn = SamplingParams(seed=3, max_tokens=8, ignore_eos=True, frequency_penalty=0.5, logprobs=2)
        return [
            (prompt[:1], greedy),
            (prompt[:13], greedy),
            (prompt[5:12], drawn),
            (prompt[:40], greedy),  # after a few steps, only the first part of this is in the cache
            (prompt[3:30], greedy),
        ]

    @pytest.mark.parametrize("level", [1, 2])
    def test_requests_go_on_with_the_same_tokens(
        self, engine: TransformersEngine, prompt: list[int], level: int
    ) -> None:
        requests = self.requests(prompt)
        expected = tokens_of(engine, requests)
        run = Run(engine, requests)
        for _ in range(3):
            run.step()
        progress = [len(outcome.tokens) for outcome in run.outcomes.values()]
        assert progress[0]
        assert not progress[-1]
        assert engine.statistics()["kv_blocks_used"]
        engine.sleep(level)
        figures = engine.statistics()
        assert (figures["running"], figures["waiting"], figures["kv_blocks_used"]) == (0, 5, 0)
        late = run.add(prompt[:3], requests[0][1])
        doomed = run.add(prompt[:4], requests[0][1])
        engine.abort_requests([doomed])
        del run.outcomes[doomed]
        for tags in (["weights"], ["kv_cache"]):
            with pytest.raises(RuntimeError, match=r"step\(\) of an engine that sleeps"):
                engine.step()
            engine.wake_up(tags)
        run.finish()
        assert [run.outcomes[handle].tokens for handle in run.outcomes if handle != late] == expected
        assert [run.outcomes[late].tokens] == tokens_of(engine, [(prompt[:3], requests[0][1])])

    def test_the_tokens_are_those_of_generate(
        self, engine: TransformersEngine, reference: Any, prompt: list[int]
    ) -> None:
        ids = torch.tensor([prompt[:24]])
        output = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        run = Run(engine, [(prompt[:24], SamplingParams(temperature=0.0, max_tokens=8))])
        for _ in range(4):
            run.step()
        engine.sleep(2)
        engine.wake_up(["weights", "kv_cache"])
        assert run.finish()[0].tokens == output[0, 24:].tolist()

    def test_memory_comes_back(self, directory: Path, prompt: list[int]) -> None:
        requests = [(prompt[:20], SamplingParams(temperature=0.0, max_tokens=4))]
        engine = load(directory, kv_cache_bytes=256 * MIB)
        weights = sum(parameter.nbytes for parameter in engine._model.module.parameters())
        assert weights > 500 * MIB
        expected = tokens_of(engine, requests)
        engine._cache.keys.fill_(1.0)  # memory that nobody wrote to is not there yet
        engine._cache.values.fill_(1.0)
        awake = resident_bytes()
        engine.sleep(1)
        assert awake - resident_bytes() > 200 * MIB, "level 1 keeps the cache"
        engine.wake_up(["weights", "kv_cache"])
        assert tokens_of(engine, requests) == expected
        for _ in range(3):  # nothing grows from sleep to sleep
            engine.sleep(2)
            assert awake - resident_bytes() > 600 * MIB, "level 2 keeps weights or cache"
            engine.wake_up(["weights", "kv_cache"])
        assert tokens_of(engine, requests) == expected
        assert resident_bytes() < awake + 100 * MIB

    @pytest.mark.parametrize("tied", [True, False])
    def test_level_2_reads_the_weights_again_and_keeps_buffers(self, tmp_path: Path, tied: bool) -> None:
        engine = load(save_tiny(tmp_path / "model", tie_word_embeddings=tied))
        module = engine._model.module
        module.register_buffer("counter", torch.tensor([5.0]), persistent=False)
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        buffers = {name: tensor.clone() for name, tensor in module.named_buffers()}
        assert buffers
        engine.sleep(2)
        assert sum(parameter.numel() for parameter in module.parameters()) == 0
        engine.wake_up(["weights", "kv_cache"])
        after = module.state_dict()
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert torch.equal(after[name], tensor), name
        for name, tensor in module.named_buffers():
            assert torch.equal(buffers[name], tensor), name
        assert (module.lm_head.weight is module.get_input_embeddings().weight) is tied
        assert not any(parameter.requires_grad for parameter in module.parameters())

    def test_changed_weights_outlive_level_1_but_not_level_2(self, tiny: Path) -> None:
        engine = load(tiny)
        (original,) = engine.collective_rpc(f"{__name__}:first_weights")
        original = original.clone()
        engine.collective_rpc(f"{__name__}:halve_weights")
        for level, factor in ((1, 0.5), (2, 1.0)):
            engine.sleep(level)
            engine.wake_up(["weights", "kv_cache"])
            assert torch.equal(engine.collective_rpc(f"{__name__}:first_weights")[0], factor * original)

    @pytest.mark.parametrize("failure", ["gone", "another"])
    def test_a_checkpoint_that_is_gone_or_another_one_leaves_the_engine_asleep(
        self, tiny: Path, tmp_path: Path, failure: str
    ) -> None:
        engine = load(tiny)
        requests = [([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=6))]
        expected = tokens_of(engine, requests)
        engine.sleep(2)
        tiny.rename(tmp_path / "kept")
        if failure == "another":
            save_tiny(tiny, hidden_size=64, num_hidden_layers=3)
        with pytest.raises((OSError, RuntimeError)):
            engine.wake_up(["weights", "kv_cache"])
        with pytest.raises(RuntimeError, match="sleeps"):
            engine.step()
        shutil.rmtree(tiny, ignore_errors=True)
        (tmp_path / "kept").rename(tiny)
        engine.wake_up(["weights", "kv_cache"])
        assert tokens_of(engine, requests) == expected

    def test_what_needs_the_memory_says_so(self, tiny: Path, tmp_path: Path) -> None:
        engine = load(tiny)
        engine.sleep(1)
        with pytest.raises(RuntimeError, match="execute_dummy_batch: the engine sleeps"):
            engine.execute_dummy_batch()
        with pytest.raises(RuntimeError, match="save_sharded_state: the weights sleep"):
            engine.save_sharded_state(str(tmp_path / "saved"))
        engine.wake_up(["weights"])
        engine.save_sharded_state(str(tmp_path / "saved"))
        with pytest.raises(RuntimeError, match="execute_dummy_batch: the engine sleeps"):
            engine.execute_dummy_batch()
        engine.wake_up(["kv_cache"])
        engine.execute_dummy_batch()

    def test_weights_that_do_not_fit_on_the_host_stay(self, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = load(tiny)
        run = Run(engine, [([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=6))])
        run.step()
        move, targets = engine._model.module.to, []

        def refuse(target: Any) -> Any:
            targets.append(target)
            if target == "cpu":
                raise RuntimeError("not enough memory")
            return move(target)

        monkeypatch.setattr(engine._model.module, "to", refuse)
        with pytest.raises(RuntimeError, match="not enough memory"):
            engine.sleep(1)
        assert targets == ["cpu", torch.device("cpu")]
        assert len(run.finish()[0].tokens) == 6


class TestCollectiveRpc:
    """Calls of the one worker, by name and by import path."""

    def test_a_function_gets_the_worker_first(self, engine: TransformersEngine) -> None:
        count = count_parameters(engine._worker)
        assert count > 49152 * 64
        path = f"{__name__}:count_parameters"
        assert engine.collective_rpc(path) == [count]
        assert engine.collective_rpc(path, None, [2], {"plus": 3}) == [2 * count + 3]
        (text,) = engine.collective_rpc("builtins:repr")
        assert "Worker" in text
        assert (engine._worker.device.type, engine._worker.dtype, engine._worker.rank) == ("cpu", torch.float32, 0)

    def test_a_method_by_its_name(self, engine: TransformersEngine) -> None:
        assert engine.collective_rpc("execute_dummy_batch") == [None]

    @pytest.mark.parametrize(
        ("method", "error", "message"),
        [
            ("nothing", AttributeError, r"'nothing': the worker's methods are execute_dummy_batch, save_sharded"),
            ("model", AttributeError, "'model': the worker's methods are"),
            ("_shard_name", ValueError, r"expected the name of a worker's method, or 'package\.module:function'"),
            ("os.getpid", ValueError, "expected the name of a worker's method"),
            ("", ValueError, "expected the name of a worker's method"),
            (b"code", TypeError, r"b'code' \(bytes\): expected a method's name"),
            ("no_such_package.module:function", ModuleNotFoundError, "no_such_package"),
            ("os:no_such_function", AttributeError, "no_such_function"),
            (f"{__name__}:NOT_A_FUNCTION", TypeError, "int cannot be called"),
        ],
    )
    def test_what_cannot_be_called_is_refused(
        self, engine: TransformersEngine, method: Any, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            engine.collective_rpc(method)

    def test_a_timeout_is_refused_since_nothing_could_keep_it(self, engine: TransformersEngine) -> None:
        with pytest.raises(ValueError, match=r"timeout=5\.0: the worker runs in the engine's thread"):
            engine.collective_rpc("execute_dummy_batch", 5.0)


class TestProfile:
    """Traces by torch's profiler."""

    @pytest.fixture(autouse=True)
    def ended(self, engine: TransformersEngine) -> Iterator[None]:
        yield
        engine.shutdown()
        with pytest.raises(RuntimeError, match="no profile is under way"):
            engine.profile(False)

    def test_a_trace_of_the_steps_is_written(self, engine: TransformersEngine, prompt: list[int]) -> None:
        paths: list[Path] = []
        for prefix_at_start, prefix_at_end in (("first", None), ("first", "second"), (None, None)):
            assert engine.profile(True, prefix_at_start) is None
            tokens_of(engine, [(prompt[:20], SamplingParams(max_tokens=2))])
            answer = engine.profile(False, prefix_at_end)
            assert isinstance(answer, str)
            paths.append(Path(answer))
        assert len(set(paths)) == 3
        assert paths[0].name.startswith("first-")
        assert paths[1].name.startswith("second-")
        for path in paths:
            assert path.parent == engine._arguments.profile_directory
            trace = json.loads(gzip.decompress(path.read_bytes()))
            names = [event.get("name") for event in trace["traceEvents"]]
            assert names.count("aten::scaled_dot_product_attention") >= 3 * 3  # steps and layers

    def test_it_is_started_and_ended_in_turn(self, engine: TransformersEngine) -> None:
        with pytest.raises(RuntimeError, match=r"is_start=False\): no profile is under way"):
            engine.profile(False)
        engine.profile()
        with pytest.raises(RuntimeError, match=r"is_start=True\): a profile is under way"):
            engine.profile()

    def test_bad_arguments_are_refused_and_a_profile_goes_on(self, engine: TransformersEngine) -> None:
        bad: list[tuple[Any, type[Exception], str]] = [
            ("../else/where", ValueError, "expected the beginning of a file's name"),
            (3, TypeError, r"profile_prefix=3 \(int\)"),
        ]
        for prefix, error, message in bad:
            with pytest.raises(error, match=message):
                engine.profile(True, prefix)
        engine.profile(True, "kept")
        for prefix, error, message in bad:
            with pytest.raises(error, match=message):
                engine.profile(False, prefix)
        with pytest.raises(TypeError, match="is_start='no'"):
            engine.profile("no")  # pyright: ignore[reportArgumentType]
        assert "/kept-" in str(engine.profile(False))

    def test_a_directory_that_cannot_be_made_fails_the_start(self, tiny: Path) -> None:
        engine = load(tiny, profile_dir=str(tiny / "config.json" / "profiles"))
        with pytest.raises(OSError, match=r"config\.json"):
            engine.profile()
        with pytest.raises(RuntimeError, match="no profile is under way"):
            engine.profile(False)

    def test_a_user_without_a_home_needs_none_for_a_model_of_its_own(
        self, tiny: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in a container that runs under a number of which nobody has heard."""
        for name in ("HOME", "ANYENGINE_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
        engine = load(tiny)
        tokens_of(engine, [([1, 2, 3], SamplingParams(max_tokens=2))])
        with pytest.raises(OSError, match=r"has no home directory, .* ANYENGINE_CACHE"):
            engine.profile()
        with pytest.raises(OSError, match=r"has no home directory, .* ANYENGINE_CACHE"):
            TransformersEngine().load(lambda stage, fraction=None: None)

    def test_where_profiles_go_without_a_directory(self, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ANYENGINE_CACHE", str(tiny))
        assert TransformersEngine(model=str(tiny))._arguments.profile_directory == tiny / "profiles"
        with pytest.raises(TypeError, match="profile_dir=3"):
            TransformersEngine(model=str(tiny), profile_dir=3)  # pyright: ignore[reportArgumentType]


def test_a_dummy_batch_leaves_requests_alone(engine: TransformersEngine, prompt: list[int]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    requests = [(prompt[:length], params) for length in (1, 20, 9)]
    expected = tokens_of(engine, requests)
    run = Run(engine, requests)
    while engine.has_work():
        engine.execute_dummy_batch()
        for cache in (engine._cache.keys, engine._cache.values):
            assert not cache[:, 0].any()
        run.step()
    assert [outcome.tokens for outcome in run.outcomes.values()] == expected


class TestSaveShardedState:
    """Weights written into files."""

    def test_the_files_hold_every_weight(self, tiny: Path, tmp_path: Path) -> None:
        engine, limit = load(tiny), 16 * 1024
        engine.save_sharded_state(str(tmp_path / "new" / "saved"), max_size=limit)
        files = sorted((tmp_path / "new" / "saved").iterdir())
        assert [file.name for file in files] == [f"model-rank-0-part-{part}.safetensors" for part in range(len(files))]
        assert len(files) >= 4
        found: dict[str, torch.Tensor] = {}
        for file in files:
            assert file.stat().st_mode & 0o777 == 0o644
            tensors = safetensors.torch.load_file(file)
            assert sum(tensor.nbytes for tensor in tensors.values()) <= limit
            assert not tensors.keys() & found.keys()
            found |= tensors
        module = engine._model.module
        assert found.keys() == module.state_dict().keys() - {"lm_head.weight"}  # which is tied
        for name, tensor in module.state_dict().items():
            if name in found:
                assert torch.equal(found[name], tensor), name

    @pytest.mark.parametrize("tied", [True, False])
    def test_a_model_made_from_the_files_computes_the_same(self, tmp_path: Path, tied: bool) -> None:
        engine = load(save_tiny(tmp_path / "model", tie_word_embeddings=tied))
        engine.collective_rpc(f"{__name__}:halve_weights")
        engine.save_sharded_state(str(tmp_path / "saved"))
        (file,) = (tmp_path / "saved").iterdir()
        copy = transformers.LlamaForCausalLM(engine._model.module.config)
        missing, unexpected = copy.load_state_dict(safetensors.torch.load_file(file), strict=False)
        copy.tie_weights()
        assert not unexpected
        assert missing == (["lm_head.weight"] if tied else [])
        for name, tensor in engine._model.module.state_dict().items():
            assert torch.equal(copy.state_dict()[name], tensor), name

    def test_a_tensor_greater_than_the_limit_is_alone(self, tiny: Path, tmp_path: Path) -> None:
        engine = load(tiny)
        engine.save_sharded_state(str(tmp_path / "saved"), "part{part}of{rank}", 1)
        files = list((tmp_path / "saved").iterdir())
        assert len(files) == len(list(engine._model.module.parameters()))
        assert all(len(safetensors.torch.load_file(file)) == 1 for file in files)

    def test_bad_arguments_are_refused(self, tiny: Path, tmp_path: Path) -> None:
        engine = load(tiny)
        path = str(tmp_path / "saved")
        bad: list[tuple[tuple[Any, ...], type[Exception], str]] = [
            ((3,), TypeError, "path=3"),
            (("",), TypeError, "path=''"),
            ((path, 5), TypeError, "pattern=5"),
            ((path, "{rank}-{nothing}"), ValueError, r"'\{rank\}-\{nothing\}': .* made from \{rank\} and \{part\}"),
            ((path, "{rank"), ValueError, "pattern='{rank'"),
            ((path, "../{rank}"), ValueError, "name of a file"),
            ((path, "one", 100), ValueError, "'one': files of several parts need {part}"),
            ((path, None, 0), ValueError, "max_size=0"),
            ((path, None, 1.5), TypeError, r"max_size=1\.5"),
        ]
        for arguments, error, message in bad:
            with pytest.raises(error, match=message):
                engine.save_sharded_state(*arguments)
        assert not Path(path).exists()
        engine.save_sharded_state(path)
        with pytest.raises(FileExistsError, match=r"saved/model-rank-0-part-0\.safetensors exists"):
            engine.save_sharded_state(path)


def test_only_what_it_does_is_listed(engine: TransformersEngine) -> None:
    assert utilities_of(TransformersEngine) == [
        "collective_rpc", "execute_dummy_batch", "profile", "save_sharded_state",
    ]  # fmt: skip
    assert list(engine.describe().supported_tasks) == ["generate"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    "anyio_backend", ["trio"]
)  # the other loops have the same on a scripted engine: tests/contract
async def test_everything_through_a_child(
    directory: Path, prompt: list[int], anyio_backend: str, leaves_nothing: None
) -> None:
    arguments = {"dtype": "float32", "device": "cpu", "num_threads": THREADS, "kv_cache_bytes": 64 * MIB}
    spec = EngineSpec("anyengine.engines.transformers:TransformersEngine", {"model": str(directory), **arguments})
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=1)
    async with open_engine_client(spec) as client:
        pid = client.health().pid
        before = await client.generate(prompt, params)
        awake = resident_bytes(pid)
        await client.sleep(2)
        assert await client.is_sleeping()
        assert awake - resident_bytes(pid) > 400 * MIB
        await client.wake_up()
        after = await client.generate(prompt, params)
        async with client.open_request(prompt, params) as request:
            kept = (await anext(request)).token_ids
            assert len(kept) < 8
            await client.sleep(1, "keep")
            await client.wake_up()
            async for output in request:
                kept += output.token_ids
        assert kept == before.token_ids
        assert (before.token_ids, before.prompt_logprobs) == (after.token_ids, after.prompt_logprobs)
        assert before.prompt_logprobs is not None
        assert [len(entry) for entry in before.prompt_logprobs[:1]] == [0]
        (text,) = await client.collective_rpc("builtins:repr")
        assert "Worker" in text
        with pytest.raises(UtilityError, match="has no attribute 'nothing'"):
            await client.collective_rpc("os:nothing")
        with pytest.raises(UtilityError, match=r"'reset_prefix_cache': engine 'transformers' has no such utility"):
            await client.reset_prefix_cache()
        assert await client.get_supported_tasks() == ["generate"]
