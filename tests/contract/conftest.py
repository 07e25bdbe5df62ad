"""One test function for every kind of client: which kinds there are, and what each cannot do, is in ``clients.py``."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from tests.contract.clients import CANNOT, SETTINGS, Opener, Setting, open_client_of


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*abilities): what a kind of client must be able to do for this test")


@pytest.fixture(params=SETTINGS, ids=str)
def setting(request: pytest.FixtureRequest) -> Setting:
    """The kind of client and the loop of this test."""
    for marker in request.node.iter_markers("needs"):
        for ability in marker.args:
            if ability in CANNOT[request.param.kind]:
                pytest.skip(CANNOT[request.param.kind][ability])
    return request.param


@pytest.fixture
def anyio_backend(setting: Setting) -> Any:
    return setting.backend, setting.backend_options


@pytest.fixture
def open_client(setting: Setting) -> Opener:
    return functools.partial(open_client_of, setting)
