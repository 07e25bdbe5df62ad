"""An engine that fails between two steps ends, whether it has work, is paused, or answers a call."""

from __future__ import annotations

import anyio
import pytest

from anyengine import EngineDeadError, EngineSpec, UtilityError, open_engine_client

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

SPEC = EngineSpec("tests.engine_control.failing_engine:FailingEngine")


@pytest.mark.parametrize("paused", [False, True])
async def test_while_it_is_idle(paused: bool) -> None:
    with anyio.fail_after(10):
        async with open_engine_client(SPEC) as client:
            if paused:
                await client.pause_scheduler()
            await client.call_utility("fail_soon")
            with pytest.raises(EngineDeadError, match="RuntimeError: a worker has died"):
                await client.wait_dead()


async def test_in_a_call() -> None:
    with anyio.fail_after(10):
        async with open_engine_client(SPEC) as client:
            with pytest.raises(UtilityError, match="the call's own error"):
                await client.call_utility("fail_alone")
            with pytest.raises(EngineDeadError, match="RuntimeError: a worker has died"):
                await client.call_utility("fail_in_this_call")


async def test_what_it_was_not_configured_for_is_not_offered() -> None:
    async with open_engine_client(SPEC) as client:
        assert "not_configured" not in client.info.utilities
        with pytest.raises(UtilityError, match="not_configured"):
            await client.call_utility("not_configured")
