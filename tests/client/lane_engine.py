"""An engine for the tests of the lane: it says what it got, and holds it as long as it is told to."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import resource
import signal
from array import array
from pathlib import Path
from typing import Any

from anyengine.engine import EngineRequest, ProgressReporter, utility
from anyengine.engines.scripted import ScriptedEngine
from anyengine.protocol.arrays import WireArray
from anyengine.types import EngineInfo, EngineSpec

MODULUS = 10_000


class LaneEngine(ScriptedEngine):
    """Takes prompts as embeddings and counts up from a number made of their digest.

    :param libraries: what to load: torch, numpy, or nothing, as an engine without either
    :param weights: any array
    :param prompts: what becomes of a prompt of embeddings: ``"read"`` it, ``"keep"`` it too (as one of tokens), or
        ``"refuse"`` it
    """

    def __init__(self, libraries: str = "", weights: Any = None, prompts: str = "read", **arguments: Any) -> None:
        super().__init__(**arguments)
        self._libraries = libraries
        self._weights = weights
        self._prompts = prompts
        self._kept: list[Any] = []

    def load(self, progress: ProgressReporter) -> None:
        for library in self._libraries.split():
            __import__(library)
        super().load(progress)

    def describe(self) -> EngineInfo:
        return dataclasses.replace(super().describe(), prompt_embeds=True)

    def add_request(self, request: EngineRequest) -> None:
        if request.prompt_embeds is not None:
            if self._prompts == "refuse":
                raise RuntimeError("no embeddings today")
            if self._prompts == "keep":
                self._kept.append(request.prompt_embeds)
            number = first_token(request.prompt_embeds) - 1
            request = dataclasses.replace(request, prompt_token_ids=array("I", [number]), prompt_embeds=None)
        elif self._prompts == "keep":
            self._kept.append(request.prompt_token_ids)
        super().add_request(request)

    @utility
    def weights(self) -> str:
        return digest(self._weights)

    @utility
    def digests(self, values: list[Any]) -> list[str]:
        return [digest(value) for value in values]

    @utility
    def kinds(self, values: list[Any]) -> list[str]:
        return [kind(value) for value in values]

    @utility
    def keep(self, value: Any) -> None:
        self._kept.append(value)

    @utility
    def kept(self) -> list[str]:
        return [digest(value) for value in self._kept]

    @utility
    def drop(self) -> None:
        self._kept.clear()

    @utility
    def fill(self, value: Any, number: int) -> str:
        """Write into what came."""
        value[...] = number
        return digest(value)

    @utility
    def fork_and_drop(self) -> None:
        """Let go of what is kept, while a process that was forked still has it."""
        if not os.fork():
            signal.pause()
        self._kept.clear()

    @utility
    def allow_no_more_descriptors(self, spare: bool) -> None:
        """Forbid this process to open any more, or allow it again."""
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if spare else 3, hard))

    @utility
    def figures(self) -> dict[str, int]:
        """See :func:`figures`."""
        return figures(os.getpid())


def lane_spec(libraries: str = "", **arguments: Any) -> EngineSpec:
    """The engine above."""
    return EngineSpec("tests.client.lane_engine:LaneEngine", {"libraries": libraries, **arguments})


def digest(value: Any) -> str:
    """Of the elements in C order: the same for the same bytes in any library."""
    if isinstance(value, WireArray):
        data: Any = value.data
    elif hasattr(value, "untyped_storage"):
        import torch

        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        data = flat.numpy()
    else:
        data = value.tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def first_token(embeds: Any) -> int:
    """The token that a request with these embeddings gets first."""
    return int(digest(embeds)[:8], 16) % MODULUS + 1


def kind(value: Any) -> str:
    """Type, dtype and shape, in words that are the same on both sides."""
    return f"{type(value).__name__} {value.dtype} {list(value.shape)}"


def figures(pid: int) -> dict[str, int]:
    """Descriptors, resident bytes, and what of tensors on their way a process has open or mapped."""
    names: list[str] = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            names.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            continue
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {
        "descriptors": len(names),
        "tensor_descriptors": sum("anyengine-tensor" in name for name in names),
        "tensor_mappings": sum("anyengine-tensor" in line for line in maps),
        "resident": int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }
