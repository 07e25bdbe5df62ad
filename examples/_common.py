"""What the examples share: their options, and an engine together with its text.

Each example runs the real default model; with ``--engine scripted`` (or ``ANYENGINE_EXAMPLE_ENGINE=scripted``) it runs
an engine that needs no model and recites one sentence over and over, whatever it is asked.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import anyio

from anyengine import EngineClient, EngineSpec

Decoder = Callable[[Sequence[int]], str]
"""Turns the next tokens of one text into the characters that they complete."""


class Model(Protocol):
    """An engine, and how text becomes its tokens and back."""

    spec: EngineSpec

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt. Call it when the engine is ready: its first start makes the tokenizer's file."""
        ...

    def decoder(self) -> Decoder:
        """A decoder for one stream of tokens."""
        ...


class DefaultModel:
    """SmolLM2-135M-Instruct in a TransformersEngine."""

    def __init__(self, **arguments: Any) -> None:
        self.spec = EngineSpec("anyengine.engines.transformers:TransformersEngine", {"model": "default", **arguments})

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        from anyengine.engines.transformers import default_model

        directory = default_model(lambda stage, fraction=None: None)  # returns at once: the engine has converted it
        return Tokenizer.from_file(str(directory / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        """By the model's tokenizer."""
        return self._tokenizer.encode(text).ids

    def decoder(self) -> Decoder:
        """By the tokenizers' incremental decoding: a character comes when its last token has come."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)
        return lambda token_ids: "".join(stream.step(self._tokenizer, token) or "" for token in token_ids)


class ScriptedModel:
    """A ScriptedEngine: its tokens are the bytes of one sentence, one every 20 ms, over and over."""

    SENTENCE = b" a scripted engine recites this sentence to everybody, one byte at a time, again and again,"

    def __init__(self, **arguments: Any) -> None:
        script = {"script": list(self.SENTENCE * 10), "step_delay": 0.02, "max_model_len": 4096}
        self.spec = EngineSpec("anyengine.engines.scripted:ScriptedEngine", {**script, **arguments})

    def encode(self, text: str) -> list[int]:
        """Bytes."""
        return list(text.encode())

    def decoder(self) -> Decoder:
        """Bytes."""
        return lambda token_ids: bytes(token_ids).decode("ascii")


def parser(description: str | None, backends: Sequence[str] = ("asyncio", "trio")) -> argparse.ArgumentParser:
    """The options of every example; the first backend is the default."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--backend", choices=backends, default=backends[0])
    default = os.environ.get("ANYENGINE_EXAMPLE_ENGINE", "default")
    options.add_argument("--engine", choices=("default", "scripted"), default=default)
    return options


def model(engine: str, **arguments: Any) -> Model:
    """The model that ``--engine`` names, with more arguments for its engine."""
    return ScriptedModel(**arguments) if engine == "scripted" else DefaultModel(**arguments)


def show_progress(stage: str, fraction: float | None) -> None:
    """For ``open_engine_client(on_progress=...)``: say when a stage of loading ends."""
    if fraction == 1.0:
        print(f"[{stage}: done]", flush=True)


async def until_idle(client: EngineClient) -> None:
    """Wait for the engine's own figures to say that nothing runs: it sends them once a second, and when it is idle."""
    with anyio.fail_after(10):
        while client.statistics().engine.get("running"):  # noqa: ASYNC110
            await anyio.sleep(0.02)
