"""One engine, several clients: which request is whose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from anyengine.engine.connection import ClientConnection, external, slot_of
from anyengine.protocol.outputs import OutputDetails, StepOutputs, from_rows


class LiveHandles(AbstractSet[int]):
    """The engine's handles of all live requests, as long as the connections have them."""

    def __init__(self, connections: Sequence[ClientConnection]) -> None:
        self._connections = connections

    def __contains__(self, handle: object) -> bool:
        return isinstance(handle, int) and any(
            connection.slot == slot_of(handle) and external(handle) in connection.machine.live
            for connection in self._connections
        )

    def __iter__(self) -> Iterator[int]:
        for connection in self._connections:
            yield from connection.live

    def __len__(self) -> int:
        return sum(len(connection.machine.live) for connection in self._connections)


def split(connections: Iterable[ClientConnection], handles: Iterable[int]) -> list[tuple[ClientConnection, list[int]]]:
    """Each client that has requests among ``handles``, and its own handles of them."""
    by_slot: dict[int, list[int]] = {}
    for handle in handles:
        by_slot.setdefault(slot_of(handle), []).append(external(handle))
    return [(connection, by_slot[connection.slot]) for connection in connections if connection.slot in by_slot]


def split_outputs(
    connections: Iterable[ClientConnection], outputs: StepOutputs
) -> list[tuple[ClientConnection, StepOutputs]]:
    """Each client that has rows in a step, and these rows with its own handles."""
    by_slot: dict[int, list[tuple[int, Sequence[int], OutputDetails | None]]] = {}
    for handle, tokens, details in outputs.rows():
        by_slot.setdefault(slot_of(handle), []).append((external(handle), tokens, details))
    return [
        (connection, from_rows(by_slot[connection.slot])) for connection in connections if connection.slot in by_slot
    ]
