"""LoRA adapters are loaded before their requests reach vLLM, and stay loaded as long as these are there."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from anyengine.engines.vllm.parameters import lora_request
from anyengine.errors import RequestError
from anyengine.params import LoRARequest


class _Held(NamedTuple):
    request_id: str
    lora: LoRARequest
    enqueue: Callable[[], None]
    priority: int


class Adapters:
    """Keeps vLLM from loading an adapter in a step, where a directory that is gone would end all requests.

    vLLM keeps ``max_cpu_loras`` adapters in the host's memory. For one more it drops the one that was used least
    recently, even if requests for it are waiting, and reads it again in the step that comes to them. So there are never
    requests for more adapters in vLLM than it can keep; those for others are held here until an adapter has none left.
    An adapter that is pinned takes one of ``max_loras`` places on the device, which vLLM's scheduler does not know of.
    """

    def __init__(self, core: Any, max_loras: int, max_cpu_loras: int) -> None:
        self._core = core
        self._places = max_loras
        self._capacity = max_cpu_loras
        self._used: dict[str, LoRARequest] = {}  # by the requests in vLLM
        self._held: list[_Held] = []  # in the order of their turns
        self._recent: dict[int, None] = {}  # numbers of adapters that were loaded or used, the latest last
        self._pinned: set[int] = set()
        self._room = False  # a request has ended, and may have been the last of its adapter
        self._suspect = False  # an adapter that is in use may have been dropped

    @property
    def held(self) -> int:
        """Requests that wait for an adapter to go."""
        return len(self._held)

    def __bool__(self) -> bool:
        """Whether any request is here or in vLLM that has an adapter."""
        return bool(self._used or self._held)

    def add(self, request_id: str, lora: LoRARequest, enqueue: Callable[[], None], priority: int = 0) -> None:
        """Load an adapter and call ``enqueue``, now or in :meth:`admit`, where a lower ``priority`` comes first.

        :raises RequestError: if it cannot be loaded, or has the name of another one that is in use, or no place because
            of those that are pinned
        """
        for other in self._used.values():
            # vLLM tells adapters apart by name in one place and by number in the next.
            if other.lora_name == lora.lora_name and other.lora_int_id != lora.lora_int_id:
                raise RequestError(
                    f"the adapter {lora.lora_name!r} has number {lora.lora_int_id}: "
                    f"requests are using {other.lora_int_id} of the same name"
                )
        request = _Held(request_id, lora, enqueue, priority)
        if not self._let_in(request):
            insort(self._held, request, key=lambda held: held.priority)

    def end(self, request_ids: Sequence[str]) -> None:
        """These requests have ended or are aborted; some of them may have no adapter."""
        for request_id in request_ids:
            self._room |= self._used.pop(request_id, None) is not None
        ended = set(request_ids)
        self._held = [request for request in self._held if request.request_id not in ended]

    def admit(self) -> dict[str, str]:
        """Before a step: see to it that what it may need is loaded, and let requests in whose turn it is.

        Returns what is wrong with those that cannot go on, by their ids; vLLM has to be told to drop them.
        """
        failed: dict[str, str] = {}
        if self._suspect:
            self._suspect = False
            for lora in {lora.lora_int_id: lora for lora in self._used.values()}.values():
                try:
                    self.load(lora, used=True)
                except RequestError as error:
                    number = lora.lora_int_id
                    failed |= {name: str(error) for name, used in self._used.items() if used.lora_int_id == number}
        if self._room:
            self._room = False
            still: list[_Held] = []
            for request in self._held:
                try:
                    if not self._let_in(request):
                        still.append(request)
                except Exception as error:
                    failed[request.request_id] = str(error)
            self._held = still
        self.end(list(failed))
        return failed

    def load(self, lora: LoRARequest, *, used: bool = False) -> bool:
        """Load an adapter; False if it is there already.

        :param used: it is or will be used by a request, for which there is room
        :raises RequestError: if it cannot be loaded
        """
        number = lora.lora_int_id
        try:
            loaded = self._core.list_loras()
            if new := number not in loaded:
                if used:
                    self._make_room(loaded)
                self._core.add_lora(lora_request(lora))
                # Whom vLLM drops for one that no request uses is its own choice.
                self._suspect |= not used and bool(self._used)
        except Exception as error:
            raise RequestError(
                f"the adapter {lora.lora_name!r} cannot be loaded from {lora.lora_path!r} "
                f"({type(error).__name__}: {error})"
            ) from error
        self._recent.pop(number, None)
        self._recent[number] = None
        return new

    def remove(self, number: int) -> bool:
        """Unload an adapter; whether there was one. Requests that use it load it again."""
        self._pinned.discard(number)
        self._suspect = True
        return self._core.remove_lora(number)

    def pin(self, number: int) -> bool:
        """Keep an adapter from being dropped.

        :raises RequestError: if requests use others, which would have no place on the device then
        """
        if len(others := (self._in_use() | self._pinned) - {number}) >= self._places:
            raise RequestError(
                f"pin_lora({number}): adapters {sorted(others)} are in use or pinned, and max_loras={self._places}"
            )
        pinned = self._core.pin_lora(number)
        self._pinned.add(number)
        return pinned

    def numbers(self) -> list[int]:
        """The numbers of those that are loaded, in order."""
        return sorted(self._core.list_loras())

    def forget(self) -> None:
        """All adapters may have been dropped, together with the weights of the model."""
        self._suspect = True
        self._pinned.clear()

    def _let_in(self, request: _Held) -> bool:
        taken = self._in_use() | self._pinned
        if request.lora.lora_int_id not in taken and len(taken) >= (self._places if self._pinned else self._capacity):
            if taken != self._pinned:
                return False
            raise RequestError(
                f"the adapter {request.lora.lora_name!r} has no place on the device: "
                f"max_loras={self._places}, and adapters {sorted(self._pinned)} are pinned"
            )
        self.load(request.lora, used=True)
        request.enqueue()
        self._used[request.request_id] = request.lora
        return True

    def _in_use(self) -> set[int]:
        return {lora.lora_int_id for lora in self._used.values()}

    def _make_room(self, loaded: set[int]) -> None:
        """Drop the adapter that was used least recently, if vLLM had to choose one and could choose a wrong one."""
        idle = loaded - self._in_use() - self._pinned
        if len(loaded) >= self._capacity and idle:
            order = {number: place for place, number in enumerate(self._recent)}
            oldest = min(idle, key=lambda number: order.get(number, -1))
            self._core.remove_lora(oldest)
            self._recent.pop(oldest, None)
