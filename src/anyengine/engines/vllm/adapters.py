"""LoRA adapters are loaded before their requests reach vLLM, and stay loaded as long as these are there."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

from anyengine.engine.failures import message_of, name_of
from anyengine.engines.vllm.calls import WorkerCallError
from anyengine.engines.vllm.held import Held, HeldRequests
from anyengine.engines.vllm.parameters import lora_request
from anyengine.errors import RequestError, RequestFailedError, RequestRefusedError
from anyengine.params import LoRARequest

logger: logging.Logger = logging.getLogger("anyengine")

SPARE_PLACES = 1
"""Adapters that vLLM has to have memory for beside ``max_cpu_loras``: one more is loaded, and then one is dropped."""

_OUT_OF_MEMORY = frozenset({"OutOfMemoryError", "MemoryError"})
"""What a worker fails of in loading an adapter with which nothing need be wrong. All else lies in the files, which the
request named."""


class Adapters:
    """Keeps vLLM from loading an adapter in a step, where a directory that is gone would end all requests.

    vLLM keeps a number of adapters in the host's memory. For one more it drops the one that was used least recently,
    even if requests for it are waiting, and reads it again in the step that comes to them. So there are never requests
    for more than ``max_cpu_loras`` adapters in vLLM, and those for others are held until one has none left; and which
    adapter is dropped is chosen here, when the other has been loaded, so that vLLM never has to.

    An adapter that is pinned takes one of ``max_loras`` places on the device, which vLLM's scheduler does not know of.

    A worker that cannot unload an adapter keeps it in the spare place, and it is tried again before each step. What the
    workers answer fails no more than requests; if one of them does not answer, that is the engine's end.

    vLLM knows an adapter by its number when it computes, and by its name when it looks for what it has computed. So
    one number or name is that of one adapter, as long as that is loaded or requests are there for it. And the name that
    vLLM is told says which of the adapters it is that have had the name one after another.

    :param call: calls a method of all workers; what each of them has returned
    """

    def __init__(self, call: Callable[..., Sequence[Any]], max_loras: int, max_cpu_loras: int) -> None:
        self._call = call
        self._places = max_loras
        self._capacity = max_cpu_loras
        self._loaded: dict[int, LoRARequest] = {}  # by number, that whose last request ended longest ago first
        self._requests: dict[str, LoRARequest] = {}  # by the ids of those in vLLM
        self._running: Counter[int] = Counter()  # how many there are for each number
        self._held = HeldRequests()
        self._pinned: set[int] = set()
        # Those that are loaded, or that there are requests for.
        self._by_number: dict[int, LoRARequest] = {}
        self._by_name: dict[str, LoRARequest] = {}
        # The last that had a name, if nobody has removed it, and how many had it before. A name is kept for ever, which
        # grows slowly with a name per tenant: the prefix cache may have what was computed with one that is long gone.
        self._versions: dict[str, tuple[LoRARequest | None, int]] = {}
        self._room = False  # a place may be free, or the first in turn be another
        self._suspect = False  # workers may have other adapters than are noted here
        self._stuck: set[int] = set()  # in some workers, which could not unload them

    @property
    def held(self) -> int:
        """Requests that wait for an adapter to go."""
        return len(self._held)

    def __bool__(self) -> bool:
        """Whether any request is here or in vLLM that has an adapter."""
        return bool(self._requests or self._held)

    # ---- requests ----

    def for_vllm(self, lora: LoRARequest) -> Any:
        """The adapter as vLLM is told of it, by a name that no other adapter has had.

        :raises RequestRefusedError: if its number or its name is that of another one that is loaded or in use
        """
        self._check(lora)
        name, version = lora.lora_name, self._version(lora)
        if version or name.endswith(")"):  # or it might be that of another one's later version
            name = f"{name} (version {version + 1})"
        return lora_request(dataclasses.replace(lora, lora_name=name))

    def add(self, request_id: str, lora: LoRARequest, enqueue: Callable[[], None], priority: int = 0) -> None:
        """Load an adapter and call ``enqueue``, now or in :meth:`admit`, where a lower ``priority`` comes first.

        :raises RequestRefusedError: if it cannot be loaded, or has the number or name of another one that is loaded or
            in use, or no place because of those that are pinned
        :raises RequestFailedError: if a worker has no memory for it, or could not unload another one
        """
        self._check(lora)
        request = Held(request_id, lora, enqueue, priority)
        if self._held.holds_back(priority) or not self._open_to([request.number]):
            self._note(lora)
            self._held.add(request)
        else:
            self._let_in(request)
            self._held.overtake(priority)

    def end(self, request_ids: Iterable[str]) -> None:
        """These requests have ended or are aborted; some of them may have no adapter."""
        waiting: list[str] = []
        for request_id in request_ids:
            if (lora := self._requests.pop(request_id, None)) is not None:
                self._end_one(lora.lora_int_id)
            elif request_id in self._held:
                waiting.append(request_id)
        if waiting:
            self._take_from_held(waiting)
            self._room = True

    def admit(self) -> dict[str, RequestError]:
        """Before a step: see to it that what it may need is loaded, and let requests in whose turn it is.

        Returns what is wrong with those that cannot go on, by their ids; vLLM has to be told to drop them.
        """
        failed: dict[str, RequestError] = {}
        if self._suspect:
            failed = self._load_again()
            self.end(failed)
        if self._room:
            self._room = False
            refused = self._let_in_held()
            self.end(refused)
            failed |= refused
        return failed

    def _let_in_held(self) -> dict[str, RequestError]:
        failed: dict[str, RequestError] = {}
        broken: dict[int, RequestError] = {}  # not tried again for each of the requests
        gone: list[str] = []
        overtaking: list[int] = []
        numbers = self._open_to(self._held.numbers)
        for place, request in enumerate(self._held):
            if not numbers or (place == 0 and self._held.is_overdue and request.number not in numbers):
                break
            if request.number not in numbers:
                continue
            try:
                if request.number in broken:
                    raise broken[request.number]
                self._let_in(request)
            except RequestError as error:
                failed[request.request_id] = broken[request.number] = error.with_traceback(None)
            except Exception as error:
                failed[request.request_id] = RequestFailedError(f"{name_of(error)}: {message_of(error)}")
            else:
                if len(gone) < place:
                    overtaking.append(request.priority)
            gone.append(request.request_id)
            if self._running[request.number] <= 1:  # there was none
                numbers = self._open_to(self._held.numbers)
        if gone:
            self._take_from_held(gone)
        for priority in overtaking:
            self._held.overtake(priority)
        return failed

    def _let_in(self, request: Held) -> None:
        number = request.number
        if number not in self._running:
            taken = self._pinned - {number}
            if len(taken) >= self._limit:
                raise RequestRefusedError(
                    f"the adapter {request.lora.lora_name!r} has no place on the device: "
                    f"max_loras={self._places}, and adapters {sorted(taken)} are pinned"
                )
            self._load(request.lora)
        request.enqueue()
        self._requests[request.request_id] = request.lora
        self._running[number] += 1

    def _end_one(self, number: int) -> None:
        self._running[number] -= 1
        if not self._running[number]:
            del self._running[number]
            if number in self._loaded:
                self._loaded[number] = self._loaded.pop(number)
            self._drop_note(number)
            self._room = True

    def _take_from_held(self, request_ids: Sequence[str]) -> None:
        numbers = list(self._held.numbers)
        self._held.take(request_ids)
        for number in numbers:
            self._drop_note(number)

    @property
    def _limit(self) -> int:
        return self._places if self._pinned else self._capacity

    def _open_to(self, numbers: Iterable[int]) -> set[int]:
        """Those of the adapters whose requests need not wait, be it that they can only fail."""
        taken = self._running.keys() | self._pinned
        if len(taken) < self._limit or not self._running.keys() - self._pinned:
            return set(numbers)
        return taken.intersection(numbers)

    # ---- adapters ----

    def load(self, lora: LoRARequest) -> bool:
        """Load an adapter; False if it is there already. It may take the place of one that no request uses.

        :raises RequestRefusedError: if it cannot be loaded, or has the number or name of another one that is loaded or
            in use, or all that are loaded are in use or pinned
        :raises RequestFailedError: if a worker has no memory for it, or could not unload another one
        """
        self._check(lora)
        return self._load(lora)

    def remove(self, number: int) -> bool:
        """Unload an adapter; whether there was one. One that comes with its name is another one, from wherever it is.

        :raises RequestRefusedError: if there are requests for it: they would go on with what is read from its directory
            now
        """
        if requests := self._running[number] + self._held.numbers[number]:
            raise RequestRefusedError(
                f"remove_lora({number}): requests are using the adapter {self._by_number[number].lora_name!r} "
                f"({requests} of them); abort them, or wait for their ends"
            )
        for name, (lora, version) in self._versions.items():
            if lora is not None and lora.lora_int_id == number:
                self._versions[name] = None, version
        existed = self._unload(number)
        self._pinned.discard(number)
        self._room = True
        return existed

    def pin(self, number: int) -> bool:
        """Keep an adapter from being dropped.

        :raises RequestRefusedError: if requests use others, which would have no place on the device then
        :raises RequestFailedError: if only some workers have it, which could not unload it
        """
        if self._suspect:
            self._compare()
        self._refuse_stuck(number)
        if len(others := (self._running.keys() | self._pinned) - {number}) >= self._places:
            raise RequestRefusedError(
                f"pin_lora({number}): adapters {sorted(others)} are in use or pinned, and max_loras={self._places}"
            )
        if pinned := all(self._call("pin_lora", number)):
            self._pinned.add(number)
        return pinned

    def numbers(self) -> list[int]:
        """The numbers of those that are loaded, in order."""
        if self._suspect:
            self._compare()
        return sorted(self._loaded)

    def unload_all(self) -> None:
        """Before the memory is taken in which they are. Requests have them loaded again before the next step."""
        for number in list(self._loaded):
            self._unload(number)
        self._pinned.clear()
        self._room = self._suspect = True

    def distrust(self) -> None:
        """Something else may have loaded or unloaded adapters: look before the next step."""
        self._suspect = True

    def _load(self, lora: LoRARequest) -> bool:
        number = lora.lora_int_id
        if self._suspect:
            self._compare()
        if number in self._loaded:
            return False
        taken = (self._running.keys() | self._pinned) - {number}
        if len(taken) >= self._capacity:
            raise RequestRefusedError(
                f"the adapter {lora.lora_name!r} has no place: "
                f"max_cpu_loras={self._capacity}, and adapters {sorted(taken)} are in use or pinned"
            )
        self._refuse_stuck(number)
        # vLLM itself would drop one, maybe one that is in use.
        while len(self._loaded) + len(self._stuck) >= self._capacity + SPARE_PLACES:
            if not self._make_room(taken):
                raise RequestFailedError(
                    f"the adapter {lora.lora_name!r} has no place: max_cpu_loras={self._capacity}, "
                    f"and workers have others that they could not unload"
                )
        try:
            answers = self._call("add_lora", self.for_vllm(lora))
            if not all(answers):
                raise RuntimeError(f"worker {list(map(bool, answers)).index(False)} has not taken it")
        except Exception as error:
            with contextlib.suppress(Exception):  # then it is suspect
                self._unload(number)
            is_engines_fault = not isinstance(error, WorkerCallError) or not error.kinds.isdisjoint(_OUT_OF_MEMORY)
            raise (RequestFailedError if is_engines_fault else RequestRefusedError)(
                f"the adapter {lora.lora_name!r} cannot be loaded from {lora.lora_path!r} "
                f"({name_of(error)}: {message_of(error)})"
            ) from error
        self._versions[lora.lora_name] = lora, self._version(lora)
        self._loaded[number] = lora
        self._note(lora)
        if len(self._loaded) > self._capacity:
            self._make_room(taken | {number})
        return True

    def _refuse_stuck(self, number: int) -> None:
        if number in self._stuck:
            raise RequestFailedError(f"the adapter number {number} is that of one that a worker could not unload")

    def _make_room(self, taken: Set[int]) -> bool:
        """Unload the one that was used longest ago, if there is one that is not taken and the workers can."""
        return any(self._can_unload(other) for other in list(self._loaded) if other not in taken)

    def _can_unload(self, number: int) -> bool:
        try:
            self._unload(number)
        except WorkerCallError as error:  # and it is suspect
            if number not in self._stuck:
                logger.warning("the adapter of number %d cannot be unloaded, and keeps its memory: %s", number, error)
            return False
        return True

    def _unload(self, number: int) -> bool:
        try:
            answers = self._call("remove_lora", number)
        except Exception:
            self._suspect = True
            raise
        self._loaded.pop(number, None)
        self._drop_note(number)
        return any(answers)

    def _compare(self) -> None:
        """Have loaded in the workers what is noted here, or noted less; what only some have is loaded in none.

        :raises WorkerCallError: if a worker cannot say what it has
        """
        loaded = [set(numbers) for numbers in self._call("list_loras")]
        everywhere = set[int].intersection(*loaded)
        self._loaded = {number: lora for number, lora in self._loaded.items() if number in everywhere}
        others = set[int].union(*loaded) - self._loaded.keys()
        self._stuck = {number for number in others if not self._can_unload(number)}
        self._pinned &= self._loaded.keys() | self._stuck
        for number in list(self._by_number):
            self._drop_note(number)
        self._room = True  # of a pin that has gone

    def _load_again(self) -> dict[str, RequestError]:
        failed: dict[str, RequestError] = {}
        self._suspect = False
        try:
            self._compare()
        except WorkerCallError as error:
            self._suspect = True
            reason = RequestFailedError(f"the workers cannot say which adapters they have ({error})")
            return dict.fromkeys([*self._requests, *(request.request_id for request in self._held)], reason)
        for number in list(self._running):
            if number not in self._loaded:
                try:
                    self._load(self._by_number[number])
                except (RequestError, WorkerCallError) as error:
                    failure = error if isinstance(error, RequestError) else RequestFailedError(message_of(error))
                    failed |= {name: failure for name, lora in self._requests.items() if lora.lora_int_id == number}
        return failed

    # ---- names and numbers ----

    def _check(self, lora: LoRARequest) -> None:
        same = {"number": self._by_number.get(lora.lora_int_id), "name": self._by_name.get(lora.lora_name)}
        for what, other in same.items():
            if other is not None and other != lora:
                number = other.lora_int_id
                state = "in use" if self._running[number] or self._held.numbers[number] else "loaded"
                raise RequestRefusedError(
                    f"the adapter {_shown(lora)} has the {what} of {_shown(other)}, which is {state}; "
                    f"give it another {what}, or call remove_lora({number}) first"
                )

    def _note(self, lora: LoRARequest) -> None:
        self._by_number[lora.lora_int_id] = self._by_name[lora.lora_name] = lora

    def _drop_note(self, number: int) -> None:
        if number in self._by_number and not (
            number in self._loaded or self._running[number] or self._held.numbers[number]
        ):
            del self._by_name[self._by_number.pop(number).lora_name]

    def _version(self, lora: LoRARequest) -> int:
        last, version = self._versions.get(lora.lora_name, (lora, 0))
        return version if last == lora else version + 1


def _shown(lora: LoRARequest) -> str:
    return f"{lora.lora_name!r} (number {lora.lora_int_id}, {lora.lora_path!r})"
