"""One contestant of the sync client layer in a process of its own, without an event loop: a script, as it were."""

from __future__ import annotations

import gc
import sys
from typing import Any

from anyengine import open_sync_engine_client
from benchmarks import sync


def main(contestant: str, backend: str) -> None:
    """``contestant`` is ``ours`` or ``vllm``; ``backend`` is the event loop behind ours."""
    if contestant == "ours":
        ours = {"whole_steps": sync.whole_steps, "one_by_one": sync.one_by_one, "many": sync.many}
        with open_sync_engine_client(sync.ENGINE, backend=backend) as client:  # type: ignore[arg-type]
            gc.freeze()
            sync.serve_commands(ours, client, client.health().pid)
        return
    from benchmarks.vllm.rival import SyncRival

    theirs: dict[str, Any] = {
        "whole_steps": sync.whole_steps_of_baseline,
        "one_by_one": sync.one_by_one_of_baseline,
        "many": sync.many_of_baseline,
    }
    rival = SyncRival()
    gc.freeze()
    sync.serve_commands(theirs, rival, rival.process.pid)
    rival.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
