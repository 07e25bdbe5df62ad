"""Hands what a step brought to those who wait for it. This is the hot path."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from anyengine.client.request_stream import RequestStream
from anyengine.protocol.client_events import StepReceived
from anyengine.protocol.outputs import StepOutputs

WAKE_AT_ONCE = 64
"""Readers of streams that are woken for one turn of the event loop. Each takes some 10 us, and who waits for a turn may
wait for two; the tokens that come meanwhile are read together."""


class Wakeable(Protocol):
    """Somebody for whom something has come."""

    def wake(self) -> None:
        """Have them look at it."""
        ...


class StepOwner(Protocol):
    """An owner of many requests, which takes their rows of a step together."""

    def push(self, outputs: StepOutputs) -> None:
        """The rows of its requests in one step."""
        ...


class Delivery:
    """Deals out steps. ``unparked`` holds those who are to be woken when a slice of messages has been read."""

    def __init__(self) -> None:
        self.unparked: deque[Wakeable] = deque()
        self._owners: Sequence[Any] = ()
        self._are_streams = False
        self._sole: StepOwner | None = None  # the owner of all rows

    def deliver(self, event: StepReceived[Any], *, wake: bool) -> None:
        """Hand out one step; without ``wake`` no reader of a stream is woken by a token alone."""
        owners, outputs = event.owners, event.outputs
        if owners is not self._owners:
            self._look_at(owners)
        if self._sole is not None:
            self._sole.push(outputs)
        elif self._are_streams and outputs.counts is None and not outputs.details:
            push = RequestStream.push_token if wake else RequestStream.keep_token
            for stream, token in zip(owners, outputs.token_ids, strict=True):
                push(stream, token)
        else:
            _deal_out(owners, outputs)
        if outputs.details:
            self.forget_owners()  # keep no finished request alive

    def forget_owners(self) -> None:
        """Keep nothing of the last step."""
        self._owners, self._are_streams, self._sole = (), False, None

    def wake_readers(self) -> bool:
        """Wake some of those for whom something came; whether there are more to wake in the next turn."""
        unparked = self.unparked
        if not unparked:
            return False
        for _ in range(min(WAKE_AT_ONCE, len(unparked))):
            unparked.popleft().wake()
        return bool(unparked)

    def _look_at(self, owners: Sequence[Any]) -> None:
        self._owners = owners
        self._are_streams = set(map(type, owners)) == {RequestStream}
        self._sole = None
        if owners and not self._are_streams and all(owner is owners[0] for owner in owners):
            self._sole = owners[0]


def _deal_out(owners: Sequence[Any], outputs: StepOutputs) -> None:
    step_owners: dict[int, StepOwner] = {}
    for owner, (_, tokens, details) in zip(owners, outputs.rows(), strict=True):
        if type(owner) is RequestStream:
            owner.push_row(tokens, details)
        else:
            step_owners[id(owner)] = owner
    for step_owner in step_owners.values():
        step_owner.push(outputs.select([owner is step_owner for owner in owners]))
