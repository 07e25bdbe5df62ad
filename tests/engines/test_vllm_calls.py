"""A worker that fails spoils no other call, whatever it is asked for; this needs no vLLM."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anyengine import UnencodableError
from anyengine.engines.vllm.calls import WorkerCallError, call_workers, with_guarded_calls


class Queues:
    """An executor with the queues of vLLM's: a failure is raised at once, and what others have answered stays."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self.answers: list[deque[bytes]] = [deque() for _ in workers]
        self.options: list[dict[str, Any]] = []

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> list[Any]:
        self.options.append({"timeout": timeout, "non_block": non_block})
        sent = method if isinstance(method, str) else pickle.dumps(method)
        for worker, answers in zip(self.workers, self.answers, strict=True):
            try:
                called = getattr(worker, sent) if isinstance(sent, str) else pickle.loads(sent)
                first = () if isinstance(sent, str) else (worker,)
                answers.append(pickle.dumps((True, called(*first, *args, **(kwargs or {})))))
            except Exception as error:
                answers.append(pickle.dumps((False, str(error))))
        values: list[Any] = []
        for answers in self.answers:
            ok, value = pickle.loads(answers.popleft())
            if not ok:
                raise RuntimeError(value)
            values.append(value)
        return values


class Worker:
    """Does what it is asked for."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def name(self, greeting: str = "") -> str:
        return f"{greeting}{self.rank}"

    def fail(self, *ranks: int) -> int:
        if self.rank in ranks:
            raise LookupError("nothing there")
        return self.rank

    def fail_each(self) -> None:
        raise LookupError(self.rank)


def describe(worker: Worker, *, method: str, large: int = 0) -> Any:
    return {"rank": worker.rank, "method": method, "large": np.full(large, worker.rank, np.float32), "pair": (1, 2)}


def unencodable(worker: Worker) -> Any:
    return lambda: worker


@pytest.fixture
def executor() -> Any:
    return with_guarded_calls(Queues)([Worker(rank) for rank in range(3)])


def test_failures_are_told_when_all_have_answered(executor: Any) -> None:
    for ranks, expected in (
        ((1,), "worker 1: LookupError: nothing there"),
        ((0, 2), "workers 0, 2: LookupError: nothing there"),
    ):
        with pytest.raises(WorkerCallError) as caught:
            executor.collective_rpc("fail", args=ranks)
        assert str(caught.value) == expected
        assert f"In worker {ranks[0]}:" in caught.value.__notes__[0] and "in fail" in caught.value.__notes__[0]
        assert executor.collective_rpc("name", kwargs={"greeting": "worker "}) == ["worker 0", "worker 1", "worker 2"]
    with pytest.raises(WorkerCallError, match=r"^worker 0: LookupError: 0 \(3 of 3 workers have failed\)"):
        executor.collective_rpc("fail_each")
    with pytest.raises(WorkerCallError, match="no attribute 'unheard_of'"):
        executor.collective_rpc("unheard_of")
    assert executor.collective_rpc(Worker.name, None, ("a",), None) == ["a0", "a1", "a2"]


def test_a_step_is_left_alone(executor: Any) -> None:
    with pytest.raises(RuntimeError, match=r"^nothing there$"):
        executor.collective_rpc("fail", args=(0,), non_block=True)
    assert executor.options == [{"timeout": None, "non_block": True}]


@pytest.mark.parametrize("large", [0, 1_000_000])
def test_what_an_application_calls(large: int, executor: Any) -> None:
    answers = call_workers(executor, f"{__name__}:describe", (), {"method": "mine", "large": large})
    assert [answer["rank"] for answer in answers] == [0, 1, 2]
    for answer in answers:
        assert answer["method"] == "mine" and list(answer["pair"]) == [1, 2]
        assert answer["large"].shape == (large,) and (answer["large"] == answer["rank"]).all()
    assert call_workers(executor, "name", ["a"], {}) == ["a0", "a1", "a2"]


def test_what_cannot_travel_is_an_error_of_its_call(executor: Any) -> None:
    with pytest.raises(UnencodableError, match=r"worker 0: result: .*function.* cannot travel"):
        call_workers(executor, f"{__name__}:unencodable", (), {})
    for method, expected in (
        ("no.such.module:name", "ModuleNotFoundError: No module named 'no'"),
        (f"{__name__}:unheard_of", "AttributeError"),
        ("unheard_of", "no attribute 'unheard_of'"),
    ):
        with pytest.raises(WorkerCallError, match=f"^workers 0, 1, 2: .*{expected}"):
            call_workers(executor, method, (), {})
    assert call_workers(executor, "name", (), {}) == ["0", "1", "2"]
