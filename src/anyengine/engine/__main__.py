"""``python -m anyengine.engine``: the engine's process. Its parent starts it and writes its bootstrap record.

The arguments are four inherited file descriptors: the lifeline, the file with the bootstrap record, and two files in
which the parent finds the Python exception and the native stack if this process crashes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
from types import FrameType
from typing import Any

import zmq

from anyengine.engine import lifeline
from anyengine.engine.failures import describe_failure
from anyengine.engine.proc import EngineCoreProc, Terminated
from anyengine.protocol import cbor
from anyengine.system_calls import check_calls_of_zmq
from anyengine.thread_limits import ZMQ_THREADS, check_threads


def main(lifeline_fd: int, bootstrap_fd: int, exception_fd: int, native_fd: int) -> None:
    """Run one engine and end the process."""
    # Ctrl-C in a terminal is the parent's to answer: it decides the order in which things end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _terminate)
    _reset_signals()
    lifeline.arm(lifeline_fd)
    bootstrap = lifeline.read_bootstrap(bootstrap_fd)
    for fd in (exception_fd, native_fd):
        os.set_inheritable(fd, False)
    with contextlib.suppress(OSError):  # a sandbox refuses an alternate stack: reports come without native ones
        faulthandler.enable(file=native_fd, all_threads=True)
    _name_process(f"anyengine-{bootstrap.rank}")
    logging.basicConfig(level=logging.WARNING, format=f"[engine {bootstrap.rank}] %(levelname)s %(name)s: %(message)s")
    context: zmq.Context[Any] = zmq.Context()
    proc: EngineCoreProc | None = None
    code = 0
    try:
        check_calls_of_zmq()
        check_threads(ZMQ_THREADS)
        proc = EngineCoreProc(bootstrap, context)
        proc.run()
    except Terminated:
        if proc is not None:
            proc.say_goodbye()
        code = 128 + signal.SIGTERM
    except BaseException as error:
        try:
            _report(error, proc, context, exception_fd)
        finally:
            # Whatever else this process has (threads, atexit hooks) belongs to an engine in an unknown state.
            os._exit(1)
    context.term()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # shutdown() has freed what must not stay. Taking the interpreter apart with torch in it would take most of a second
    # more, in which nothing of use happens.
    os._exit(code)


def _reset_signals() -> None:
    """Undo what the application has blocked or ignored: a process inherits both, and this one is to end by SIGTERM.

    An engine that starts processes waits for them, too, which does not work while SIGCHLD is ignored.
    """
    by_python = (signal.SIGPIPE, signal.SIGXFSZ)
    for number in signal.valid_signals():
        if number not in (signal.SIGINT, *by_python) and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _report(error: BaseException, proc: EngineCoreProc | None, context: zmq.Context[Any], exception_fd: int) -> None:
    failure = describe_failure(error)
    os.write(exception_fd, cbor.encode_plain(list(failure)))
    sys.stderr.write(failure[2])
    sys.stderr.flush()
    if proc is not None:
        proc.announce_death(error)
    context.term()


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated(128 + number)


def _name_process(name: str) -> None:
    try:
        with open("/proc/self/comm", "w") as comm:
            comm.write(name)
    except OSError:
        pass  # a name for people who look at ps, not more


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
