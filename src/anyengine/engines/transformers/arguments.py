"""The arguments of the engine, checked, and what follows from them for a model and a device."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

from anyengine.brief import brief
from anyengine.engines.transformers.checkpoint import cache_directory

if TYPE_CHECKING:
    import torch

    from anyengine.engines.transformers.kv_cache import KVLayout
    from anyengine.engines.transformers.model import CausalModel

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_BATCHED_TOKENS = {"cpu": 256, "cuda": 2048}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """What :class:`TransformersEngine` is built with, and describes.

    :raises TypeError: if an argument has the wrong type
    :raises ValueError: if an argument is out of its range
    :raises FileNotFoundError: if ``model`` is not the directory of a model
    """

    model: str
    dtype: str
    device: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    block_size: int
    kv_cache_bytes: int | None
    max_logprobs: int
    seed: int
    num_threads: int | None
    profile_dir: str | None

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype={brief(self.dtype)}: expected one of {', '.join(_DTYPES)}")
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device={brief(self.device)}: expected 'auto', 'cpu', 'cuda' or 'cuda:N'")
        self._check_model()
        self._check_integer("max_num_seqs", 1)
        self._check_integer("block_size", 1)
        self._check_integer("max_logprobs", -1)
        self._check_integer("seed", -(2**63))
        for name, least in (
            ("max_model_len", 2), ("max_num_batched_tokens", 1), ("kv_cache_bytes", 1), ("num_threads", 1),
        ):  # fmt: skip
            if getattr(self, name) is not None:
                self._check_integer(name, least)
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: less than max_num_seqs={self.max_num_seqs}, "
                "but each running request takes a token in every step"
            )
        if self.profile_dir is not None and not (isinstance(self.profile_dir, str) and self.profile_dir):
            raise TypeError(f"profile_dir={brief(self.profile_dir)}: expected a directory's path, or None")

    @property
    def directory(self) -> Path | None:
        """The directory of the model, or None for the default model."""
        return None if self.model == "default" else _absolute(self.model)

    @property
    def profile_directory(self) -> Path:
        """Where profiles go.

        :raises OSError: if that is where converted models lie, and there is no such place
        """
        return cache_directory() / "profiles" if self.profile_dir is None else _absolute(self.profile_dir)

    def torch_device(self) -> torch.device:
        """The device.

        :raises ValueError: if it is CUDA and there is none
        """
        import torch

        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        elif name != "cpu" and not torch.cuda.is_available():
            raise ValueError(f"device={brief(name)}: torch {torch.__version__} finds no CUDA device here")
        return torch.device(name)

    def batched_tokens(self, device: torch.device) -> int:
        """How many tokens a step may have."""
        return self.max_num_batched_tokens or max(_BATCHED_TOKENS[device.type], self.max_num_seqs)

    def num_blocks(self, layout: KVLayout, model: CausalModel) -> int:
        """How many blocks the KV cache has."""
        block_bytes = layout.bytes_per_token * self.block_size
        if self.kv_cache_bytes is not None:
            return self.kv_cache_bytes // block_bytes
        blocks = layout.default_bytes(model.device) // block_bytes
        if model.device.type == "cpu" and self.max_model_len is not None:
            blocks = max(blocks, -(-self.max_model_len // self.block_size))
        longest = self.max_model_len or model.max_length
        return blocks if longest is None else min(blocks, self.max_num_seqs * -(-longest // self.block_size))

    def length(self, model: CausalModel, capacity: int) -> int:
        """The value of max_model_len for this model, when the cache holds ``capacity`` tokens.

        :raises ValueError: if the cache, or the model, does not allow what was asked for
        """
        length = self.max_model_len
        if length is None:
            if model.max_length is None:
                raise ValueError("max_model_len=None: this model does not say how long a request may be; pass a number")
            length = min(model.max_length, capacity)
        elif model.max_length is not None and length > model.max_length:
            raise ValueError(f"max_model_len={length}: the model is made for at most {model.max_length} tokens")
        if length > capacity or capacity < 2:
            raise ValueError(
                f"the KV cache holds {capacity} tokens, too few for one request of max_model_len={max(length, 2)} "
                "tokens: pass a greater kv_cache_bytes or a smaller max_model_len"
            )
        if model.window is not None and length > model.window:
            raise ValueError(
                f"max_model_len={length}: beyond {model.window} tokens this model needs sliding-window attention or "
                f"rotary frequencies that change, which this engine does not compute; pass max_model_len={model.window}"
            )
        return length

    def _check_integer(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if type(value) is not int:
            raise TypeError(f"{name}={brief(value)} ({type(value).__name__}): expected an integer")
        if value < least:
            raise ValueError(f"{name}={value}: expected at least {least}")

    def _check_model(self) -> None:
        if not isinstance(self.model, str):
            kind = type(self.model).__name__
            raise TypeError(f"model={brief(self.model)} ({kind}): expected a directory's path, or 'default'")
        directory = self.directory
        if directory is not None and not (directory / "config.json").is_file():
            what = "has no config.json" if directory.is_dir() else "is not a directory"
            raise FileNotFoundError(
                f"model={brief(self.model)}: {directory} {what}; expected a directory with config.json, weights "
                "(*.safetensors) and tokenizer in Hugging Face's format, or 'default' for SmolLM2-135M-Instruct; for "
                "a model on the Hugging Face hub pass huggingface_hub.snapshot_download(name)"
            )


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()
