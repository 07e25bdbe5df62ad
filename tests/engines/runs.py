"""Running requests on a transformers engine that is stepped in this process."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from anyengine.engine.core import EngineRequest
from anyengine.engines.transformers import TransformersEngine
from anyengine.params import SamplingParams
from anyengine.types import TokenLogprobs

MIB = 2**20
THREADS = 1  # more would have to wait for each other whenever another process is busy

_handles = itertools.count(1)


@dataclasses.dataclass
class Outcome:
    """All that came of one request."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None


class Run:
    """Requests of one engine, and what has come of them."""

    def __init__(self, engine: TransformersEngine, requests: Iterable[tuple[Sequence[int], SamplingParams]]) -> None:
        self.engine = engine
        self.outcomes: dict[int, Outcome] = {}
        for prompt, params in requests:
            self.add(prompt, params)

    def add(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Send a request; its handle."""
        handle = next(_handles)
        self.engine.add_request(
            EngineRequest(handle=handle, prompt_token_ids=prompt, prompt_embeds=None, sampling=params)
        )
        self.outcomes[handle] = Outcome()
        return handle

    def step(self) -> None:
        """Make one step."""
        outputs = self.engine.step()
        for handle, tokens, details in [] if outputs is None else outputs.rows():
            outcome = self.outcomes[handle]
            assert outcome.finish_reason is None
            outcome.tokens += tokens
            if details is not None:
                outcome.finish_reason = details.finish_reason
                if details.prompt_logprobs is not None:
                    assert outcome.prompt_logprobs is None, "they came twice"
                    outcome.prompt_logprobs = list(details.prompt_logprobs)

    def finish(self) -> list[Outcome]:
        """Step until nothing is left to do; what came of each request, in the order in which they were sent."""
        while self.engine.has_work():
            self.step()
        assert self.engine.statistics()["kv_blocks_used"] == 0
        return list(self.outcomes.values())


def tokens_of(engine: TransformersEngine, requests: Iterable[tuple[Sequence[int], SamplingParams]]) -> list[list[int]]:
    """Run requests together, to their ends."""
    return [outcome.tokens for outcome in Run(engine, requests).finish()]


def load(directory: Path, **arguments: Any) -> TransformersEngine:
    """An engine on the CPU, in float32 unless told otherwise."""
    arguments = {"dtype": "float32", "kv_cache_bytes": 64 * MIB} | arguments
    engine = TransformersEngine(model=str(directory), device="cpu", num_threads=THREADS, **arguments)
    engine.load(lambda stage, fraction=None: None)
    return engine


def save_tiny(directory: Path, **options: Any) -> Path:
    """A small random model, with tied embeddings unless told otherwise."""
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **{"vocab_size": 97, "max_position_embeddings": 128, "tie_word_embeddings": True, **shape, **options},
        initializer_range=0.4,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def save_stand_in(directory: Path) -> Path:
    """A random model with the default model's vocabulary and end, and a hundredth of its arithmetic.

    Its greedy tokens do not repeat themselves as those of a trained model do, so that none comes out right by luck.
    """
    return save_tiny(
        directory,
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
    )
