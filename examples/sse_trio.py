"""The SSE frontend on trio, served by anycorn.

    python examples/sse_trio.py [--port 8000] [--engine default|scripted]
    curl -N http://127.0.0.1:8000/generate -d '{"prompt": "Once upon a time", "max_tokens": 32}'

What to see: the server runs inside the engine client's block, in a task group of ours. Press Ctrl-C in curl: the slot
is free at once (curl http://127.0.0.1:8000/statistics). Press it here: open streams end with an error event,
then the server, the client and the engine's process end one after the other.
"""

import anycorn
import anyio

from _common import model, parser
from anyengine import open_engine_client
from sse_app import Shutdown, listen, make_app


async def main(engine: str, port: int) -> None:
    smol, shutdown = model(engine), Shutdown()
    config = anycorn.Config()
    config.bind = [f"fd://{listen(port).detach()}"]
    config.graceful_timeout = 1.0
    async with anyio.create_task_group() as group:
        group.start_soon(shutdown.watch, group.cancel_scope)
        async with open_engine_client(smol.spec) as client:
            app = make_app(client, smol, ending=shutdown.requested)
            shutdown.serving = True
            await anycorn.serve(app, config, shutdown_trigger=shutdown.requested.wait, mode="asgi")
        group.cancel_scope.cancel()


if __name__ == "__main__":
    arguments = parser(__doc__, backends=("trio", "asyncio"))  # anycorn runs on both
    arguments.add_argument("--port", type=int, default=8000)
    options = arguments.parse_args()
    anyio.run(main, options.engine, options.port, backend=options.backend)
