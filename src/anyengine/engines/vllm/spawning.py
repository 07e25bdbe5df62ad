"""Knowing each worker process of vLLM from its first moment, and what it raises before it is ready.

vLLM's executor tells of its workers when all are ready. Of one that is not it says that there is a stack trace
somewhere.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from anyengine.engines.vllm.installed import find

_MODULE = "vllm.v1.executor.multiproc_executor"
_MESSAGE_LIMIT = 4000


@contextmanager
def spawned_workers(on_worker: Callable[[BaseProcess, Connection], None]) -> Generator[None]:
    """Have ``on_worker`` called with each worker process that vLLM starts in the block, before the next is started.

    With it comes the end of a pipe: a message is what the worker raised while it started, in UTF-8. The pipe ends when
    the worker is ready, or is no more.
    """
    module = sys.modules.get(_MODULE)
    if module is None:  # the executor is another one
        yield
        return
    worker_proc: Any = module.WorkerProc
    make, main = worker_proc.make_worker_process, worker_proc.worker_main

    def make_and_tell(*args: Any, **kwargs: Any) -> Any:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        with sender:
            if module.get_mp_context().get_start_method() == "spawn":
                worker_proc.worker_main = staticmethod(functools.partial(run_worker, sender))
            try:
                handle = make(*args, **kwargs)
            except BaseException:
                receiver.close()
                raise
            finally:
                worker_proc.worker_main = staticmethod(main)
        on_worker(handle.proc, receiver)
        return handle

    worker_proc.make_worker_process = staticmethod(make_and_tell)
    try:
        yield
    finally:
        worker_proc.make_worker_process = staticmethod(make)


def run_worker(sender: Connection, **kwargs: Any) -> None:
    """What a spawned worker runs: vLLM's own, which would keep to itself what it raises before it is ready."""
    worker_proc = find(f"{_MODULE}:WorkerProc")
    start = worker_proc.__init__

    def start_and_tell(self: Any, *args: Any, **kwargs: Any) -> None:
        with sender:
            try:
                start(self, *args, **kwargs)
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
                sender.send_bytes(message[:_MESSAGE_LIMIT].encode(errors="replace"))
                raise

    worker_proc.__init__ = start_and_tell
    worker_proc.worker_main(**kwargs)
