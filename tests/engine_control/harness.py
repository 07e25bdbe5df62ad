"""An engine behind its control, in memory, with a record of what would be sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from anyengine import SamplingParams
from anyengine.engine import Deferred, EngineCore, EngineRequest
from anyengine.engine.control import SchedulerControl
from anyengine.engines.scripted import ScriptedEngine


class SpiedEngine(ScriptedEngine):
    """A scripted engine that remembers which requests reached it, and in which order."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.taken: list[int] = []

    def add_request(self, request: EngineRequest) -> None:
        super().add_request(request)
        self.taken.append(request.handle)


class Runner:
    """Runs an engine as the loop of its process does; ``sent`` is the order in which rows and answers went out.

    A row is ``(handle, number of tokens, finish reason)``, an answer ``("answer", name of the call, value or error)``.
    """

    def __init__(self, engine: EngineCore, *, can_wait: bool = True) -> None:
        self.live: set[int] = set()
        self.sent: list[tuple[Any, ...]] = []
        self.control = SchedulerControl(
            engine, live=self.live, release=self._release, refuse=self._refuse, can_wait=can_wait, more={}
        )

    def _release(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self._last(handle, "abort")

    def _refuse(self, handle: int, error: Exception) -> None:
        self._last(handle, "error")

    def _last(self, handle: int, reason: str) -> None:
        assert handle in self.live, f"request {handle} has ended already"
        self.live.remove(handle)
        self.sent.append((handle, 0, reason))

    def add(self, handle: int, *, max_tokens: int = 4, prompt: int = 0, logprobs: int | None = None) -> None:
        self.live.add(handle)
        request = EngineRequest(
            handle=handle,
            prompt_token_ids=[prompt],
            prompt_embeds=None,
            sampling=SamplingParams(max_tokens=max_tokens, logprobs=logprobs),
        )
        try:
            self.control.add_request(request)
        except Exception as error:
            self._refuse(handle, error)

    def call(self, method: str, *args: Any, name: str | None = None) -> Any:
        """What the call answers at once, or the Deferred whose settling goes into ``sent``."""
        value = self.control.call(method, args)
        if isinstance(value, Deferred):
            value.on_settled(self._record(name or method))
        return value

    def _record(self, name: str) -> Callable[[Any, BaseException | None], None]:
        return lambda value, error: self.sent.append(("answer", name, error if error is not None else value))

    def step(self) -> bool:
        """One turn of the loop; whether there was a step."""
        if not self.control.has_work():
            return False
        outputs = self.control.step()
        if outputs is not None:
            for handle, tokens, details in outputs.rows():
                assert handle in self.live, f"a row of request {handle}, which has ended"
                reason = None if details is None else details.finish_reason
                if reason is not None:
                    self.live.remove(handle)
                self.sent.append((handle, len(tokens), reason))
        return True

    def run(self) -> int:
        """Steps until there is nothing to do; how many."""
        steps = 0
        while self.step():
            steps += 1
        return steps

    def last_rows(self) -> dict[int, str]:
        """Finish reasons by handle; fails if a request has two."""
        reasons: dict[int, str] = {}
        for row in self.sent:
            if row[0] != "answer" and row[2] is not None:
                assert row[0] not in reasons
                reasons[row[0]] = row[2]
        return reasons

    def answers(self) -> dict[str, Any]:
        """Values or errors by name of the call."""
        return {row[1]: row[2] for row in self.sent if row[0] == "answer"}
