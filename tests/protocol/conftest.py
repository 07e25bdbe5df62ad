"""How hypothesis runs here; ``ANYENGINE_THOROUGHNESS=30`` looks longer than a normal run has time for."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from tests.protocol.strategies import THOROUGHNESS

settings.register_profile(
    "anyengine",
    max_examples=100 * THOROUGHNESS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("anyengine")
