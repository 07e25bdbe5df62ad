"""vLLM's own engine process without a model.

Everything that :class:`EngineCoreProc` does is vLLM's: its main function, handshake, socket threads, queues and busy
loop. Only the core below it is replaced: it counts up from each prompt, one token per request and step, and makes
vLLM's own structs of that. It does no more work for a step than it must.
"""

from __future__ import annotations

import gc
import queue
import time
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine import core as vllm_core
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from benchmarks.stamps import stamp, wait_until


class CountingScheduler:
    """What :class:`EngineCoreProc` asks of a scheduler, and the requests."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self.left: dict[str, int] = {}
        self.held = False

    def has_requests(self) -> bool:
        """Whether a step would do something."""
        return bool(self.tokens) and not self.held

    def get_num_unfinished_requests(self) -> int:
        """How many requests live."""
        return len(self.tokens)

    def finish_requests(self, request_ids: list[str] | None, status: object) -> list[Any]:
        """Forget requests; all if None."""
        for request_id in list(self.tokens) if request_ids is None else request_ids:
            self.tokens.pop(request_id, None)
            self.left.pop(request_id, None)
        return []

    def get_kv_event_publisher_config(self) -> None:
        """There are no KV events."""

    def shutdown(self) -> None:
        """Nothing to free."""


class CountingCore(EngineCore):
    """The core: what :class:`EngineCore` has after its constructor as far as its process uses it, without a model."""

    def __init__(
        self,
        vllm_config: Any,
        executor_class: Any,
        log_stats: bool,
        executor_fail_callback: Any = None,
        include_finished_set: bool = False,
    ) -> None:
        self.vllm_config = vllm_config
        self.log_stats = log_stats
        self.scheduler: Any = CountingScheduler()
        self.batch_queue = None
        self.step_fn = self.step
        self.aborts_queue: queue.Queue[list[str]] = queue.Queue()
        self._idle_state_callbacks: list[Any] = []
        self._interval = 0.0
        self._stamped = False
        self._due = 0.0
        gc.collect()
        gc.freeze()

    def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[Any, int]:
        """In the input thread; the scheduler's own request is not made."""
        return request, request.current_wave

    def add_request(self, request: Any, request_wave: int = 0) -> None:
        """Count up from the last token of the prompt, or from the last element of the embeddings."""
        embeds = request.prompt_embeds
        last = request.prompt_token_ids[-1] if embeds is None else int(embeds[-1, -1])
        self.scheduler.tokens[request.request_id] = last
        self.scheduler.left[request.request_id] = request.sampling_params.max_tokens

    def step(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        """One token for every request."""
        scheduler = self.scheduler
        if not scheduler.has_requests():
            return {}, False
        self._process_aborts_queue()
        if self._interval:
            wait_until(self._due)
            self._due += self._interval
        tokens = scheduler.tokens
        for request_id in tokens:
            tokens[request_id] += 1
        outputs = [EngineCoreOutput(request_id, [token]) for request_id, token in tokens.items()]
        self._count_down(outputs)
        if self._interval:
            if self._stamped:
                outputs[0].new_token_ids[0] = stamp()
            if not tokens:
                self._interval = 0.0
        return {0: EngineCoreOutputs(outputs=outputs)}, True

    def _count_down(self, outputs: list[EngineCoreOutput]) -> None:
        left = self.scheduler.left
        ended: list[str] = []
        for output in outputs:
            request_id = output.request_id
            left[request_id] -= 1
            if not left[request_id]:
                output.finish_reason = FinishReason.LENGTH
                ended.append(request_id)
        self.scheduler.finish_requests(ended, None)

    def post_step(self, model_executed: bool) -> None:
        """Nothing follows a step."""

    def shutdown(self) -> None:
        """There is nothing to free."""

    # ---- utilities ----

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What ``AsyncLLM`` asks before its first request."""
        return ("generate",)

    def echo(self, value: Any) -> Any:
        """``value`` itself."""
        return value

    def hold(self) -> None:
        """Make no steps for now."""
        self.scheduler.held = True

    def release(self, interval: float = 0.0, stamped: bool = True) -> None:
        """Make steps again, one every ``interval`` seconds, or as fast as they come."""
        self.scheduler.held = False
        self._interval, self._stamped = interval, stamped
        self._due = time.monotonic() + interval


class CountingEngineCoreProc(EngineCoreProc, CountingCore):
    """vLLM's process around that core: ``EngineCoreProc`` comes first and finds it where it looks for its own."""


def install() -> None:
    """Have vLLM start this engine; with its default of forking, the child finds it too."""
    vllm_core.EngineCoreProc = CountingEngineCoreProc
