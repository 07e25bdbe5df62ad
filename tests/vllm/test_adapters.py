"""An adapter that is gone fails its requests and nobody else's: vLLM never loads one in a step."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from tests.helpers import until
from tests.vllm import setups
from tests.vllm.test_requests import PROMPT, write_adapter

from anyengine import LoRARequest, RequestError, SamplingParams, UtilityError, open_engine_client
from anyengine.engines.vllm import adapters
from anyengine.engines.vllm.adapters import Adapters

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]


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


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_directories_that_vanish(tmp_path: Path, traces: setups.Traces) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    short = SamplingParams(temperature=0, max_tokens=3)
    first, second, third = (
        LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(write_adapter(tmp_path / name)))
        for number, name in enumerate(("first", "second", "third"), start=1)
    )
    arguments = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    async with open_engine_client(setups.spec(**arguments), launcher=traces.launcher()) as client:
        plain = (await client.generate(PROMPT, greedy)).token_ids
        whole = (await client.generate(PROMPT, greedy, lora=first)).token_ids

        # In one place: the second waits, and the third, which is gone when its turn comes.
        async with (
            client.open_request(PROMPT, greedy, lora=first) as running,
            client.open_request(PROMPT, short, lora=second) as waiting,
            client.open_request(PROMPT, short, lora=third) as failing,
        ):
            begun = (await anext(running)).token_ids
            async with client.open_request(PROMPT, short, lora=second):
                pass  # aborted while it waits
            shutil.rmtree(first.lora_path)
            shutil.rmtree(third.lora_path)
            await until(lambda: client.statistics().engine.get("waiting") == 2)
            assert begun + (await running.completion()).token_ids == whole
            assert len((await waiting.completion()).token_ids) == 3
            with pytest.raises(RequestError, match="the adapter 'third' cannot be loaded"):
                await failing.completion()
        with pytest.raises(RequestError, match="the adapter 'first' cannot be loaded"):
            await client.generate(PROMPT, short, lora=first)

        # Unloaded by hand while it is in use: read again, or else the end of its requests alone.
        whole = (await client.generate(PROMPT, greedy, lora=second)).token_ids
        async with client.open_request(PROMPT, greedy) as other:
            async with client.open_request(PROMPT, greedy, lora=second) as request:
                begun = (await anext(request)).token_ids
                with pytest.raises(RequestError, match="requests are using 2 of the same name"):
                    same = LoRARequest(lora_name="second", lora_int_id=5, lora_path=second.lora_path)
                    await client.generate(PROMPT, short, lora=same)
                with pytest.raises(UtilityError, match=r"adapters \[2\] are in use or pinned, and max_loras=1"):
                    await client.pin_lora(3)
                assert await client.remove_lora(2) is True
                assert begun + (await request.completion()).token_ids == whole
            async with client.open_request(PROMPT, greedy, lora=second) as request:
                await anext(request)
                shutil.rmtree(second.lora_path)
                await client.remove_lora(2)
                with pytest.raises(RequestError, match="the adapter 'second' cannot be loaded"):
                    await request.completion()
            assert (await other.completion()).token_ids == plain

        write_adapter(tmp_path / "third")
        assert await client.add_lora(third) is True
        assert await client.pin_lora(3) is True
        write_adapter(tmp_path / "second")
        with pytest.raises(RequestError, match=r"no place on the device: max_loras=1, and adapters \[3\] are pinned"):
            await client.generate(PROMPT, short, lora=second)
        assert (await client.generate(PROMPT, greedy)).token_ids == plain
        assert client.statistics().live_requests == 0
