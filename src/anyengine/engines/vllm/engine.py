"""The engine: vLLM's core, stepped by our loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anyengine.engine.core import EngineRequest, ProgressReporter, StepOutputs
from anyengine.engines.transformers.checkpoint import default_model
from anyengine.engines.vllm import internals
from anyengine.engines.vllm.failures import reasons_of
from anyengine.engines.vllm.installed import check_arguments
from anyengine.engines.vllm.kv_blocks import zero_new_blocks
from anyengine.engines.vllm.loading import LoadProgress
from anyengine.engines.vllm.outputs import step_outputs
from anyengine.engines.vllm.parameters import check_model
from anyengine.engines.vllm.ranks import take_rank
from anyengine.engines.vllm.utilities import VllmUtilities
from anyengine.engines.vllm.workers import WorkerDiedError, WorkerWatch
from anyengine.types import EngineInfo

_DEATH_LIMIT = 1.0
"""Seconds within which a worker's death is noticed here, when vLLM has noticed something."""


class VllmEngine(VllmUtilities):
    """vLLM's ``EngineCore`` with its scheduler, executor and workers, without its client and its processes.

    The arguments are those of vLLM's ``EngineArgs``, by their own names; ``model="default"`` is SmolLM2-135M-Instruct.
    With one device the model is in the engine's own process (``distributed_executor_backend="uni"``), with several, and
    on the CPU, in worker processes of vLLM's, which end with it.

    Of several data-parallel engines each has a client of its own: with ``data_parallel_size`` comes
    ``data_parallel_rank``, and on a host with the devices of ``data_parallel_size_local`` ranks (default: of all) each
    takes its own; hosts are filled in rank order. The requests are the application's to share out. A mixture of experts
    has no such ranks.

    :raises ModuleNotFoundError: if vLLM is not installed
    :raises TypeError: if vLLM has no such argument
    :raises FileNotFoundError: if ``model`` is a path and leads nowhere
    :raises ValueError: if the arguments ask for several engines, or for a rank that there is not
    """

    def __init__(self, **arguments: Any) -> None:
        check_arguments(arguments)
        check_model(arguments)
        self._rank, self._arguments = take_rank(arguments)
        self._watch: WorkerWatch
        self._can_shut_down = False
        self._logprobs: dict[str, tuple[int, int]] = {}
        self._reasons: dict[str, str] = {}
        self._rows: list[Any] = []  # of batches that were under way when the engine was paused
        self._sleep_level = 0

    def load(self, progress: ProgressReporter) -> None:
        """Load the model as vLLM does.

        :raises ImportError: if this version of vLLM lacks something that is needed
        :raises ValueError: if the model is a mixture of experts, and this engine one of several ranks; or if its
            experts are to be shared out on the CPU
        :raises WorkerDiedError: if a worker has died, or could not start
        :raises Exception: what vLLM raised
        """
        self._watch = WorkerWatch()
        try:
            with LoadProgress(progress, self._watch) as loading:
                arguments = dict(self._arguments)
                if arguments.get("model") == "default":
                    arguments["model"] = str(default_model(loading.stage))
                self._vllm = internals.VllmCore(arguments, self._rank, loading, self._watch.fail_without_workers)
            zero_new_blocks(self._vllm.core)
            self._reasons = reasons_of(self._vllm.core.scheduler)
        except BaseException as error:
            # What vLLM says of a worker that has died is that something went wrong.
            death = self._watch.death(_DEATH_LIMIT) if isinstance(error, Exception) else None
            self._watch.close()
            if death is not None:
                raise WorkerDiedError(death) from error
            raise
        self._can_shut_down = True

    def describe(self) -> EngineInfo:
        """What was loaded."""
        return self._vllm.describe()

    def failure_fd(self) -> int:
        """Readable when a worker has died."""
        return self._watch.fd

    def check_health(self) -> None:
        """:raises WorkerDiedError: if a worker has died"""
        # vLLM watches its workers too, and may have been told first.
        self._watch.check(limit=_DEATH_LIMIT if self._vllm.executor_failed else 0.0)

    # ---- requests and steps ----

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        :raises RequestRefusedError: if vLLM refuses it
        """
        self._vllm.add(request)
        params = request.sampling
        if params.logprobs is not None or params.prompt_logprobs is not None:
            self._logprobs[str(request.handle)] = params.logprobs or 0, params.prompt_logprobs or 0

    def abort_requests(self, handles: Sequence[int]) -> None:
        """Drop requests; their blocks are free at once."""
        self._vllm.abort(handles)
        for handle in handles:
            self._logprobs.pop(str(handle), None)
            self._reasons.pop(str(handle), None)
        if self._rows:
            aborted = set(map(str, handles))
            self._rows = [row for row in self._rows if row.request_id not in aborted]

    def has_work(self) -> bool:
        """Whether vLLM has requests, or has ended some of which its workers have not been told."""
        return bool(self._rows) or self._vllm.has_work()

    def step(self) -> StepOutputs | None:
        """Make one step; None if it brought nothing.

        :raises WorkerDiedError: if a worker has died
        :raises Exception: what vLLM raised
        """
        rows: Sequence[Any]
        if self._rows:
            rows, self._rows = self._rows, []
        else:
            try:
                rows = self._vllm.step()
            except Exception:
                self._fail()
                raise
        outputs = step_outputs(rows, self._logprobs, self._reasons)
        if outputs is not None and (self._logprobs or self._reasons):
            for row, details in outputs.details.items():
                if details.finish_reason is not None:
                    self._logprobs.pop(rows[row].request_id, None)
                    self._reasons.pop(rows[row].request_id, None)
        return outputs

    def statistics(self) -> Mapping[str, float]:
        """Requests that run and wait, the share of the KV cache in use (0 to 1), and the prefix cache's tokens.

        ``prefix_cache_queries`` counts the tokens that were looked for in the prefix cache so far, and
        ``prefix_cache_hits`` those found; both stay 0 with ``disable_log_stats=True``.
        """
        return self._vllm.statistics()

    def _fail(self) -> None:
        """:raises WorkerDiedError: if the error that is being handled is that of a worker's death"""
        self._can_shut_down = False
        self.check_health()

    # ---- pausing and sleeping ----

    def quiesce(self) -> None:
        """Take the results of the batches under way, for the first step after the pause, and let the device finish.

        :raises WorkerDiedError: if a worker has died
        :raises Exception: what vLLM raised
        """
        try:
            self._rows += self._vllm.drain()
        except Exception:
            self._fail()
            raise

    def sleep(self, level: int) -> None:
        """Give memory back as vLLM does: level 1 moves the weights to the host's memory, level 2 drops them.

        Requests that run are computed again when the engine is awake.

        :raises Exception: what vLLM raised
        """
        self._sleep_level = level
        self._vllm.sleep(level)

    def wake_up(self, tags: Sequence[str]) -> None:
        """Bring back ``"weights"`` or ``"kv_cache"``, or both; weights that were dropped come from the checkpoint.

        :raises Exception: what vLLM raised
        """
        self._vllm.wake_up(tags, reload_weights="weights" in tags and self._sleep_level == 2)

    def shutdown(self) -> None:
        """End the workers, and free what they hold.

        After a failure all is left to the end of this process: what vLLM does here needs workers and a device in order,
        and would take the time in which everybody waits to be told.
        """
        can_shut_down = self._can_shut_down and self._watch.failure is None
        self._watch.close()
        if can_shut_down:
            self._vllm.shutdown()
