"""Knowing each worker process of vLLM from its first moment, and what it raises before it is ready.

vLLM's executor tells of its workers when all are ready. Of one that is not it says that there is a stack trace
somewhere.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import sys
from collections.abc import Generator
from multiprocessing.connection import Connection
from typing import Any

from anyengine.engine.failures import message_of, name_of
from anyengine.engines.vllm.installed import find
from anyengine.engines.vllm.workers import WorkerWatch

_MODULE = "vllm.v1.executor.multiproc_executor"
_MESSAGE_LIMIT = 4000


@contextlib.contextmanager
def spawned_workers(watch: WorkerWatch) -> Generator[None]:
    """Have each worker process that vLLM starts in the block watched, before the next is started.

    With it comes the end of a pipe: a message is what the worker raised while it started, in UTF-8. The pipe ends when
    the worker is ready, or is no more.

    If loading fails in this process, vLLM ends the workers before the error gets out. That they end is not the reason
    then, and the watch is told before they do.
    """
    module = sys.modules.get(_MODULE)
    if module is None:  # the executor is another one
        yield
        return
    worker_proc: Any = module.WorkerProc
    executor: Any = module.MultiprocExecutor
    make, main = worker_proc.make_worker_process, worker_proc.worker_main
    end: Any = getattr(executor, "_ensure_worker_termination", None)  # private, and nothing is lost but a better error

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
        watch.add(handle.proc, receiver)
        return handle

    def tell_and_end(workers: Any) -> None:
        watch.workers_end()
        end(workers)

    worker_proc.make_worker_process = staticmethod(make_and_tell)
    if end is not None:
        executor._ensure_worker_termination = staticmethod(tell_and_end)
    try:
        yield
    finally:
        worker_proc.make_worker_process = staticmethod(make)
        if end is not None:
            executor._ensure_worker_termination = staticmethod(end)


def run_worker(sender: Connection, **kwargs: Any) -> None:
    """What a spawned worker runs: vLLM's own, which would keep to itself what it raises before it is ready."""
    worker_proc = find(f"{_MODULE}:WorkerProc")
    start = worker_proc.__init__

    def start_and_tell(self: Any, *args: Any, **kwargs: Any) -> None:
        with sender:
            try:
                start(self, *args, **kwargs)
            except BaseException as error:  # a SystemExit, too: its process may take long to end
                message = f"{name_of(error)}: {message_of(error)}"
                with contextlib.suppress(OSError):  # nobody waits for it any more
                    sender.send_bytes(message[:_MESSAGE_LIMIT].encode(errors="replace"))
                raise

    worker_proc.__init__ = start_and_tell
    worker_proc.worker_main(**kwargs)
