"""Answers of a given shape: vLLM lets only tokens through that fit a JSON schema, a regex, a choice or a grammar.

    python examples/vllm_structured.py [--backend trio|asyncio] [--model MODEL]

Needs vLLM; see vllm_trio.py. What to see: four requests run in one batch, each with a shape of its own, and each answer
has that shape, however small the model is. A shape that vLLM cannot compile is refused, for that request alone.
"""

import argparse

import anyio

from _vllm import SMALL, text_model
from anyengine import EngineClient, EngineSpec, RequestError, SamplingParams, StructuredOutputs, open_engine_client

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SHAPES = {
    "json": StructuredOutputs(json=PERSON),
    "regex": StructuredOutputs(regex=r"(Mon|Tues|Fri)day, \d\d:\d\d"),
    "choice": StructuredOutputs(choice=["positive", "neutral", "negative"]),
    "grammar": StructuredOutputs(grammar='root ::= number " + " number\nnumber ::= [1-9] [0-9]'),
    "broken": StructuredOutputs(json='{"type": "object"'),
}


async def ask(client: EngineClient, encode, decode, name: str, shape: StructuredOutputs) -> None:
    sampling = SamplingParams(max_tokens=80, temperature=0.0, structured_outputs=shape)
    try:
        completion = await client.generate(encode("Answer in the shape that was asked for:"), sampling)
    except RequestError as error:
        print(f"{name:8} refused: {str(error).splitlines()[0][:70]}", flush=True)
    else:
        print(f"{name:8} {decode(completion.token_ids)}", flush=True)


async def main(model: str) -> None:
    spec = EngineSpec("anyengine.engines.vllm:VllmEngine", {"model": model, **SMALL})
    async with open_engine_client(spec) as client:
        encode, decode = text_model(model)
        async with anyio.create_task_group() as group:
            for name, shape in SHAPES.items():
                group.start_soon(ask, client, encode, decode, name, shape)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="default", help="a directory or a name; default: SmolLM2-135M-Instruct")
    options.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    given = options.parse_args()
    anyio.run(main, given.model, backend=given.backend)
