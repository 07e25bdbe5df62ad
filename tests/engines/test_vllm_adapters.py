"""vLLM never has to load an adapter in a step, whatever is added, aborted, unloaded or gone; this needs no vLLM."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from anyengine import LoRARequest, RequestError
from anyengine.engines.vllm import adapters
from anyengine.engines.vllm.adapters import Adapters


class Core:
    """vLLM's cache of adapters: the least recently used goes, and what is used in a step is loaded in it."""

    def __init__(self, places: int, capacity: int) -> None:
        self.places, self.capacity = places, capacity
        self.cache: list[int] = []  # least recently used first
        self.pinned: set[int] = set()
        self.active: list[int] = []
        self.gone: set[int] = set()
        self.loads = 0

    def list_loras(self) -> set[int]:
        return set(self.cache)

    def add_lora(self, lora: LoRARequest) -> bool:
        number = lora.lora_int_id
        if number not in self.cache:
            if number in self.gone:
                raise FileNotFoundError(lora.lora_path)
            self.loads += 1
            if len(self.cache) >= self.capacity:
                self.cache.remove(self.oldest(self.cache))
            self.cache.append(number)
        self.cache.append(self.cache.pop(self.cache.index(number)))
        if number not in self.active and len(self.active) >= self.places:
            self.active.remove(self.oldest(self.active))
        elif number in self.active:
            self.active.remove(number)
        self.active.append(number)
        return True

    def remove_lora(self, number: int) -> bool:
        self.pinned.discard(number)
        if number in self.active:
            self.active.remove(number)
        if found := number in self.cache:
            self.cache.remove(number)
        return found

    def pin_lora(self, number: int) -> bool:
        if number not in self.cache:
            raise ValueError("not registered")
        self.add_lora(lora(number))
        self.pinned.add(number)
        return True

    def oldest(self, numbers: list[int]) -> int:
        with suppress(StopIteration):
            return next(number for number in numbers if number not in self.pinned)
        raise RuntimeError("all are pinned")


def lora(number: int) -> LoRARequest:
    return LoRARequest(lora_name=f"adapter {number}", lora_int_id=number, lora_path=f"/{number}")


@pytest.mark.parametrize(("places", "capacity"), [(1, 1), (1, 3), (2, 2), (2, 4)])
def test_nothing_is_loaded_in_a_step(places: int, capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "lora_request", lambda lora: lora)
    chance = random.Random(places * 10 + capacity)
    core = Core(places, capacity)
    tested = Adapters(core, places, capacity)
    inside: dict[str, int] = {}  # requests in vLLM, in order
    open_requests: set[str] = set()
    served = failed = steps = 0
    for turn in range(3000):
        match chance.choice(("add", "add", "step", "step", "step", "abort", "gone", "back", "load", "remove", "pin")):
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
                scheduled: list[int] = []
                for number in inside.values():
                    if number not in scheduled and len(scheduled) < places:
                        scheduled.append(number)
                loads, steps = core.loads, steps + bool(scheduled)
                for number in chance.sample(scheduled, len(scheduled)):
                    core.add_lora(lora(number))
                assert core.loads == loads
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
                core.gone.add(chance.randint(1, 6))
            case "back":
                core.gone.clear()
            case "load":
                with suppress(RequestError):
                    tested.load(lora(chance.randint(1, 6)))
            case "remove":
                tested.remove(chance.randint(1, 6))
            case "pin" if chance.random() < 0.2:
                with suppress(RequestError, ValueError):
                    tested.pin(chance.randint(1, 6))
            case _:
                pass
        assert len(open_requests) == len(inside) + tested.held
    assert served > 100 and failed > 20 and steps > 100
    core.gone.clear()
    for number in core.pinned.copy():
        tested.remove(number)
    while open_requests:  # nobody waits for ever
        assert tested and not tested.admit() and inside
        name = next(iter(inside))
        del inside[name]
        open_requests.remove(name)
        tested.end([name])
    assert not tested


def test_the_order_of_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "lora_request", lambda lora: lora)
    tested = Adapters(Core(1, 1), 1, 1)
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
