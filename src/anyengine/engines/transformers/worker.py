"""The engine's one worker: what ``collective_rpc`` reaches."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

from anyengine.brief import brief
from anyengine.engine.loading import import_object
from anyengine.engines.transformers.kv_cache import KVCache
from anyengine.engines.transformers.model import CausalModel
from anyengine.engines.transformers.scheduler import Chunk, Request

_METHOD = re.compile(r"[A-Za-z]\w*")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_SHARD_PATTERN = "model-rank-{rank}-part-{part}.safetensors"


class Worker:
    """What computes the model: ``collective_rpc`` calls its methods by name, and functions with it.

    ``model`` is transformers' own model, whose parameters need no gradients and may be changed in place. ``device`` and
    ``dtype`` are those of its parameters while the engine is awake, and ``rank`` is 0.
    """

    def __init__(self, causal_model: CausalModel, cache: KVCache) -> None:
        self._causal_model = causal_model
        self._cache = cache
        self.model: Any = causal_model.module
        self.device: torch.device = causal_model.device
        self.dtype: torch.dtype = causal_model.dtype
        self.rank = 0

    def execute_dummy_batch(self) -> None:
        """Run the model on one made-up token.

        :raises RuntimeError: if the engine sleeps
        """
        if not (self._causal_model.is_resident and self._cache.is_allocated):
            raise RuntimeError("execute_dummy_batch: the engine sleeps; wake_up() first")
        # Block 0, which belongs to no request, has to be zero again for the next step.
        request = Request(handle=0, tokens=[0], prompt_length=1, limit=1, sampling=None, blocks=[0])
        try:
            self._causal_model.forward([Chunk(request, 0, 1)], self._cache)
        finally:
            self._cache.clear([0])

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write the weights as safetensors into the directory ``path``, under transformers' names, tied ones once.

        :param pattern: the files' names, made from ``{rank}`` and ``{part}``
        :param max_size: bytes of tensors that a file may have (None: one file has all); a greater tensor is alone
        :raises RuntimeError: if the weights sleep
        :raises TypeError: if an argument has the wrong type
        :raises ValueError: if ``pattern`` or ``max_size`` is of no use
        :raises FileExistsError: if the directory has such files already
        :raises OSError: if the directory cannot be made
        :raises safetensors.SafetensorError: if a file cannot be written; those before it are there
        """
        if not self._causal_model.is_resident:
            raise RuntimeError('save_sharded_state: the weights sleep; wake_up(["weights"]) first')
        if not isinstance(path, str) or not path:
            raise TypeError(f"path={brief(path)}: expected a directory's path")
        if max_size is not None and type(max_size) is not int:
            raise TypeError(f"max_size={brief(max_size)}: expected a number of bytes, or None")
        if max_size is not None and max_size < 1:
            raise ValueError(f"max_size={max_size}: expected at least 1 byte")
        pattern = _SHARD_PATTERN if pattern is None else pattern
        names = [self._shard_name(pattern, part) for part in (0, 1)]
        if max_size is not None and names[0] == names[1]:
            raise ValueError(f"pattern={brief(pattern)}: files of several parts need {{part}}")
        directory = Path(path).absolute()
        if (directory / names[0]).exists():
            raise FileExistsError(f"{directory / names[0]} exists; take another directory")
        directory.mkdir(parents=True, exist_ok=True)
        for part, tensors in enumerate(_parts(self.model, max_size)):
            file = directory / self._shard_name(pattern, part)
            save_file(tensors, file, metadata={"format": "pt"})
            file.chmod(0o644)  # safetensors makes files that only their owner can read

    def _shard_name(self, pattern: str, part: int) -> str:
        if not isinstance(pattern, str):
            raise TypeError(f"pattern={brief(pattern)}: expected a string")
        try:
            name = pattern.format(rank=self.rank, part=part)
        except (AttributeError, LookupError, ValueError) as error:
            raise ValueError(
                f"pattern={brief(pattern)}: expected a file's name made from {{rank}} and {{part}}"
            ) from error
        if not name or "/" in name:
            raise ValueError(f"pattern={brief(pattern)}: expected the name of a file, not of a path")
        return name


def call_worker(worker: Worker, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a method of the worker by its name, or ``"package.module:function"`` with the worker as first argument.

    :raises TypeError: if ``method`` is not a string, or names what cannot be called, or the arguments do not fit
    :raises ValueError: if ``method`` has neither form
    :raises AttributeError: if the worker has no such method, or the module no such function
    :raises ImportError: if there is no such module
    """
    if not isinstance(method, str):
        raise TypeError(f"method={brief(method)} ({type(method).__name__}): expected a method's name or an import path")
    if _METHOD.fullmatch(method):
        function = getattr(worker, method, None)
        if not inspect.ismethod(function):
            names = [name for name, _ in inspect.getmembers(Worker, inspect.isfunction) if _METHOD.fullmatch(name)]
            raise AttributeError(f"method={brief(method)}: the worker's methods are {', '.join(names)}")
        return function(*args, **kwargs)
    if not _FUNCTION.fullmatch(method):
        raise ValueError(
            f"method={brief(method)}: expected the name of a worker's method, or 'package.module:function'"
        )
    function = import_object(method)
    if not callable(function):
        raise TypeError(f"method={brief(method)}: {type(function).__name__} cannot be called")
    return function(worker, *args, **kwargs)


def _parts(model: Any, max_size: int | None) -> list[dict[str, torch.Tensor]]:
    """The model's parameters and persistent buffers, cut where a file would have more than ``max_size`` bytes."""
    persistent = model.state_dict().keys()
    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    # Neither of the two names a tensor twice; safetensors refuses tensors that share memory.
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if name not in persistent:
            continue
        if max_size is not None and parts[-1] and size + tensor.nbytes > max_size:
            parts.append({})
            size = 0
        parts[-1][name] = tensor.detach().contiguous()
        size += tensor.nbytes
    return parts
