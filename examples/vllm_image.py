"""A question about an image, to a vision model in vLLM.

    python examples/vllm_image.py [--question TEXT] [--backend trio|asyncio] MODEL IMAGE

Needs vLLM; see vllm_trio.py. MODEL is the directory of a vision model that vLLM supports. What to see: vLLM's own
processor turns the chat and the image into token ids and features, in this process and off the event loop, and the
answer comes as text.
"""

import argparse

import anyio
from anyio import to_thread
from PIL import Image
from transformers import AutoProcessor

from anyengine import EngineSpec, SamplingParams, open_engine_client
from anyengine.engines.vllm.inputs import VllmInputs
from anyengine.text import ModelText

SMALL = {"max_model_len": 4096, "max_num_seqs": 4, "max_num_batched_tokens": 4096, "enforce_eager": True}


def chat_of(model: str, question: str) -> str:
    """The text of a chat with an image, by the model's own template."""
    content = [{"type": "image"}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    return AutoProcessor.from_pretrained(model).apply_chat_template(messages, add_generation_prompt=True)


async def main(model: str, path: str, question: str) -> None:
    spec = EngineSpec("anyengine.engines.vllm:VllmEngine", {"model": model, **SMALL})
    text = await ModelText.load(model)
    inputs = await VllmInputs.load(**spec.arguments)
    prompt = await to_thread.run_sync(chat_of, model, question)
    image = await to_thread.run_sync(Image.open, path)
    token_ids, features = await inputs.process({"prompt": prompt, "multi_modal_data": {"image": image}})
    for feature in features:
        print(f"{feature.modality}: {feature.length} of {len(token_ids)} tokens, from {feature.offset} on", flush=True)

    async with open_engine_client(spec) as client:
        params = SamplingParams(max_tokens=60, temperature=0.0)
        async with text.open_stream(client, token_ids, params, features=features) as stream:
            async for output in stream:
                print(output.text, end="", flush=True)
    print()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", help="the directory of a vision model")
    options.add_argument("image", help="a file with an image")
    options.add_argument("--question", default="What is in this image?")
    options.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    given = options.parse_args()
    anyio.run(main, given.model, given.image, given.question, backend=given.backend)
