"""Which tokens of which requests run in the next step, and which cache blocks hold them.

Requests are served in the order in which they came. Each step takes one token of every request that is generating and
fills the rest of its budget with pieces of prompts. When the blocks run out, the youngest request gives its own back
and is computed again later (preemption). The tables of blocks are kept here and nowhere else: sharing full blocks
between requests (prefix caching) would take a count of owners in :class:`BlockPool` and a look-up at admission.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import MutableSequence, Sequence
from typing import Any

from anyengine.types import TokenLogprobs

_SCORED_TOKENS = 256
"""From a scored prompt on, a step takes no more tokens: their logits over the whole vocabulary exist all at once."""


class BlockPool:
    """The free blocks of the cache, out of blocks 1 to ``num_blocks``. Blocks used last are handed out first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))

    @property
    def free(self) -> int:
        """How many blocks nobody has."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """That many blocks, or None if there are not enough."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: Sequence[int]) -> None:
        """Take blocks back."""
        self._free.extend(reversed(blocks))


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """A request under way: ``tokens`` are prompt and completion, and of those ``computed`` are in the cache.

    It ends when it has ``limit`` tokens at the latest. ``sampling`` is the sampler's state. A prompt of embeddings has
    them in ``embeds`` (``[prompt token, hidden]``) and zeros for its token ids. ``prompt_logprobs`` is None, or, of a
    scored prompt, what is known so far, position by position, until it is handed out.
    """

    handle: int
    tokens: MutableSequence[int]
    prompt_length: int
    limit: int
    sampling: Any
    embeds: Any = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    computed: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list[int])


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens ``start`` to ``stop`` of a request, which run in one step."""

    request: Request
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """Whether these are the request's last tokens, so that the next one is sampled from them."""
        return self.stop == len(self.request.tokens)

    @property
    def scores(self) -> range:
        """The positions of a scored prompt that are not known yet and follow from these tokens."""
        known = self.request.prompt_logprobs
        if known is None:
            return range(0)
        return range(max(self.start + 1, len(known)), min(self.stop + 1, self.request.prompt_length))


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One step: what runs, and the blocks that got an owner for it."""

    chunks: list[Chunk]
    new_blocks: list[int]


class Scheduler:
    """The running and the waiting requests.

    The pool must hold one request of the greatest length, so that the oldest request can always go on.
    """

    def __init__(self, pool: BlockPool, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._requests: dict[int, Request] = {}
        self._pool = pool
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._requests[request.handle] = request
        self.waiting.append(request)

    def remove(self, handle: int) -> None:
        """Forget a request, finished or not, and free its blocks; an unknown handle is ignored."""
        request = self._requests.pop(handle, None)
        if request is None:
            return
        if request.blocks:
            self.running.remove(request)
            self._pool.release(request.blocks)
        else:
            self.waiting.remove(request)

    def schedule(self) -> Plan:
        """Plan a step and count its tokens as computed. It is empty only if there is no request."""
        plan = Plan([], [])
        budget = self._max_num_batched_tokens
        preempted = False
        index = 0
        # Only the youngest can be within its prompt: nothing was admitted while the budget went into that. So all that
        # generate come before it, and the budget, at least one token for each, reaches them all.
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            budget = _limit(budget, request)
            stop = min(len(request.tokens), request.computed + budget)
            while not self._extend(request, stop, plan):
                preempted = True
                if self._preempt_youngest() is request:
                    break
            else:
                budget -= self._take(request, stop, plan)
                index += 1
        while self.waiting and budget > 0 and not preempted and len(self.running) < self._max_num_seqs:
            request = self.waiting[0]
            # One block to spare for each that is running: without it they would soon throw this one out again.
            if self._blocks_for(len(request.tokens)) + len(self.running) > self._pool.free:
                break
            budget = _limit(budget, request)
            stop = min(len(request.tokens), budget)
            self._extend(request, stop, plan)
            self.running.append(self.waiting.popleft())
            budget -= self._take(request, stop, plan)
        return plan

    def preempt_all(self) -> None:
        """Take the blocks of all running requests back; they are computed again later, in the order they are in."""
        while self.running:
            self._preempt_youngest()

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _extend(self, request: Request, stop: int, plan: Plan) -> bool:
        blocks = self._pool.allocate(self._blocks_for(stop) - len(request.blocks))
        if blocks is None:
            return False
        request.blocks += blocks
        plan.new_blocks.extend(blocks)
        return True

    def _take(self, request: Request, stop: int, plan: Plan) -> int:
        start, request.computed = request.computed, stop
        plan.chunks.append(Chunk(request, start, stop))
        return stop - start

    def _preempt_youngest(self) -> Request:
        request = self.running.pop()
        self._pool.release(request.blocks)
        request.blocks = []
        request.computed = 0
        self.waiting.appendleft(request)
        return request


def _limit(budget: int, request: Request) -> int:
    return budget if request.prompt_logprobs is None else min(budget, _SCORED_TOKENS)
