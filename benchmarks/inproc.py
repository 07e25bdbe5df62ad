"""What the in-process client adds to a step: the same engine stepped through the client and directly, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable

from anyengine import SamplingParams
from anyengine.engine import EngineRequest
from anyengine.engines.scripted import ScriptedEngine
from anyengine.inproc_client import InprocEngineClient

_SLICE = 100
"""Steps that one of the two makes before it is the other's turn."""


def overhead(rows: int, steps: int, *, logprobs: int | None = None) -> float:
    """Microseconds that a step of ``rows`` requests takes longer through the client; the median of paired slices.

    With ``logprobs`` each row has details, as the last row of a request has; otherwise all are plain tokens.
    """
    sampling = SamplingParams(max_tokens=2**30, logprobs=logprobs)
    engine = ScriptedEngine(vocab_size=2**31, max_model_len=2**31)
    with InprocEngineClient(ScriptedEngine(vocab_size=2**31, max_model_len=2**31)) as client:
        for number in range(rows):
            client.add_request([number], sampling)
            engine.add_request(
                EngineRequest(handle=number, prompt_token_ids=[number], prompt_embeds=None, sampling=sampling)
            )

        def step() -> None:
            if engine.has_work():
                engine.step()

        pairs = steps // _SLICE
        differences: list[float] = []
        for number in range(pairs):
            # Whoever comes second finds the caches warm: they take turns in that as well.
            if number % 2:
                through, direct = _time(client.get_output), _time(step)
            else:
                direct, through = _time(step), _time(client.get_output)
            differences.append((through - direct) / _SLICE * 1e6)
    return sorted(differences)[len(differences) // 2]


def _time(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(_SLICE):
        step()
    return time.perf_counter() - started
