"""Engines and functions by their import paths."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from anyengine.engine.core import EngineCore


def import_object(path: str) -> Any:
    """What ``"package.module:name"`` names.

    :raises ImportError: if there is no such module
    :raises AttributeError: if the module has no such name
    """
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def build_engine(path: str, arguments: Mapping[str, Any]) -> EngineCore:
    """An engine by its import path, ``"package.module:Class"``, not loaded yet.

    :raises TypeError: if it is no engine
    :raises Exception: what importing or constructing it raised
    """
    engine_class = import_object(path)
    if not (isinstance(engine_class, type) and issubclass(engine_class, EngineCore)):
        raise TypeError(f"{path} is not a subclass of anyengine.engine.EngineCore")
    return engine_class(**arguments)
