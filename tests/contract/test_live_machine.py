"""Requests, calls, pauses, sleeps, cancellations and deaths in any order, on a live client; see ``live_machine.py``.

- Each token comes once and in order, each request ends once, and nothing comes of it after that.
- When a pause or sleep is answered, the engine is in that state: it makes no step, and holds what comes.
- A death reaches everybody who waits, and the engine's next life knows nothing of it.
- At the end no table holds anything, and nothing is left of the client.
"""

from __future__ import annotations

import anyio
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from tests.contract.clients import Setting, open_client_of
from tests.contract.live_machine import LiveMachine, Operation
from tests.protocol.strategies import THOROUGHNESS

from anyengine import RestartPolicy

WHICH = st.integers(0, 9)
MODES = st.sampled_from(["abort", "wait", "keep"])
LENGTHS = st.sampled_from([1, 2, 5, 20, 80, 200])


def operation(name: str, *arguments: st.SearchStrategy[object]) -> st.SearchStrategy[Operation]:
    return st.tuples(st.just(name), *arguments)


ADD = operation("add", LENGTHS, st.booleans()) | operation("add_for_get_output", LENGTHS)
USE = (
    operation("read_some", WHICH)
    | operation("read_steps_later")
    | operation("cancel", WHICH)
    | operation("abort", st.lists(WHICH, max_size=3))
    | operation("call", st.integers(-(2**63), 2**64 - 1) | st.text(max_size=3))
    | operation("cancel_call", st.sampled_from([0.0, 0.01]))
)
PAUSE = (
    operation("pause", MODES)
    | operation("sleep", st.integers(0, 2), MODES)
    | operation("resume")
    | operation("wake_up", st.sampled_from([None, ["weights"], ["kv_cache"]]))
)
DIE = operation("die", st.integers(0, 3), st.booleans())
OPERATIONS = st.lists(ADD | ADD | USE | PAUSE | DIE, min_size=3, max_size=30)

SETTINGS = [
    Setting("process", "asyncio"),
    Setting("process", "trio"),
    Setting("thread", "asyncio"),
    Setting("thread", "trio"),
]


@pytest.mark.anyio
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.timeout(600)  # a failure takes long to shrink
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@settings(
    max_examples=30 * THOROUGHNESS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(operations=OPERATIONS)
async def test_any_order(setting: Setting, operations: list[Operation]) -> None:
    restart = RestartPolicy(limit=1000, window=1, backoff=0)
    async with anyio.create_task_group() as group:
        async with open_client_of(setting, {"step_delay": 0.001}, restart=restart) as client:
            machine = LiveMachine(client, group, can_be_killed=setting.can("signal"))
            await machine.run(operations)
