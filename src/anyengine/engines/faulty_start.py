"""``python -m anyengine.engines.faulty_start``: an engine's process that fails before it could load any engine.

For tests of the start: :func:`anyengine.testing.faulty_launcher` runs it in place of ``anyengine.engine`` and names the
fault in the environment.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any, Literal

import zmq

from anyengine.engine import lifeline
from anyengine.protocol.handshake import Hello
from anyengine.protocol.messages import PROTOCOL_VERSION

StartFault = Literal["raise", "exit", "kill", "hang", "hang_after_hello", "other_version", "wrong_token"]
VARIABLE = "ANYENGINE_START_FAULT"


def main(lifeline_fd: int, bootstrap_fd: int) -> None:
    """Read the bootstrap record as an engine would, then fail."""
    lifeline.arm(lifeline_fd)
    bootstrap = lifeline.read_bootstrap(bootstrap_fd)
    fault = os.environ[VARIABLE]
    print(f"about to fail: {fault}", file=sys.stderr, flush=True)  # noqa: T201 - the last words of the process
    if fault == "raise":
        raise RuntimeError("failed before HELLO, as it was told to")
    if fault == "exit":
        os._exit(0)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault != "hang":
        version = PROTOCOL_VERSION + 1 if fault == "other_version" else PROTOCOL_VERSION
        token = b"guessed" if fault == "wrong_token" else bootstrap.token
        context: zmq.Context[Any] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, bootstrap.rank.to_bytes(2, "little"))
        dealer.connect(bootstrap.address)
        dealer.send_multipart(Hello(version, token, os.getpid(), bootstrap.rank).encode())
    time.sleep(3600)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
