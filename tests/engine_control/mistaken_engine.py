"""An engine of somebody's own, with one of the mistakes that people make."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from anyengine.engine import Deferred, EngineRequest, OutputDetails, StepOutputs, from_rows, utility
from anyengine.engines.scripted import ScriptedEngine


class MistakenEngine(ScriptedEngine):
    """Counts like its base, except for ``mistake``; those of rows concern requests whose prompt begins with 13."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self._mistake = mistake
        self._unlucky: set[int] = set()

    def describe(self) -> Any:
        return {"engine": "mine"} if self._mistake == "describe" else super().describe()

    def statistics(self) -> Any:
        return [("running", 1)] if self._mistake == "statistics" else super().statistics()

    def unavailable_utilities(self) -> Any:
        return "sleep" if self._mistake == "unavailable_utilities" else super().unavailable_utilities()

    def failure_fd(self) -> Any:
        return 10_000 if self._mistake == "failure_fd" else None

    def has_work(self) -> Any:
        return 1 if self._mistake == "has_work" else super().has_work()

    def add_request(self, request: EngineRequest) -> None:
        if request.prompt_token_ids is not None and request.prompt_token_ids[0] == 13:
            if self._mistake == "forget":
                return
            self._unlucky.add(request.handle)
        super().add_request(request)

    def abort_requests(self, handles: Any) -> None:
        super().abort_requests(handles)
        self._unlucky.difference_update(handles)

    def step(self) -> Any:
        outputs = super().step()
        if outputs is None or not self._unlucky:
            return outputs
        rows = list(outputs.rows())
        match self._mistake:
            case "list":
                return [(handle, list(tokens)) for handle, tokens, _ in rows]
            case "coroutine":
                return _coroutine()
            case "names as handles":
                names: Any = [str(handle) for handle in outputs.handles]
                return StepOutputs(names, outputs.token_ids)
            case "negative token":
                rows = [(handle, [-1] if handle in self._unlucky else tokens, more) for handle, tokens, more in rows]
            case "text as token":
                rows = [(handle, ["a"] if handle in self._unlucky else tokens, more) for handle, tokens, more in rows]
            case "details":
                rows = [
                    (handle, tokens, {"stop": 1} if handle in self._unlucky else more) for handle, tokens, more in rows
                ]
            case "finish reason":
                end: Any = OutputDetails(finish_reason="finished")  # type: ignore[arg-type]
                rows = [(handle, tokens, end if handle in self._unlucky else more) for handle, tokens, more in rows]
            case "two rows":
                rows += [row for row in rows if row[0] in self._unlucky]
            case "stranger":
                rows.append((2**50, (1,), None))
        try:
            return from_rows(rows)
        except (TypeError, ValueError, OverflowError):
            handles, tokens, details = zip(*rows, strict=True)
            counts = None if all(len(row) == 1 for row in tokens) else [len(row) for row in tokens]
            flat: Any = [token for row in tokens for token in row]
            return StepOutputs(handles, flat, counts, {n: more for n, more in enumerate(details) if more is not None})

    @utility
    def never_settle(self) -> Deferred:
        return Deferred()

    @utility
    def settle_in_a_thread_later(self) -> Deferred:
        answer = Deferred()
        pool = ThreadPoolExecutor(1)
        pool.submit(time.sleep, 0.05).add_done_callback(answer.set_result)
        pool.shutdown(wait=False)
        return answer

    @utility
    def settle_in_a_thread(self) -> str:
        problems: list[str] = []

        def settle() -> None:
            try:
                Deferred.set_result(answer, 1)
            except RuntimeError as error:
                problems.append(str(error))

        answer = Deferred()
        thread = threading.Thread(target=settle)
        thread.start()
        thread.join()
        return problems[0]


async def _coroutine() -> None:
    """Nobody awaits it."""
