"""The SSE frontend on asyncio, served by uvicorn.

    python examples/sse_asyncio.py [--port 8000] [--engine default|scripted]
    curl -N http://127.0.0.1:8000/generate -d '{"prompt": "Once upon a time", "max_tokens": 32}'

What to see: the same as with sse_trio.py, and how little differs.
"""

import contextlib
from collections.abc import Generator

import anyio
import uvicorn

from _common import model, parser
from anyengine import open_engine_client
from sse_app import Shutdown, listen, make_app


class Server(uvicorn.Server):
    """A server that leaves the signals to us.

    uvicorn's own handler would raise the signal once more when the server has ended, before the client's block is left.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Around ``serve``: do nothing."""
        yield

    async def end_after(self, requested: anyio.Event) -> None:
        """Have the server end in good order when the event is set."""
        await requested.wait()
        self.should_exit = True


async def main(engine: str, port: int) -> None:
    smol, shutdown, listener = model(engine), Shutdown(), listen(port)
    async with anyio.create_task_group() as group:
        group.start_soon(shutdown.watch, group.cancel_scope)
        async with open_engine_client(smol.spec) as client:
            shutdown.serving = True
            app = make_app(client, smol, ending=shutdown.requested)
            server = Server(uvicorn.Config(app, lifespan="off", timeout_graceful_shutdown=1))
            group.start_soon(server.end_after, shutdown.requested)
            await server.serve(sockets=[listener])
        group.cancel_scope.cancel()


if __name__ == "__main__":
    arguments = parser(__doc__, backends=("asyncio",))
    arguments.add_argument("--port", type=int, default=8000)
    options = arguments.parse_args()
    anyio.run(main, options.engine, options.port)
