"""vLLM has an environment of its own (``make setup-vllm``), in which ``make test-vllm`` runs this tier.

Where there is no vLLM, nothing here is collected.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.vllm import setups
    from tests.vllm.prompts import mixed_requests
    from tests.vllm.reference import reference
    from tests.vllm.small_model import make_small_model

    from anyengine.engines.transformers import default_model

    @pytest.fixture(scope="session")
    def directory() -> Path:
        return default_model(lambda stage, fraction=None: None)

    @pytest.fixture(scope="session")
    def small_model(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make_small_model(tmp_path_factory.mktemp("small") / "model", directory)

    @pytest.fixture(scope="session")
    def requests(directory: Path) -> list[tuple[list[int], dict[str, Any]]]:
        return mixed_requests(directory)

    @pytest.fixture(scope="session")
    def answers(directory: Path, requests: list[tuple[list[int], dict[str, Any]]]) -> Iterator[Callable[[], Any]]:
        arguments = {**setups.ARGUMENTS, "model": str(directory), "distributed_executor_backend": "uni"}
        with reference("LLM", arguments, requests) as answers:
            yield answers

    @pytest.fixture(scope="session")
    def expected(answers: Callable[[], Any]) -> list[list[int]]:
        """What vLLM's own LLM answers."""
        return answers()

    @pytest.fixture(scope="session", autouse=True)
    def early(request: pytest.FixtureRequest) -> None:
        """Have vLLM's own answers made beside the first tests, if any test compares with them."""
        if any("answers" in getattr(item, "fixturenames", ()) for item in request.session.items):
            request.getfixturevalue("answers")

    @pytest.fixture(scope="session")
    def address() -> Iterator[str]:
        """Where an engine with the usual arguments looks for clients."""
        with setups.standing_engine() as address:
            yield address

    @pytest.fixture
    def traces() -> Iterator[setups.Traces]:
        """What an engine of the test leaves on the host."""
        with setups.traces() as found:
            yield found
