"""What a client is opened with, checked as a whole before anything starts."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Literal

import zmq

from anyengine.addresses import check_address
from anyengine.brief import brief
from anyengine.client.admission import WhenFull
from anyengine.client.checks import check_count
from anyengine.client.keeper import RestartPolicy
from anyengine.client.supervisor import ShutdownPolicy, StartLimits
from anyengine.keys import ConnectionKeys
from anyengine.process.engine_thread import ThreadLauncher
from anyengine.process.host import Launcher
from anyengine.process.interpreter import own_interpreter
from anyengine.process.launcher import ProcessLauncher
from anyengine.process.remote_engine import AttachLauncher
from anyengine.protocol import packing
from anyengine.transport.endpoints import TransportName
from anyengine.types import EngineSpec, ProgressCallback

OnDeath = Literal["notify", "cancel"]
Placement = Literal["process", "thread"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """The arguments of ``open_engine_client``, which describes them.

    :raises TypeError: if one has the wrong type
    :raises ValueError: if one has an impossible value, or two contradict each other
    :raises RuntimeError: if the engine needs an interpreter, and this process has none that it could start
    """

    placement: Placement
    address: str | None
    keys: ConnectionKeys | None
    on_death: OnDeath
    on_progress: ProgressCallback | None
    start_limits: StartLimits
    shutdown: ShutdownPolicy
    restart: RestartPolicy | None
    max_requests: int | None
    when_full: WhenFull
    transport: Literal["ipc", "tcp"] | None
    launcher: ProcessLauncher | None

    def __post_init__(self) -> None:
        self._check_types()
        self._check_choice("placement", "process", "thread")
        self._check_choice("on_death", "notify", "cancel")
        self._check_choice("when_full", "refuse", "wait")
        if self.transport is not None:
            self._check_choice("transport", "ipc", "tcp")
        if self.max_requests is not None:
            check_count("max_requests", self.max_requests)
        if self.address is not None:
            check_address(self.address, keys=self.keys is not None)
        elif self.keys is not None:
            raise ValueError("keys are for an engine that comes to an address, and there is no address")
        self._check_combinations()

    def _check_types(self) -> None:
        for name, kind in (("start_limits", StartLimits), ("shutdown", ShutdownPolicy)):
            self._check_type(name, kind)
        for name, kind in (("restart", RestartPolicy), ("launcher", ProcessLauncher)):
            if getattr(self, name) is not None:
                self._check_type(name, kind)
        if self.on_progress is not None and not callable(self.on_progress):
            raise TypeError(
                f"on_progress={brief(self.on_progress)}: expected a callable of stage and fraction, or None"
            )
        if inspect.iscoroutinefunction(self.on_progress):
            raise TypeError(f"on_progress={brief(self.on_progress)}: expected a function that is not async")

    def _check_type(self, name: str, kind: type) -> None:
        value = getattr(self, name)
        if not isinstance(value, kind):
            raise TypeError(f"{name}={brief(value)} ({type(value).__name__}): expected a {kind.__name__}")

    def _check_choice(self, name: str, *choices: str) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(f"{name}={brief(value)}: expected {' or '.join(map(repr, choices))}")

    def _check_combinations(self) -> None:
        own_process = self.placement == "process" and self.address is None
        for name in ("transport", "launcher"):
            if getattr(self, name) is not None and not own_process:
                other = "address" if self.address is not None else "placement='thread'"
                raise ValueError(f"{other} and {name}: {name} is for an engine that this client starts in a process")
        if own_process and self.launcher is None:
            own_interpreter()
        if self.address is not None and self.placement == "thread":
            raise ValueError("address and placement='thread': an engine that somebody else starts is in no thread here")
        if self.on_death == "cancel" and self.restart is not None:
            raise ValueError("on_death='cancel' and restart: the block ends at the first death, and restarts nothing")

    def check_spec(self, spec: object) -> None:
        """Check the engine that goes with these options.

        :raises TypeError: if there is none where one is to be started, or it has the wrong type
        :raises ValueError: if there is one and an address
        :raises UnencodableError: if an argument cannot travel
        """
        if self.address is not None:
            if spec is not None:
                raise ValueError("spec and address: an engine that comes to an address was told elsewhere what it is")
        elif isinstance(spec, EngineSpec):
            packing.pack(spec.arguments, [], path="EngineSpec.arguments")
        else:
            raise TypeError(f"spec={brief(spec)} ({type(spec).__name__}): expected an EngineSpec")

    @property
    def token(self) -> bytes | None:
        """What an engine that comes by itself must prove to have; empty where the file system says who may come."""
        if self.address is None:
            return None
        return b"" if self.keys is None else self.keys.token_bytes

    @property
    def sockets(self) -> TransportName:
        """What the client's sockets are made of."""
        if self.address is not None:
            return "tcp" if self.address.startswith("tcp:") else "ipc"
        return "inproc" if self.placement == "thread" else self.transport or "ipc"

    def make_launcher(self, context: zmq.Context[Any]) -> Launcher:
        """What starts the engine; ``context`` is that of the client's sockets."""
        if self.address is not None:
            return AttachLauncher()
        if self.placement == "thread":
            return ThreadLauncher(context)
        return self.launcher or ProcessLauncher()
