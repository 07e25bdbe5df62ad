"""Runs an LLM engine in a child process and talks to it from trio or asyncio.

The public names are loaded when they are first used, so that the engine's process, which imports ``anyengine.engine``
and ``anyengine.engines``, loads neither AnyIO nor the client.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if sys.platform == "win32":
    raise ImportError("anyengine runs on Linux and macOS; on Windows, use it inside WSL")

if TYPE_CHECKING:
    from anyengine.client.engine_client import EngineClient as EngineClient
    from anyengine.client.keeper import RestartPolicy as RestartPolicy
    from anyengine.client.opening import open_engine_client as open_engine_client
    from anyengine.client.request_stream import RequestStream as RequestStream
    from anyengine.client.supervisor import ShutdownPolicy as ShutdownPolicy
    from anyengine.client.supervisor import StartLimits as StartLimits
    from anyengine.errors import AddressError as AddressError
    from anyengine.errors import CrashReport as CrashReport
    from anyengine.errors import EngineClosedError as EngineClosedError
    from anyengine.errors import EngineDeadError as EngineDeadError
    from anyengine.errors import EngineError as EngineError
    from anyengine.errors import EngineStartError as EngineStartError
    from anyengine.errors import KeysError as KeysError
    from anyengine.errors import ModelError as ModelError
    from anyengine.errors import ProtocolError as ProtocolError
    from anyengine.errors import RequestError as RequestError
    from anyengine.errors import RequestStalledError as RequestStalledError
    from anyengine.errors import TooManyRequestsError as TooManyRequestsError
    from anyengine.errors import UnencodableError as UnencodableError
    from anyengine.errors import UnencodableResultError as UnencodableResultError
    from anyengine.errors import UtilityError as UtilityError
    from anyengine.errors import UtilityTimeoutError as UtilityTimeoutError
    from anyengine.inproc_client import InprocEngineClient as InprocEngineClient
    from anyengine.keys import ConnectionKeys as ConnectionKeys
    from anyengine.multimodal import MultiModalFeature as MultiModalFeature
    from anyengine.multimodal import MultiModalField as MultiModalField
    from anyengine.params import LoRARequest as LoRARequest
    from anyengine.params import PoolingParams as PoolingParams
    from anyengine.params import RequestKeywords as RequestKeywords
    from anyengine.params import SamplingParams as SamplingParams
    from anyengine.params import StructuredOutputs as StructuredOutputs
    from anyengine.process.launcher import ProcessLauncher as ProcessLauncher
    from anyengine.protocol.arrays import WireArray as WireArray
    from anyengine.protocol.outputs import OutputDetails as OutputDetails
    from anyengine.protocol.outputs import StepOutputs as StepOutputs
    from anyengine.sync_client.opening import open_sync_engine_client as open_sync_engine_client
    from anyengine.sync_client.sync_engine_client import SyncEngineClient as SyncEngineClient
    from anyengine.sync_client.sync_request_stream import SyncRequestStream as SyncRequestStream
    from anyengine.types import ClientStatistics as ClientStatistics
    from anyengine.types import Completion as Completion
    from anyengine.types import EngineInfo as EngineInfo
    from anyengine.types import EngineSpec as EngineSpec
    from anyengine.types import Health as Health
    from anyengine.types import RequestOutput as RequestOutput

_MODULES = {
    "AddressError": "errors",
    "ClientStatistics": "types",
    "Completion": "types",
    "ConnectionKeys": "keys",
    "CrashReport": "errors",
    "EngineClient": "client.engine_client",
    "EngineClosedError": "errors",
    "EngineDeadError": "errors",
    "EngineError": "errors",
    "EngineInfo": "types",
    "EngineSpec": "types",
    "EngineStartError": "errors",
    "Health": "types",
    "InprocEngineClient": "inproc_client",
    "KeysError": "errors",
    "LoRARequest": "params",
    "ModelError": "errors",
    "MultiModalFeature": "multimodal",
    "MultiModalField": "multimodal",
    "OutputDetails": "protocol.outputs",
    "PoolingParams": "params",
    "ProcessLauncher": "process.launcher",
    "ProtocolError": "errors",
    "RequestError": "errors",
    "RequestFailedError": "errors",
    "RequestKeywords": "params",
    "RequestOutput": "types",
    "RequestRefusedError": "errors",
    "RequestStalledError": "errors",
    "RequestStream": "client.request_stream",
    "RestartPolicy": "client.keeper",
    "SamplingParams": "params",
    "ShutdownPolicy": "client.supervisor",
    "StartLimits": "client.supervisor",
    "StepOutputs": "protocol.outputs",
    "StructuredOutputs": "params",
    "SyncEngineClient": "sync_client.sync_engine_client",
    "SyncRequestStream": "sync_client.sync_request_stream",
    "TooManyRequestsError": "errors",
    "UnencodableError": "errors",
    "UnencodableResultError": "errors",
    "UtilityError": "errors",
    "UtilityTimeoutError": "errors",
    "WireArray": "protocol.arrays",
    "open_engine_client": "client.opening",
    "open_sync_engine_client": "sync_client.opening",
}

__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
