"""What operations leave for the garbage collector: objects in cycles, which a program that switched it off keeps."""

from __future__ import annotations

import collections
import contextlib
import gc
from collections.abc import Iterator

REPEATS = 30
"""How often each operation is repeated. What a whole client or loop leaves once is less than one object for each."""


@contextlib.contextmanager
def nothing_in_cycles() -> Iterator[None]:
    """Fail if the block, which repeats something :data:`REPEATS` times, leaves objects in cycles each time."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
    finally:
        gc.set_debug(0)
        gc.enable()
        kinds = collections.Counter(f"{type(kept).__name__} {getattr(kept, '__qualname__', '')}" for kept in gc.garbage)
        gc.garbage.clear()
    often = {kind: count for kind, count in kinds.items() if count >= REPEATS // 2}
    assert not often, f"in cycles after {REPEATS} times: {often}"
