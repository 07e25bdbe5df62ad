"""Embeddings: vLLM pools what a model makes of a text into one vector, and similar texts have similar vectors.

    python examples/vllm_embeddings.py [--backend trio|asyncio] [--model MODEL]

Needs vLLM; see vllm_trio.py. What to see: four sentences are one batch, and each comes back as a vector of length 1, as
a tensor. The table holds their cosines: the two about the cat are closest. The default model was made to answer, and
finds all prose alike; one that was made for embeddings, given as --model, tells the others apart much better.
"""

import argparse

import anyio
import torch

from anyengine import EngineClient, EngineSpec, PoolingParams, open_engine_client
from anyengine.text import ModelText

# Any model that generates can be asked for embeddings: with "convert" vLLM takes the hidden state of the last token.
EMBED = {"runner": "pooling", "convert": "embed", "max_model_len": 512, "max_num_seqs": 16, "enforce_eager": True}
SENTENCES = (
    "The cat sleeps on the warm stove.",
    "A cat is sleeping on a warm oven.",
    "Interest rates rose by half a per cent.",
    "def add(a, b): return a + b",
)


async def embed(client: EngineClient, prompts: list[list[int]]) -> torch.Tensor:
    """One row for each prompt."""
    rows: list[torch.Tensor] = [torch.empty(0)] * len(prompts)

    async def one(number: int) -> None:
        completion = await client.encode(prompts[number], PoolingParams(task="embed"))
        rows[number] = completion.pooling_output

    async with anyio.create_task_group() as group:
        for number in range(len(prompts)):
            group.start_soon(one, number)
    return torch.stack(rows)


async def main(model: str) -> None:
    spec = EngineSpec("anyengine.engines.vllm:VllmEngine", {"model": model, **EMBED})
    async with open_engine_client(spec) as client:
        print(f"tasks: {', '.join(client.info.supported_tasks)}")
        text = await ModelText.load(model)  # when the engine is ready: its first start makes the default model
        vectors = await embed(client, [text.encode(sentence) for sentence in SENTENCES])
    print(f"{len(vectors)} vectors of {vectors.shape[1]} numbers, {vectors.dtype}")
    for sentence, row in zip(SENTENCES, (vectors @ vectors.T).tolist(), strict=True):
        print(" ".join(f"{cosine:5.2f}" for cosine in row), "", sentence)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="default", help="the directory of a model; default: SmolLM2-135M-Instruct")
    options.add_argument("--backend", choices=("trio", "asyncio"), default="trio")
    chosen = options.parse_args()
    anyio.run(main, chosen.model, backend=chosen.backend)
