"""What the examples share: their options, and an engine together with its text.

Each example runs the real default model; with ``--engine scripted`` (or ``ANYENGINE_EXAMPLE_ENGINE=scripted``) it runs
an engine that needs no model and recites one sentence over and over, whatever it is asked.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Generator, Sequence
from typing import Any, Protocol

import anyio
from tokenizers import Tokenizer, decoders, models

from anyengine import EngineClient, EngineSpec
from anyengine.text import ModelText


class Model(Protocol):
    """An engine, and the tokenizer that belongs to it."""

    spec: EngineSpec

    @property
    def text(self) -> ModelText:
        """Use it when the engine is ready: its first start makes the tokenizer's file."""
        ...


class DefaultModel:
    """SmolLM2-135M-Instruct in a TransformersEngine."""

    def __init__(self, **arguments: Any) -> None:
        self.spec = EngineSpec("anyengine.engines.transformers:TransformersEngine", {"model": "default", **arguments})

    @functools.cached_property
    def text(self) -> ModelText:
        """The model's own tokenizer and chat template."""
        return ModelText.load_sync("default")


class ScriptedModel:
    """A ScriptedEngine: its tokens are the bytes of one sentence, one every 20 ms, over and over."""

    SENTENCE = b" a scripted engine recites this sentence to everybody, one byte at a time, again and again,"

    def __init__(self, **arguments: Any) -> None:
        script = {"script": list(self.SENTENCE * 10), "step_delay": 0.02, "max_model_len": 4096}
        self.spec = EngineSpec("anyengine.engines.scripted:ScriptedEngine", {**script, **arguments})

    @functools.cached_property
    def text(self) -> ModelText:
        """Bytes as tokens, and of a chat the last message."""
        vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        return ModelText(tokenizer, chat_templates={"default": "{{ messages[-1].content }}"})


def parser(description: str | None, backends: Sequence[str] = ("asyncio", "trio")) -> argparse.ArgumentParser:
    """The options of every example; the first backend is the default."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--backend", choices=backends, default=backends[0])
    default, engines = os.environ.get("ANYENGINE_EXAMPLE_ENGINE", "default"), ("default", "scripted")
    if default not in engines:  # argparse checks no defaults
        options.error(f"ANYENGINE_EXAMPLE_ENGINE={default!r}: expected {' or '.join(engines)}")
    options.add_argument("--engine", choices=engines, default=default)
    return options


def model(engine: str, **arguments: Any) -> Model:
    """The model that ``--engine`` names, with more arguments for its engine."""
    return ScriptedModel(**arguments) if engine == "scripted" else DefaultModel(**arguments)


def show_progress(stage: str, fraction: float | None) -> None:
    """For ``open_engine_client(on_progress=...)``: say when a stage of loading ends."""
    if fraction == 1.0:
        print(f"[{stage}: done]", flush=True)


@contextlib.contextmanager
def ending_on_ctrl_c() -> Generator[None]:
    """Around all that a program does: Ctrl-C ends it with exit code 130, as shells expect, and without a traceback."""
    interrupted = False
    try:
        yield
    except* KeyboardInterrupt:  # by itself, or in the group of a nursery
        interrupted = True
    if interrupted:
        sys.exit(130)


async def until_idle(client: EngineClient) -> None:
    """Wait for the engine's own figures to say that nothing runs: it sends them once a second, and when it is idle."""
    with anyio.fail_after(10):
        while client.statistics().engine.get("running"):  # noqa: ASYNC110
            await anyio.sleep(0.02)
