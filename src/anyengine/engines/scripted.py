"""A deterministic engine without a model, for tests and benchmarks. It starts in a fraction of a second.

It counts: the tokens of a request are those that follow its prompt's last token, modulo the vocabulary. Or it plays a
script. Its utilities produce every fault that a real engine can have, and it has all the common ones.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from anyengine.engine.core import (
    Deferred,
    EngineRequest,
    OutputDetails,
    ProgressReporter,
    StepOutputs,
    from_rows,
    utility,
)
from anyengine.engines.faults import FaultUtilities
from anyengine.engines.recorder import RecordingUtilities
from anyengine.errors import RequestRefusedError
from anyengine.lengths import token_limit
from anyengine.types import EngineInfo, FinishReason, TokenLogprobs

LOOKED_THROUGH = 16 * 1024
"""Tokens of a prompt that are looked through at a time; those of longer prompts in several steps, so that the others'
outputs go on."""

LoadFault = Literal["raise", "exit", "kill", "hang"]


@dataclasses.dataclass(slots=True)
class _Running:
    handle: int
    next_token: int
    generated: int
    limit: int
    stop_token_ids: frozenset[int]
    logprobs: int | None


@dataclasses.dataclass(slots=True)
class _Unchecked:
    """A request whose prompt is looked through up to ``place``."""

    request: _Running
    prompt: Sequence[int]
    place: int = 0


class ScriptedEngine(FaultUtilities, RecordingUtilities):
    """Counts up from each prompt, or plays ``script``, one token per request and step.

    :param step_delay: seconds that each step takes
    :param max_num_seqs: requests that run at a time; others wait
    :param vocab_size: counting wraps around here; prompt tokens must be below
    :param max_model_len: prompt and completion tokens together; by default no request is too long
    :param max_logprobs: log-probabilities that a request may ask for at each token; -1: as many as the vocabulary has
    :param script: tokens that every request gets instead of counting; its end is a stop
    :param load_seconds: how long loading takes, with a progress report at each tenth
    :param load_fault: what goes wrong halfway through loading: an exception, ``os._exit(3)``, SIGKILL, or nothing more
    :param constructor_fault: the text of an exception that the constructor raises
    """

    def __init__(
        self,
        *,
        step_delay: float = 0.0,
        max_num_seqs: int = 1024,
        vocab_size: int = 32_000,
        max_model_len: int = 2**33,
        max_logprobs: int = 20,
        script: Sequence[int] | None = None,
        load_seconds: float = 0.0,
        load_fault: LoadFault | None = None,
        constructor_fault: str | None = None,
    ) -> None:
        super().__init__()
        if constructor_fault is not None:
            raise RuntimeError(constructor_fault)
        self._step_delay = step_delay
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_logprobs = max_logprobs
        self._script = None if script is None else list(script)
        self._load_seconds = load_seconds
        self._load_fault: LoadFault | None = load_fault
        self._unchecked: deque[_Unchecked] = deque()
        self._waiting: deque[_Running] = deque()
        self._running: dict[int, _Running] = {}
        self._flood: _Flood | None = None
        # While nothing but counting happens, a step is one addition to the columns of the step before.
        self._handles = array("Q")
        self._tokens = array("I")
        self._ones = 0
        self._plain_steps = 0
        self._made_plain = 0

    def load(self, progress: ProgressReporter) -> None:
        """Pretend to load, and fail as asked."""
        for tenth in range(10):
            progress("loading", tenth / 10)
            if tenth == 5:
                _fail(self._load_fault)
            time.sleep(self._load_seconds / 10)
        progress("loading", 1.0)

    def describe(self) -> EngineInfo:
        """A scripted engine has no dtype and no cache."""
        return EngineInfo(
            engine="scripted",
            version="1",
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            sampling_parameters=("max_tokens", "stop_token_ids", "logprobs", "temperature", "seed"),
            max_logprobs=self._max_logprobs,
        )

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. A long prompt is looked through in the steps that follow.

        :raises RequestRefusedError: if the prompt is not of token ids of the vocabulary, or is too long
        """
        prompt = request.prompt_token_ids
        if prompt is None:
            raise RequestRefusedError("the scripted engine takes prompt_token_ids, not prompt_embeds")
        sampling = request.sampling
        running = _Running(
            handle=request.handle,
            next_token=(prompt[-1] + 1) % self._vocab_size,
            generated=0,
            limit=token_limit(sampling, len(prompt), self._max_model_len),
            stop_token_ids=frozenset(sampling.stop_token_ids),
            logprobs=sampling.logprobs,
        )
        if len(prompt) > LOOKED_THROUGH:
            self._unchecked.append(_Unchecked(running, prompt))
            return
        if (problem := self._problem(prompt)) is not None:
            raise RequestRefusedError(problem)
        self._waiting.append(running)

    def _problem(self, tokens: Sequence[int]) -> str | None:
        largest = max(tokens)
        if largest < self._vocab_size:
            return None
        return f"prompt token id {largest} is not below vocab_size {self._vocab_size}"

    def abort_requests(self, handles: Sequence[int]) -> None:
        """Drop these requests."""
        self._settle_plain_steps()
        dropped = set(handles)
        for handle in handles:
            self._running.pop(handle, None)
        if any(waiting.handle in dropped for waiting in self._waiting):
            self._waiting = deque(waiting for waiting in self._waiting if waiting.handle not in dropped)
        if self._unchecked:
            self._unchecked = deque(one for one in self._unchecked if one.request.handle not in dropped)

    def has_work(self) -> bool:
        """Whether anything runs, waits, floods or is about to go wrong."""
        return bool(self._running or self._waiting or self._unchecked or self._flood or self._fault_is_due)

    def step(self) -> StepOutputs | None:
        """One token for every running request."""
        self._check_awake()
        self._strike()
        if self._flood is not None:
            outputs = self._flood.step()
            if outputs is None:
                self._flood.finish()
                self._flood = None
            return outputs
        if self._step_delay:
            time.sleep(self._step_delay)
        if self._unchecked and (refused := self._look_through()) is not None:
            return refused
        if self._waiting and len(self._running) < self._max_num_seqs:
            self._settle_plain_steps()
            while self._waiting and len(self._running) < self._max_num_seqs:
                request = self._waiting.popleft()
                self._running[request.handle] = request
        if not self._running:
            return None
        return self._plain_step() or self._full_step()

    def statistics(self) -> Mapping[str, float]:
        """How many requests run and wait."""
        return {"running": len(self._running), "waiting": len(self._waiting) + len(self._unchecked)}

    # ---- stepping ----

    def _look_through(self) -> StepOutputs | None:
        """Look through some of the oldest long prompt; the end of its request if it cannot be."""
        one = self._unchecked[0]
        problem = self._problem(one.prompt[one.place : one.place + LOOKED_THROUGH])
        one.place += LOOKED_THROUGH
        if problem is not None:
            self._unchecked.popleft()
            refused = OutputDetails(finish_reason="error", error=problem, error_kind="refused")
            return from_rows([(one.request.handle, (), refused)])
        if one.place >= len(one.prompt):
            self._unchecked.popleft()
            self._waiting.append(one.request)
        return None

    def _plain_step(self) -> StepOutputs | None:
        """The next step if every request only counts on in it, without a wrap, stop, end or log-probability."""
        if self._plain_steps == 0:
            self._settle_plain_steps()
            self._plain_steps = min(self._plain_steps_of(request) for request in self._running.values())
            if self._plain_steps == 0:
                return None
            self._handles = array("Q", self._running)
            self._tokens = array("I", [request.next_token for request in self._running.values()])
            self._ones = int.from_bytes(b"\x01\x00\x00\x00" * len(self._tokens), "little")
        self._plain_steps -= 1
        self._made_plain += 1
        outputs = StepOutputs(self._handles, self._tokens)
        # All tokens plus one at once: the column is one long number, and none of its digits overflows.
        column = int.from_bytes(self._tokens.tobytes(), "little") + self._ones
        self._tokens = array("I", column.to_bytes(len(self._tokens) * 4, "little"))
        return outputs

    def _plain_steps_of(self, request: _Running) -> int:
        if self._script is not None or request.logprobs is not None:
            return 0
        steps = min(request.limit - request.generated - 1, self._vocab_size - request.next_token - 1)
        for token in request.stop_token_ids:
            if token >= request.next_token:
                steps = min(steps, token - request.next_token)
        return max(steps, 0)

    def _settle_plain_steps(self) -> None:
        for request in self._running.values() if self._made_plain else ():
            request.generated += self._made_plain
            request.next_token += self._made_plain
        self._made_plain = self._plain_steps = 0

    def _full_step(self) -> StepOutputs:
        rows: list[tuple[int, Sequence[int], OutputDetails | None]] = []
        for request in list(self._running.values()):
            token, reason, stop_reason = self._advance(request)
            logprobs = None if request.logprobs is None else [self._logprobs(token, request.logprobs)]
            details = None
            if reason is not None or logprobs is not None:
                details = OutputDetails(finish_reason=reason, stop_reason=stop_reason, logprobs=logprobs)
            if reason is not None:
                del self._running[request.handle]
            rows.append((request.handle, (token,), details))
        return from_rows(rows)

    def _advance(self, request: _Running) -> tuple[int, FinishReason | None, int | None]:
        if self._script is None:
            token = request.next_token
            request.next_token = (token + 1) % self._vocab_size
        else:
            token = self._script[request.generated]
        request.generated += 1
        if token in request.stop_token_ids:
            return token, "stop", token
        if request.generated >= request.limit:
            return token, "length", None
        if self._script is not None and request.generated == len(self._script):
            return token, "stop", None
        return token, None, None

    def _logprobs(self, token: int, best: int) -> TokenLogprobs:
        """The sampled token has half of the probability, the next best half of what is left, and so on."""
        places = range(min(best + 1, self._vocab_size))
        return {(token + place) % self._vocab_size: -(place + 1) * math.log(2) for place in places}

    # ---- utilities ----

    @utility
    def echo(self, value: Any) -> Any:
        """``value`` itself."""
        return value

    @utility
    def flood(self, steps: int, requests_per_step: int) -> Deferred:
        """Send ``steps`` steps as fast as possible, and answer with the number of rows when they are out.

        The rows are those of running requests, then of requests that nobody knows; each has the number of the flood's
        step as its one token. They do not count as the requests' own tokens.
        """
        self._settle_plain_steps()
        handles = array("Q", list(self._running)[:requests_per_step])
        unknown = range(2**64 - (requests_per_step - len(handles)), 2**64)
        handles.extend(unknown)
        self._flood = _Flood(steps, handles)
        return self._flood.answer


class _Flood:
    def __init__(self, steps: int, handles: array[int]) -> None:
        self.answer = Deferred()
        self.left = steps
        self._steps = steps
        self._handles = handles

    def step(self) -> StepOutputs | None:
        if self.left == 0:
            return None
        number = self._steps - self.left
        self.left -= 1
        return StepOutputs(self._handles, array("I", [number]) * len(self._handles))

    def finish(self) -> None:
        self.answer.set_result(self._steps * len(self._handles))


def _fail(fault: LoadFault | None) -> None:
    if fault == "raise":
        raise RuntimeError("loading failed, as it was told to")
    if fault == "exit":
        os._exit(3)
    if fault == "kill":
        os.kill(os.getpid(), 9)
    if fault == "hang":
        time.sleep(3600)
