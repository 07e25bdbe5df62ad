"""A plain script: no event loop, no coroutine, no guard around its main part.

    python examples/sync_generate.py [--backend trio|asyncio] [--engine default|scripted]

What to see: a whole completion, a stream whose pieces are printed as they come, and four requests at once whose
completions come as they end. All of it are blocking calls, and Ctrl-C ends any of them: the request is aborted in the
engine, and the block takes the engine with it.
"""

from _common import ending_on_ctrl_c, model, parser, show_progress
from anyengine import SamplingParams, open_sync_engine_client

options = parser(__doc__).parse_args()
smol = model(options.engine)
sampling = SamplingParams(max_tokens=24, temperature=0.0)

with (
    ending_on_ctrl_c(),
    open_sync_engine_client(smol.spec, backend=options.backend, on_progress=show_progress) as client,
):
    print(f"The sea is{smol.text.generate_sync(client, 'The sea is', sampling).text}")

    print("Once upon a time", end="")
    with smol.text.open_sync_stream(client, "Once upon a time", sampling) as stream:
        for output in stream:
            print(output.text, end="", flush=True)
    print(f"\n[finished: {output.finish_reason}]")

    subjects = ("Rivers", "Bread", "Glass", "Winter")
    prompts = (smol.text.encode(f"{subject} can be") for subject in subjects)
    for index, result in client.generate_many(prompts, sampling):
        if isinstance(result, Exception):
            print(f"{subjects[index]}: {result}")
        else:
            print(f"{subjects[index]} can be{smol.text.decode(result.token_ids)}")
