"""Engines and functions by their import paths."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from anyengine.engine.contract import check_methods
from anyengine.engine.core import EngineCore
from anyengine.keywords import did_you_mean


def import_object(path: str) -> Any:
    """What ``"package.module:name"`` names.

    :raises ImportError: if there is no such module
    :raises AttributeError: if the module has no such name
    """
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def build_engine(path: str, arguments: Mapping[str, Any]) -> EngineCore:
    """An engine by its import path, ``"package.module:Class"``, not loaded yet.

    :raises ImportError: if there is no such module
    :raises AttributeError: if the module has no such name; the message has those of its engines
    :raises TypeError: if it is no engine, has no such argument, or has methods that cannot be called as an engine's
    :raises Exception: what importing or constructing it raised
    """
    module_path, _, name = path.partition(":")
    module = importlib.import_module(module_path)
    if not hasattr(module, name):
        raise AttributeError(f"{module_path} has no {name!r}; it has {_engines_of(module)}")
    engine_class = getattr(module, name)
    if not (isinstance(engine_class, type) and issubclass(engine_class, EngineCore)):
        raise TypeError(
            f"{path} is not a subclass of anyengine.engine.EngineCore; its module has {_engines_of(module)}"
        )
    check_methods(engine_class)
    _check_arguments(engine_class, arguments)
    return engine_class(**arguments)


def _engines_of(module: ModuleType) -> str:
    classes = ((name, value) for name, value in vars(module).items() if isinstance(value, type))
    engines = [name for name, value in classes if issubclass(value, EngineCore) and not inspect.isabstract(value)]
    return f"the engines {', '.join(engines)}" if engines else "no engines"


def _check_arguments(engine_class: type[EngineCore], arguments: Mapping[str, Any]) -> None:
    parameters = inspect.signature(engine_class).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return  # it checks them itself
    known = [parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY]
    for name in arguments:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it takes none"
            raise TypeError(f"{engine_class.__name__} has no argument {name!r}; {has}{did_you_mean(name, known)}")
