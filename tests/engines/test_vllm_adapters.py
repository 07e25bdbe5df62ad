"""vLLM never has to load an adapter in a step, whatever is added, aborted, unloaded or gone; this needs no vLLM."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from anyengine import LoRARequest, RequestError, RequestFailedError, RequestRefusedError
from anyengine.engines.vllm import adapters
from anyengine.engines.vllm.adapters import SPARE_PLACES, Adapters
from anyengine.engines.vllm.calls import WorkerCallError
from anyengine.engines.vllm.held import PATIENCE


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "lora_request", lambda lora: lora)


class Worker:
    """One worker's adapters, as vLLM keeps them, with what is used in a step loaded in it.

    For one more than there is memory for vLLM would drop the least recently used. That is never to happen.
    """

    def __init__(self, places: int, capacity: int) -> None:
        self.places, self.capacity = places, capacity
        self.cache: dict[int, LoRARequest] = {}
        self.pinned: set[int] = set()
        self.active: list[int] = []
        self.gone: set[int] = set()
        self.refused: set[int] = set()
        self.stuck: set[int] = set()
        self.is_mute = False
        self.loads = 0

    def list_loras(self) -> set[int]:
        if self.is_mute:
            raise RuntimeError("no list")
        return set(self.cache)

    def add_lora(self, lora: LoRARequest) -> bool:
        number = lora.lora_int_id
        if number in self.refused:
            return False
        if number not in self.cache:
            if number in self.gone:
                raise FileNotFoundError(lora.lora_path)
            self.loads += 1
            assert len(self.cache) < self.capacity
            self.cache[number] = lora
        if number not in self.active and len(self.active) >= self.places:
            self.active.remove(self.oldest(self.active))
        elif number in self.active:
            self.active.remove(number)
        self.active.append(number)
        return True

    def remove_lora(self, number: int) -> bool:
        if number in self.stuck:
            raise RuntimeError(f"{number} is stuck")
        self.pinned.discard(number)
        if number in self.active:
            self.active.remove(number)
        return self.cache.pop(number, None) is not None

    def pin_lora(self, number: int) -> bool:
        if number not in self.cache:
            raise ValueError("not registered")
        self.add_lora(self.cache[number])
        self.pinned.add(number)
        return True

    def oldest(self, numbers: list[int]) -> int:
        with suppress(StopIteration):
            return next(number for number in numbers if number not in self.pinned)
        raise RuntimeError("all are pinned")


class Workers:
    """Several of them, and all calls that came."""

    def __init__(self, places: int, capacity: int, size: int = 2) -> None:
        self.each = [Worker(places, capacity + SPARE_PLACES) for _ in range(size)]
        self.calls: list[tuple[Any, ...]] = []

    def call(self, method: str, *args: Any) -> Sequence[Any]:
        self.calls.append((method, *args))
        answers: list[Any] = []
        errors: list[Exception] = []
        for worker in self.each:
            try:
                answers.append(getattr(worker, method)(*args))
            except (OSError, RuntimeError, ValueError) as error:
                errors.append(error)
        if errors:
            raise WorkerCallError(str(errors[0]))
        return answers

    @property
    def loaded(self) -> set[int]:
        first, *others = (worker.list_loras() for worker in self.each)
        assert all(other == first for other in others)
        return first


def lora(number: int, name: str | None = None, path: str | None = None) -> LoRARequest:
    return LoRARequest(lora_name=name or f"adapter {number}", lora_int_id=number, lora_path=path or f"/{number}")


def nothing() -> None:
    pass


def make(places: int, capacity: int) -> tuple[Workers, Adapters]:
    workers = Workers(places, capacity)
    return workers, Adapters(workers.call, places, capacity)


@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.parametrize(("places", "capacity"), [(1, 1), (1, 3), (2, 2), (2, 4)])
def test_nothing_is_loaded_in_a_step(places: int, capacity: int, sticky: bool) -> None:
    """Not even if workers cannot unload what they have."""
    chance = random.Random(places * 10 + capacity)
    workers, tested = make(places, capacity)
    inside: dict[str, int] = {}  # requests in vLLM, in order
    open_requests: set[str] = set()
    served = failed = steps = removed = 0
    actions = (
        "add",
        "add",
        "step",
        "step",
        "step",
        "abort",
        "gone",
        "back",
        "load",
        "remove",
        "pin",
        "foreign",
        "doze",
        *["stick"] * sticky,
    )
    for turn in range(4000):
        match chance.choice(actions):
            case "add":
                name, number = str(turn), chance.randint(1, 6)
                try:
                    tested.add(name, lora(number), lambda name=name, number=number: inside.update({name: number}))
                    open_requests.add(name)
                except RequestError:
                    failed += 1
            case "step":
                dropped = tested.admit()
                failed += len(dropped)
                for name in dropped:
                    inside.pop(name, None)
                    open_requests.remove(name)
                assert sticky or len(workers.loaded) <= capacity
                scheduled: list[int] = []
                for number in inside.values():
                    if number not in scheduled and len(scheduled) < places:
                        scheduled.append(number)
                loads, steps = [worker.loads for worker in workers.each], steps + bool(scheduled)
                for number in chance.sample(scheduled, len(scheduled)):
                    workers.call("add_lora", lora(number))
                assert [worker.loads for worker in workers.each] == loads
                ended = [name for name, number in inside.items() if number in scheduled and chance.random() < 0.5]
                served += len(ended)
                for name in ended:
                    del inside[name]
                    open_requests.remove(name)
                tested.end(ended)
            case "abort" if open_requests:
                name = chance.choice(sorted(open_requests))
                open_requests.remove(name)
                inside.pop(name, None)
                tested.end([name])
            case "gone":
                chance.choice(workers.each).gone.add(chance.randint(1, 6))
            case "back":
                for worker in workers.each:
                    worker.gone.clear()
                    worker.stuck.clear()
            case "stick":
                chance.choice(workers.each).stuck.add(chance.randint(1, 6))
            case "load":
                with suppress(RequestError):
                    tested.load(lora(chance.randint(1, 6)))
            case "remove":
                with suppress(RequestError, WorkerCallError):
                    removed += tested.remove(chance.randint(1, 6))
            case "pin" if chance.random() < 0.2:
                with suppress(RequestError, WorkerCallError):
                    tested.pin(chance.randint(1, 6))
            case "foreign" if chance.random() < 0.2:  # what an application calls in the workers, of which nobody knows
                worker, number = chance.choice(workers.each), chance.randint(1, 6)
                if number not in worker.stuck:
                    worker.remove_lora(number)
                tested.distrust()
            case "doze" if chance.random() < 0.1 and not any(worker.stuck for worker in workers.each):
                tested.unload_all()
                assert sticky or not workers.loaded
            case _:
                pass
        assert len(open_requests) == len(inside) + tested.held
    assert served > 100 and failed > 20 and steps > 100 and removed > 20
    for worker in workers.each:
        worker.gone.clear()
        worker.stuck.clear()
    for number in tested.numbers():
        with suppress(RequestError):
            tested.remove(number)  # pinned ones, too
    while open_requests:  # nobody waits for ever
        assert tested and not tested.admit() and inside
        name = next(iter(inside))
        del inside[name]
        open_requests.remove(name)
        tested.end([name])
    assert not tested


def test_the_order_of_those_who_wait() -> None:
    _, tested = make(1, 1)
    came: list[str] = []
    for name, number, priority in (("runs", 1, 0), ("late", 2, 5), ("first", 3, -1), ("same", 3, 5), ("second", 2, 5)):
        tested.add(name, lora(number), lambda name=name: came.append(name), priority)
    assert came == ["runs"] and tested.held == 4
    tested.end(["runs"])
    assert not tested.admit()
    assert came == ["runs", "first", "same"]  # who has the adapter that is there need not wait
    tested.end(["first", "same"])
    assert not tested.admit()
    assert came == ["runs", "first", "same", "late", "second"]
    assert not tested.held


def test_a_number_and_a_name_are_those_of_one_adapter() -> None:
    workers, tested = make(1, 2)
    tested.add("first", lora(1, "a", "/A"), nothing)
    tested.add("second", lora(1, "a", "/A"), nothing)
    tested.load(lora(2, "idle", "/idle"))
    others = {
        "'b' (number 1, '/B') has the number of 'a' (number 1, '/A'), which is in use": lora(1, "b", "/B"),
        "'a' (number 1, '/nowhere') has the number of 'a'": lora(1, "a", "/nowhere"),
        "'a' (number 7, '/A') has the name of 'a' (number 1, '/A'), which is in use": lora(7, "a", "/A"),
        "which is loaded; give it another number, or call remove_lora(2) first": lora(2, "b", "/B"),
    }
    for expected, other in others.items():
        for attempt in (lambda other=other: tested.add("x", other, nothing), lambda other=other: tested.load(other)):
            with pytest.raises(RequestRefusedError) as caught:
                attempt()
            assert expected in str(caught.value)
    assert workers.loaded == {1, 2}
    # One that waits has its number and its name already.
    tested.add("third", lora(2, "idle", "/idle"), nothing)
    tested.add("waits", lora(3, "c", "/C"), nothing)
    assert tested.held == 1
    for other in (lora(3, "d", "/D"), lora(4, "c", "/D")):
        with pytest.raises(RequestRefusedError, match=r"'c' .*which is in use"):
            tested.add("x", other, nothing)
    # Whoever has gone has neither.
    tested.end(["waits"])
    tested.add("fourth", lora(4, "c", "/D"), nothing)
    tested.end(["first", "second", "third", "fourth"])
    assert tested.remove(1)
    tested.add("last", lora(1, "b", "/B"), nothing)
    assert not tested.held


def test_vllm_is_told_of_another_adapter_by_another_name() -> None:
    """It looks for what it has computed by the name, whatever has become of the adapter."""
    _, tested = make(1, 1)
    told: list[str] = []

    def use(adapter: LoRARequest) -> None:
        told.append(tested.for_vllm(adapter).lora_name)
        tested.add("request", adapter, nothing)
        tested.end(["request"])

    use(lora(1, "a", "/A"))
    use(lora(2, "b", "/B"))  # drops it
    use(lora(1, "a", "/A"))
    use(lora(2, "b", "/B"))
    use(lora(3, "a", "/A"))
    use(lora(2, "b", "/B"))
    use(lora(3, "a", "/elsewhere"))
    tested.remove(3)
    use(lora(3, "a", "/elsewhere"))
    tested.remove(3)
    use(lora(3, "a (version 2)", "/elsewhere"))
    assert told[:4] == ["a", "b", "a", "b"]
    assert told[5] == "b"
    assert told[4::2] == ["a (version 2)", "a (version 3)", "a (version 2) (version 1)"]
    assert told[7] == "a (version 4)"
    assert len({told[i] for i in (0, 4, 6, 7, 8)}) == 5


def test_one_that_cannot_be_loaded_costs_no_other_its_place() -> None:
    workers, tested = make(3, 3)
    for number in (1, 2, 3):
        tested.load(lora(number))
    workers.each[1].gone |= {7, 8}  # the other worker has it loaded by then
    for number in (7, 8):
        with pytest.raises(RequestRefusedError, match=f"'adapter {number}' cannot be loaded"):
            tested.add("x", lora(number), nothing)
        assert workers.loaded == {1, 2, 3} == set(tested.numbers())
    workers.each[1].refused.add(9)
    with pytest.raises(RequestFailedError, match="worker 1 has not taken it"):
        tested.load(lora(9))
    assert workers.loaded == {1, 2, 3}
    tested.add("one", lora(1), nothing)
    tested.end(["one"])
    tested.load(lora(4))
    assert workers.loaded == {1, 3, 4}  # 2 was used longest ago


def test_all_that_are_loaded_are_in_use() -> None:
    workers, tested = make(1, 1)
    tested.add("one", lora(1), nothing)
    with pytest.raises(RequestRefusedError, match=r"no place: max_cpu_loras=1, and adapters \[1\] are in use or pin"):
        tested.load(lora(2))
    with pytest.raises(
        RequestRefusedError, match=r"remove_lora\(1\): requests are using the adapter 'adapter 1' \(1 of them\)"
    ):
        tested.remove(1)
    assert workers.loaded == {1}


def test_a_request_for_what_is_loaded_calls_no_worker() -> None:
    workers, tested = make(1, 2)
    tested.load(lora(1))
    tested.add("first", lora(1), nothing)
    workers.calls.clear()
    for turn in range(100):
        tested.add(f"{turn}", lora(1), nothing)
        tested.admit()
    tested.end([f"{turn}" for turn in range(100)])
    assert not workers.calls


def test_a_pin_that_goes_leaves_a_place() -> None:
    for release in (lambda tested: tested.remove(1), lambda tested: tested.unload_all()):
        _, tested = make(2, 2)
        tested.load(lora(1))
        tested.pin(1)
        came: list[str] = []
        tested.add("runs", lora(2), nothing)
        tested.add("waits", lora(3), lambda came=came: came.append("waits"))
        assert not tested.admit() and not came
        release(tested)
        assert not tested.admit()
        assert came == ["waits"]


def test_adapters_are_loaded_again_when_their_memory_was_taken() -> None:
    workers, tested = make(1, 3)
    for number in (1, 2):
        tested.add(f"{number}", lora(number), nothing)
    tested.load(lora(3))
    tested.unload_all()
    assert workers.loaded == set()
    for worker in workers.each:
        worker.gone.add(2)
    assert list(tested.admit()) == ["2"]
    assert workers.loaded == {1}


def test_nobody_is_overtaken_for_ever() -> None:
    _, tested = make(1, 1)
    came: list[str] = []

    def add(name: str, number: int, priority: int = 0) -> None:
        tested.add(name, lora(number), lambda: came.append(name), priority)

    add("0", 1)
    add("other", 2)
    add("third", 3)
    for turn in range(1, 2 * PATIENCE):
        add(f"{turn}", 1)
        tested.end([f"{turn - 1}"])
        assert not tested.admit()
        if turn == PATIENCE:
            add("urgent", 1, -1)  # which others may wait for
            assert came[-1] == "urgent"
            tested.end(["urgent"])
    assert came.index("other") == PATIENCE + 2
    assert "third" not in came
    # Those that came later have waited in their turn, and so does the next adapter.
    tested.end(["other"])
    for turn in range(2 * PATIENCE, 4 * PATIENCE):
        tested.admit()
        assert tested.held
        tested.end(came[-1:])
        if "third" in came:
            break
    else:
        pytest.fail("an adapter waits for ever")


def test_those_who_wait_cost_a_step_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tested = make(1, 1)
    for turn in range(50):
        tested.add(f"runs {turn}", lora(1), nothing)
    for turn in range(500):
        tested.add(f"waits {turn}", lora(2), nothing)
    tries = 0

    def let_in(request: Any) -> None:
        nonlocal tries
        tries += 1

    monkeypatch.setattr(tested, "_let_in", let_in)
    for turn in range(49):
        tested.end([f"runs {turn}"])
        assert not tested.admit()
    assert tries == 0


def test_one_that_is_gone_is_looked_for_once() -> None:
    workers, tested = make(1, 1)
    tested.add("runs", lora(1), nothing)
    for turn in range(20):
        tested.add(f"waits {turn}", lora(2), nothing)
    for worker in workers.each:
        worker.gone.add(2)
    tested.end(["runs"])
    assert len(tested.admit()) == 20
    assert [call[0] for call in workers.calls].count("add_lora") == 2
    assert not tested


def test_an_adapter_that_a_worker_cannot_unload_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    workers, tested = make(1, 2)
    tested.add("runs", lora(1), nothing)
    workers.each[1].add_lora(lora(77))
    workers.each[1].stuck.add(77)
    tested.distrust()
    for _ in range(3):
        assert tested.admit() == {}
    assert [record.message for record in caplog.records] == [
        "the adapter of number 77 cannot be unloaded, and keeps its memory: 77 is stuck"
    ]
    tested.end(["runs"])
    # Its number is not taken for another's, nor is its place: the workers assert that they never have too many.
    for call in (lambda: tested.load(lora(77)), lambda: tested.pin(77)):
        with pytest.raises(RequestFailedError, match="adapter number 77 is that of one that a worker could not unload"):
            call()
    for number in (2, 3, 4):
        tested.add(f"{number}", lora(number), nothing)
        tested.end([f"{number}"])
        assert number in workers.each[0].cache
    tested.add("2", lora(2), nothing)
    with pytest.raises(RequestFailedError, match="max_cpu_loras=2, and workers have others that they could not unload"):
        workers.each[1].stuck |= {3, 4}
        tested.load(lora(5))
    workers.each[1].stuck.clear()
    assert tested.admit() == {}
    assert workers.loaded == {2}
    assert tested.load(lora(77))


def test_a_request_whose_adapter_is_ready_goes_on_when_another_cannot_go() -> None:
    workers, tested = make(1, 1)
    tested.load(lora(1))
    workers.each[0].stuck.add(1)
    came: list[str] = []
    tested.add("runs", lora(2), lambda: came.append("runs"))
    assert came == ["runs"]
    workers.each[0].stuck.clear()
    assert tested.admit() == {}
    assert workers.loaded == {2}


@pytest.mark.parametrize("fault", ["is_mute", "stuck"])
def test_what_workers_cannot_do_before_a_step_fails_requests_alone(fault: str) -> None:
    workers, tested = make(1, 1)
    tested.add("runs", lora(1), nothing)
    tested.add("waits", lora(2), nothing)
    worker = workers.each[1]
    if fault == "is_mute":
        worker.is_mute = True
    else:
        workers.each[0].remove_lora(1)
        worker.stuck.add(1)
    tested.distrust()
    failed = tested.admit()
    if fault == "is_mute":
        reason = "the workers cannot say which adapters they have (no list)"
        assert {name: str(error) for name, error in failed.items()} == {"runs": reason, "waits": reason}
        assert all(type(error) is RequestFailedError for error in failed.values())
        assert not tested
    else:
        assert list(failed) == ["runs"] and "could not unload" in str(failed["runs"])
        assert not tested.held  # what is free is the place of the one that failed
    # As soon as they can, all is in order.
    worker.is_mute = False
    worker.stuck.clear()
    assert not tested.admit()
    tested.end(["waits"])
    tested.add("last", lora(1), nothing)
    assert not tested.held and workers.loaded == {1}


def test_a_worker_that_does_not_answer_ends_the_step() -> None:
    _, tested = make(1, 1)
    tested.add("runs", lora(1), nothing)
    tested.distrust()

    def no_answer(method: str, *args: Any) -> Sequence[Any]:
        raise RuntimeError("Executor failed.")

    tested._call = no_answer
    with pytest.raises(RuntimeError, match="Executor failed"):
        tested.admit()


def test_a_pin_that_is_gone_in_the_workers_leaves_a_place() -> None:
    workers, tested = make(2, 3)
    tested.load(lora(1))
    tested.pin(1)
    came: list[str] = []
    tested.add("runs", lora(2), nothing)
    tested.add("waits", lora(3), lambda: came.append("waits"))
    assert not tested.admit() and not came
    for worker in workers.each:
        worker.remove_lora(1)
    tested.distrust()
    assert not tested.admit()
    assert came == ["waits"]
