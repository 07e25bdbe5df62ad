"""The parts of the adapter for vLLM that need no vLLM; ``tests/vllm`` has the rest, in an environment of its own."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing import Pipe
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
from tests.helpers import is_running, until_sync

from anyengine import MultiModalFeature, MultiModalField, RequestRefusedError
from anyengine.engines.vllm import VllmEngine, installed, internals
from anyengine.engines.vllm.failures import reasons_of
from anyengine.engines.vllm.leftovers import files_in
from anyengine.engines.vllm.loading import LoadProgress, with_stages
from anyengine.engines.vllm.outputs import FailedRow, step_outputs
from anyengine.engines.vllm.ranks import take_rank
from anyengine.engines.vllm.spawning import spawned_workers
from anyengine.engines.vllm.workers import WorkerDiedError, WorkerWatch


def row(handle: int, *tokens: int, **more: Any) -> Any:
    """A row as vLLM has it."""
    fields = dict.fromkeys(
        (
            "finish_reason", "stop_reason", "new_logprobs", "new_prompt_logprobs_tensors", "pooling_output",
            "kv_transfer_params", "events",
        )
    )  # fmt: skip
    return SimpleNamespace(**fields | {"request_id": str(handle), "new_token_ids": list(tokens)} | more)


def logprobs(*rows: list[tuple[int, float]]) -> Any:
    return SimpleNamespace(
        logprob_token_ids=np.array([[token for token, _ in entries] for entries in rows], np.int32),
        logprobs=np.array([[value for _, value in entries] for entries in rows], np.float32),
    )


# ---- outputs ----


def test_a_step_of_plain_rows_is_columns_alone() -> None:
    assert step_outputs([], {}, {}) is None
    outputs = step_outputs([row(2**60, 7), row(3, 8)], {}, {})
    assert outputs is not None
    assert (list(outputs.handles), list(outputs.token_ids)) == ([2**60, 3], [7, 8])
    assert (outputs.counts, outputs.details) == (None, {})


def test_rows_of_several_tokens_and_endings() -> None:
    outputs = step_outputs(
        [row(1, 5, 6), row(2), row(3, 9, finish_reason=0, stop_reason=9), row(4, finish_reason=4)], {}, {}
    )
    assert outputs is not None
    assert outputs.counts is not None and list(outputs.counts) == [2, 0, 1, 0]
    assert list(outputs.token_ids) == [5, 6, 9]
    assert {index: (more.finish_reason, more.stop_reason) for index, more in outputs.details.items()} == {
        2: ("stop", 9),
        3: ("stop", None),
    }
    failed = step_outputs([row(1, finish_reason=3), row(2, finish_reason=3)], {}, {"2": "its grammar is none"})
    assert failed is not None
    assert failed.details[0].finish_reason == failed.details[1].finish_reason == "error"
    assert "of its own" in (failed.details[0].error or "")
    assert failed.details[1].error == "its grammar is none"


def test_what_vllm_is_not_to_go_on_with_ends_with_a_reason() -> None:
    outputs = step_outputs([FailedRow("7", "its adapter is gone"), row(8, 5)], {}, {})
    assert outputs is not None
    assert (list(outputs.handles), list(outputs.token_ids)) == ([7, 8], [5])
    assert outputs.details[0].finish_reason == "error" and outputs.details[0].error == "its adapter is gone"


def test_log_probabilities_are_cut_to_what_each_request_wants() -> None:
    wide = logprobs([(5, -1.0), (4, -0.5), (3, -2.0)])
    prompt = logprobs([(8, -3.0), (8, -3.0)], [(9, -4.0), (1, -0.25)])
    outputs = step_outputs(
        [row(1, 5, new_logprobs=wide), row(2, 5, new_logprobs=wide, new_prompt_logprobs_tensors=prompt)],
        {"1": (2, 0), "2": (0, 1)},
        {},
    )
    assert outputs is not None
    first, second = outputs.details[0], outputs.details[1]
    assert first.logprobs == [{5: -1.0, 4: -0.5, 3: -2.0}]
    assert list(first.logprobs[0]) == [5, 4, 3]  # the sampled one first
    assert second.logprobs == [{5: -1.0}]
    assert second.prompt_logprobs == [{}, {8: -3.0}, {9: -4.0, 1: -0.25}]


def test_events_are_plain_maps() -> None:
    event = SimpleNamespace(type=SimpleNamespace(name="QUEUED"), timestamp=1.5)
    outputs = step_outputs([row(1, events=[event])], {}, {})
    assert outputs is not None
    assert outputs.details[0].events == [{"type": "queued", "timestamp": 1.5}]


def test_the_reasons_of_requests_that_vllm_ends_for_an_error() -> None:
    def request(number: int, grammar: Any = None, *sizes: int) -> Any:
        features = [SimpleNamespace(identifier=f"image-{number}-{index}") for index in range(len(sizes))]
        return SimpleNamespace(
            request_id=str(number),
            structured_output_request=None if grammar is None else SimpleNamespace(grammar=grammar),
            mm_features=features,
            get_num_encoder_embeds=lambda index: sizes[index],
        )

    finished: list[Any] = []
    requests = [request(1, ValueError("no such type")), request(2, object(), 4, 6), request(3), request(4, None, 9)]
    scheduler = SimpleNamespace(
        requests={each.request_id: each for each in requests},
        encoder_cache_manager=SimpleNamespace(get_cached_num_encoder_embeds=lambda request, index: [4, 9][index]),
        finish_requests=lambda request_ids, status: finished.append((request_ids, status.name)),
    )
    reasons = reasons_of(scheduler)
    scheduler.finish_requests(["1", "4"], SimpleNamespace(name="FINISHED_ABORTED"))
    assert reasons == {}
    scheduler.finish_requests({"1", "2", "3", "gone"}, SimpleNamespace(name="FINISHED_ERROR"))
    assert reasons == {
        "1": "structured_outputs cannot be compiled: no such type",
        "2": (
            "features[1] has 6 embeddings, and the engine keeps 9 under its identifier 'image-2-1': "
            "what differs needs another identifier"
        ),
    }
    assert [status for _, status in finished] == ["FINISHED_ABORTED", "FINISHED_ERROR"]
    # Before 0.32 the sizes are not compared.
    scheduler.encoder_cache_manager = SimpleNamespace()
    scheduler.finish_requests("4", SimpleNamespace(name="FINISHED_ERROR"))
    assert "4" not in reasons


# ---- loading ----


def test_stages_are_told_by_whatever_executor_it_is() -> None:
    class Executor:
        def __init__(self, config: str) -> None:
            self.config = config
            self._init_executor()

        def _init_executor(self) -> None:
            pass

        def initialize_from_config(self, configs: list[str]) -> str:
            return configs[0]

    told: list[tuple[str, float | None]] = []
    with LoadProgress(lambda stage, fraction=None: told.append((stage, fraction)), Mock()) as progress:
        executor = with_stages(Executor, progress)("config")
        assert isinstance(executor, Executor)
        assert executor.initialize_from_config(["result"]) == "result"
    stages = ("loading weights", "allocating KV cache")
    assert told == [(stage, fraction) for stage in stages for fraction in (None, 1.0)]


def test_loading_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyengine.engines.vllm.loading._INTERVAL", 0.01)
    told: list[str] = []
    with LoadProgress(lambda stage, fraction=None: told.append(stage), Mock()) as progress:
        progress.stage("a long one")
        until_sync(lambda: len(told) > 3)
    count = len(told)
    time.sleep(0.05)
    assert told == ["a long one"] * count


def test_a_stage_in_which_loading_fails_is_not_done() -> None:
    told: list[float | None] = []
    with (
        pytest.raises(RuntimeError),
        LoadProgress(lambda stage, fraction=None: told.append(fraction), Mock()) as progress,
    ):
        progress.stage("one")
        raise RuntimeError
    assert told == [None]


# ---- workers ----


class Process:
    """A process as multiprocessing has it."""

    def __init__(self) -> None:
        self._read_end, write_end = os.pipe()
        self._popen = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[write_end])
        os.close(write_end)
        self.name, self.pid, self.sentinel = "Worker-0", self._popen.pid, self._read_end

    @property
    def exitcode(self) -> int | None:
        return self._popen.poll()

    def add_to(self, watch: WorkerWatch) -> None:
        receiver, self.starting = Pipe(duplex=False)
        watch.add(self, receiver)  # type: ignore[arg-type]

    def kill(self) -> None:
        self._popen.kill()

    def until_end(self) -> None:
        self._popen.wait()

    def close(self) -> None:
        self._popen.communicate()
        os.close(self._read_end)


def test_the_death_of_one_worker_is_told_and_ends_the_others() -> None:
    first, second = Process(), Process()
    watch = WorkerWatch()
    first.add_to(watch)
    second.add_to(watch)
    watch.check()
    os.kill(second.pid, signal.SIGKILL)
    assert os.read(watch.fd, 1) == b"x"
    expected = rf"worker Worker-0 \(pid {second.pid}\) was killed by signal 9 \(SIGKILL\)"
    with pytest.raises(WorkerDiedError, match=expected):
        watch.check()
    watch.fail("what others say later")
    watch.fail_without_workers()
    with pytest.raises(WorkerDiedError, match=expected):
        watch.check(limit=1)
    until_sync(lambda: first.exitcode is not None)
    watch.close()
    for process in (first, second):
        process.close()


def test_what_a_worker_raises_before_it_is_ready_is_told_and_not_its_end() -> None:
    first, second = Process(), Process()
    watch = WorkerWatch()
    first.add_to(watch)
    second.add_to(watch)
    first.starting.close()  # ready
    second.starting.send_bytes(b"ValueError: the weights are cut short")
    expected = f"worker Worker-0 (pid {second.pid}) raised ValueError: the weights are cut short"
    assert watch.death(limit=5) == expected
    assert is_running(second.pid)  # it prints its traceback
    second.kill()
    until_sync(lambda: first.exitcode is not None)
    assert watch.death(limit=0) == expected
    watch.close()
    for process in (first, second):
        process.close()


def test_a_worker_that_dies_without_a_reason_while_others_come() -> None:
    first = Process()
    watch = WorkerWatch()
    first.add_to(watch)
    second = Process()
    second.add_to(watch)
    assert watch.death(limit=0) is None
    second.starting.close()
    second.kill()
    assert watch.death(limit=5) == f"worker Worker-0 (pid {second.pid}) was killed by signal 9 (SIGKILL)"
    until_sync(lambda: first.exitcode is not None)
    watch.close()
    for process in (first, second):
        process.close()


def test_workers_that_vllm_ends_are_not_the_reason() -> None:
    worker = Process()
    watch = WorkerWatch()
    worker.add_to(watch)
    watch.workers_end()
    worker.kill()
    until_sync(lambda: worker.exitcode is not None)
    started = time.monotonic()
    assert watch.death(limit=60) is None
    assert time.monotonic() - started < 30  # nobody watches any more
    watch.workers_end()
    watch.close()
    watch.workers_end()
    worker.close()


@pytest.mark.parametrize("raised", [False, True])
def test_a_worker_that_dies_before_vllm_ends_them_is_the_reason(raised: bool) -> None:
    first, second = Process(), Process()
    watch = WorkerWatch()
    first.add_to(watch)
    second.add_to(watch)
    first.starting.close()  # ready
    if raised:
        second.starting.send_bytes(b"ValueError: cut short")
    else:
        second.kill()
        until_sync(lambda: second.exitcode is not None)
    second.starting.close()
    watch.workers_end()
    what = "raised ValueError: cut short" if raised else "was killed by signal 9 (SIGKILL)"
    assert watch.death(limit=0) == f"worker Worker-0 (pid {second.pid}) {what}"
    watch.close()
    for process in (first, second):
        process.kill()
        process.close()


class Executor:
    """vLLM's, for which one process starts and not the other."""

    def __init__(self, error: OSError | None) -> None:
        self.worker, self._error = Process(), error

    def start(self, module: Any) -> None:
        try:
            module.WorkerProc.make_worker_process(self.worker)
            if self._error is not None:
                raise self._error
            self.worker.kill()
            self.worker.until_end()
            raise RuntimeError("see the stack trace above")
        finally:
            module.MultiprocExecutor._ensure_worker_termination([self.worker])


def executor_module() -> Any:
    class WorkerProc:
        @staticmethod
        def make_worker_process(process: Process) -> Any:
            return SimpleNamespace(proc=process)

        @staticmethod
        def worker_main() -> None:
            pass

    class MultiprocExecutor:
        @staticmethod
        def _ensure_worker_termination(workers: list[Process]) -> None:
            for worker in workers:
                worker.kill()
                worker.until_end()

    start_method = SimpleNamespace(get_start_method=lambda: "spawn")
    module: Any = ModuleType("vllm.v1.executor.multiproc_executor")
    module.WorkerProc, module.MultiprocExecutor = WorkerProc, MultiprocExecutor
    module.get_mp_context = lambda: start_method
    return module


@pytest.mark.usefixtures("vllm_source")
@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), None], ids=["its own", "a worker's"])
def test_what_fails_in_the_engines_own_process_is_told_and_not_the_ends_of_its_workers(
    error: OSError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, executor = executor_module(), Executor(error)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    end, make = module.MultiprocExecutor._ensure_worker_termination, module.WorkerProc.make_worker_process

    def load(arguments: Any, rank: Any, loading: LoadProgress, on_failure: Any) -> None:
        with spawned_workers(loading.watch):
            executor.start(module)

    monkeypatch.setattr(internals, "VllmCore", load)
    engine = VllmEngine(model="a")
    with pytest.raises((OSError, WorkerDiedError)) as caught:
        engine.load(Mock())
    if error is not None:
        assert caught.value is error
    else:
        assert "was killed by signal 9 (SIGKILL)" in str(caught.value)
    assert module.MultiprocExecutor._ensure_worker_termination is end
    assert module.WorkerProc.make_worker_process is make
    executor.worker.close()


def test_an_executor_without_worker_processes_says_itself_that_it_failed() -> None:
    watch = WorkerWatch()
    watch.fail_without_workers()
    with pytest.raises(WorkerDiedError, match="vLLM's executor has failed"):
        watch.check()
    watch.close()


def test_a_watch_that_is_closed_tells_nothing() -> None:
    worker = Process()
    watch = WorkerWatch()
    worker.add_to(watch)
    watch.close()
    watch.close()
    assert is_running(worker.pid)
    worker.kill()
    worker.close()
    assert watch.failure is None


def test_nobody_writes_to_a_watch_that_is_being_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = WorkerWatch()
    closing = threading.Thread(target=watch.close)
    write = os.write

    def write_late(fd: int, data: bytes) -> int:
        closing.start()
        closing.join(0.2)  # in which it would have closed the descriptor
        return write(fd, data)

    monkeypatch.setattr(os, "write", write_late)
    watch.fail("vLLM's own thread says so")
    closing.join()
    watch.fail("and once more")
    assert watch.failure == "vLLM's own thread says so"


# ---- what is installed ----


@pytest.fixture
def vllm_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM of which only the source of EngineArgs is there."""
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    source = """
        class EngineArgs:
            model: str = "a"
            max_model_len: int | None = None
            default_mm_loras: dict[str, str] | None = None

            def method(self): ...
        """
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)


@pytest.mark.usefixtures("vllm_source")
def test_arguments_are_checked_without_importing_vllm() -> None:
    VllmEngine(model="a", max_model_len=5)
    with pytest.raises(TypeError, match="no 'max_model_length'; did you mean 'max_model_len'"):
        VllmEngine(max_model_length=5)
    with pytest.raises(TypeError, match=r"no 'zzz'$"):
        VllmEngine(zzz=5)
    with pytest.raises(ValueError, match=r"default_mm_loras: .* lora=LoRARequest\(...\)"):
        VllmEngine(default_mm_loras={"image": "/a"})
    VllmEngine(default_mm_loras=None)


@pytest.mark.usefixtures("vllm_source")
def test_a_path_that_leads_nowhere_is_refused_before_vllm_takes_it_for_a_name(tmp_path: Path) -> None:
    for model in ("Qwen/Qwen3-8B", "default", str(tmp_path), "s3://bucket/model"):
        VllmEngine(model=model)
    for model in ("/nope", "./nope", "../nope/", f"{tmp_path}/nope"):
        with pytest.raises(FileNotFoundError, match=f"model='{model}': there is no such directory$"):
            VllmEngine(model=model)
    with pytest.raises(FileNotFoundError, match="write the home directory out"):
        VllmEngine(model="~")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_what_to_install() -> None:
    with pytest.raises(ModuleNotFoundError, match="pip install vllm"):
        VllmEngine(model="a")


def test_a_version_that_lacks_something_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Incomplete:
        """Has one name of those that are needed of an EngineArgs, and none of any other."""

        create_engine_config = None

    monkeypatch.setenv("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    monkeypatch.setattr(installed, "find", lambda path: "0.1.2" if path == "vllm:__version__" else Incomplete)
    with pytest.raises(ImportError, match=r"vllm 0.1.2 is not supported: .* has no __init__\(keep_on_cpu\); 0.27"):
        installed.import_vllm()


def test_a_method_that_lacks_a_parameter_is_refused_by_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Renderer:
        def render(self, prompts: list[str], *, fast: bool = False) -> None:
            pass

    monkeypatch.setattr(installed, "find", lambda path: "0.1.2" if path == "vllm:__version__" else Renderer)
    installed.require({"vllm:Renderer": ("render", "render(fast)")})
    with pytest.raises(ImportError, match=r"vllm:Renderer has no render\(slow\), paint\(fast\); "):
        installed.require({"vllm:Renderer": ("render(fast)", "render(slow)", "paint(fast)")})


# ---- ranks ----


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size=2: an engine is one of them; say which by data_parallel_rank"),
        ({"data_parallel_rank": 0}, "data_parallel_rank=0: say of how many by data_parallel_size"),
        ({"data_parallel_size": 2, "data_parallel_rank": 2}, "data_parallel_rank=2: expected 0 to 1"),
        ({"data_parallel_size": 2, "data_parallel_rank": -1}, "data_parallel_rank=-1: expected 0 to 1"),
        ({"data_parallel_size": 2, "data_parallel_rank": "1"}, "data_parallel_rank='1': expected 0 to 1"),
        ({"data_parallel_size": 1, "data_parallel_rank": 1}, "data_parallel_rank=1: expected 0"),
        ({"data_parallel_size": 0}, "data_parallel_size=0: expected 1 or more"),
        ({"data_parallel_size": True, "data_parallel_rank": 0}, "data_parallel_size=True: expected 1 or more"),
        (
            {"data_parallel_size": 2, "data_parallel_rank": 0, "data_parallel_size_local": 3},
            "data_parallel_size_local=3: expected 1 to 2",
        ),
        ({"data_parallel_hybrid_lb": True}, "data_parallel_hybrid_lb=True: an engine is one rank"),
        ({"data_parallel_start_rank": 0}, "data_parallel_start_rank=0: an engine is one rank"),
        ({"data_parallel_backend": "ray"}, "data_parallel_backend='ray': an engine is one rank"),
    ],
)
def test_bad_ranks(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        take_rank(arguments)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("more", "local_size", "local"),
    [({}, 4, 3), ({"data_parallel_size_local": None}, 4, 3), ({"data_parallel_size_local": 2}, 2, 1)],
)
def test_hosts_are_filled_in_rank_order(more: dict[str, Any], local_size: int, local: int) -> None:
    rank, rest = take_rank({"model": "a", "data_parallel_size": 4, "data_parallel_rank": 3, **more})
    assert rank == (3, 4, local_size)
    assert rank.local == local
    assert rest == {"model": "a", "data_parallel_size": 4, **more}


# ---- what is left ----


class Envs(ModuleType):
    """vllm.envs, which keeps what it has read when it is told to."""

    def __init__(self) -> None:
        super().__init__("vllm.envs")
        self._kept: str | None = None

    @property
    def VLLM_RPC_BASE_PATH(self) -> str:
        return self._kept or os.environ.get("VLLM_RPC_BASE_PATH", "default")

    def enable_envs_cache(self) -> None:
        self._kept = self.VLLM_RPC_BASE_PATH

    def disable_envs_cache(self) -> None:
        self._kept = None


@pytest.mark.parametrize("base", [None, "/elsewhere"])
@pytest.mark.parametrize("connector", [None, "kv_transfer_config", "ec_transfer_config"])
def test_vllm_keeps_no_directory_that_is_gone(
    base: str | None, connector: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs, network = Envs(), ModuleType("vllm.utils.network_utils")
    monkeypatch.setitem(sys.modules, "vllm.envs", envs)
    monkeypatch.setitem(sys.modules, "vllm.utils.network_utils", network)
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    if base is not None:
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", base)
    before = base or "default"
    config = SimpleNamespace(**{"kv_transfer_config": None, **({} if connector is None else {connector: object()})})
    envs.enable_envs_cache()  # by an engine before
    for _ in range(2):
        with files_in(tmp_path, config):
            assert (str(tmp_path) if connector is None else before) == envs.VLLM_RPC_BASE_PATH
            envs.enable_envs_cache()  # as EngineCore does
        assert (os.environ.get("VLLM_RPC_BASE_PATH"), envs.VLLM_RPC_BASE_PATH) == (base, before)
    with pytest.raises(InterruptedError), files_in(tmp_path, config):
        raise InterruptedError
    assert (os.environ.get("VLLM_RPC_BASE_PATH"), envs.VLLM_RPC_BASE_PATH) == (base, before)


# ---- requests ----


@pytest.mark.parametrize("device", ["cuda", "tpu"])
def test_only_the_cpus_generator_is_tried(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "find", lambda path: pytest.fail(f"{path} was looked for"))
    core = object.__new__(internals.VllmCore)
    core.config = SimpleNamespace(
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True), device_config=SimpleNamespace(device_type=device)
    )
    assert core._seeds_are_safe


def test_features_are_refused_before_their_places_are_looked_at() -> None:
    class Costly(MultiModalFeature):
        def places(self) -> set[int]:
            pytest.fail("its places were looked at")

    feature = Costly(modality="image", identifier="x", offset=0, length=1, fields={"a": MultiModalField(data=1)})
    core: Any = object.__new__(internals.VllmCore)
    core._features = None
    with pytest.raises(RequestRefusedError, match="features: this model takes none"):
        core._multimodal([1], [feature])
    core._features = Mock()
    core._features.fitted.side_effect = RequestRefusedError("too many")
    with pytest.raises(RequestRefusedError, match="too many"):
        core._multimodal([1], [feature])


# ---- pausing and sleeping, which need a GPU in earnest ----


class Core:
    """A core with a batch under way, which writes down what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def abort(self, handles: list[int]) -> None:
        self.asked.append(("abort", handles))

    def drain(self) -> list[Any]:
        self.asked.append("drain")
        return [row(1, 5), row(2, 6, finish_reason=1)]

    def step(self) -> list[Any]:
        return [row(1, 7)]

    def has_work(self) -> bool:
        return False

    def sleep(self, level: int) -> None:
        self.asked.append(("sleep", level))

    def wake_up(self, tags: list[str], reload_weights: bool) -> None:
        self.asked.append(("wake_up", tags, reload_weights))


def test_a_connector_that_keeps_its_cache_keeps_the_engine_awake() -> None:
    """Without a GPU, on which vLLM sleeps, and without a connector: what each of them is asked."""
    vllm: Any = object.__new__(internals.VllmCore)
    vllm.core = Mock(**{"reset_prefix_cache.return_value": False})
    vllm.config = Mock(kv_transfer_config=Mock())
    with pytest.raises(RuntimeError, match="the KV connector could not reset its cache"):
        vllm.sleep(1)
    vllm.core.model_executor.sleep.assert_not_called()
    vllm.config = Mock(kv_transfer_config=None)  # some versions say False where there is none
    vllm.sleep(1)
    vllm.core.model_executor.sleep.assert_called_once_with(1)


def test_adapters_go_before_the_memory_in_which_they_are() -> None:
    vllm: Any = object.__new__(internals.VllmCore)
    vllm.core, vllm.adapters, order = Mock(), Mock(), Mock()
    vllm.config = Mock(kv_transfer_config=None)
    order.attach_mock(vllm.adapters.unload_all, "unload_all")
    order.attach_mock(vllm.core.model_executor.sleep, "sleep")
    vllm.sleep(1)
    vllm.sleep(2)
    assert order.mock_calls == [call.sleep(1), call.unload_all(), call.sleep(2)]


@pytest.mark.usefixtures("vllm_source")
@pytest.mark.parametrize("level", [1, 2])
def test_what_was_under_way_comes_when_it_is_awake_again(level: int) -> None:
    engine = VllmEngine(model="a")
    core: Any = Core()
    engine._vllm = core
    engine.quiesce()
    engine.sleep(level)
    engine.wake_up(["weights"])
    engine.wake_up(["kv_cache"])
    assert core.asked == [
        "drain", ("sleep", level), ("wake_up", ["weights"], level == 2), ("wake_up", ["kv_cache"], False)
    ]  # fmt: skip
    assert engine.has_work()
    kept, new = engine.step(), engine.step()
    assert kept is not None and new is not None
    assert (list(kept.token_ids), kept.details[1].finish_reason) == ([5, 6], "length")
    assert list(new.token_ids) == [7]
    assert not engine.has_work()


@pytest.mark.usefixtures("vllm_source")
def test_nothing_comes_of_requests_that_are_aborted_in_a_pause() -> None:
    engine = VllmEngine(model="a")
    core: Any = Core()
    engine._vllm = core
    engine.quiesce()
    engine.abort_requests([2, 3])
    kept = engine.step()
    assert kept is not None
    assert (list(kept.handles), list(kept.token_ids)) == ([1], [5])
    engine.quiesce()
    engine.abort_requests([1, 2])
    assert not engine.has_work()


@pytest.mark.usefixtures("vllm_source")
def test_a_worker_that_dies_while_its_results_are_awaited() -> None:
    class Dying(Core):
        def drain(self) -> list[Any]:
            engine._watch.fail("worker Worker-0 has died")
            raise RuntimeError("cancelled")

        executor_failed = False

    engine = VllmEngine(model="a")
    core: Any = Dying()
    engine._vllm, engine._watch = core, WorkerWatch()
    with pytest.raises(WorkerDiedError, match="Worker-0"):
        engine.quiesce()
    engine._watch.close()
