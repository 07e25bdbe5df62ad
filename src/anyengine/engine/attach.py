"""``python -m anyengine.engine.attach``: an engine that is started by hand and serves clients which come and go.

It loads at once, then says HELLO at each address and serves whoever listens there, as often as somebody does, until a
signal ends it. What it has to say to people goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import zmq

from anyengine.addresses import check_address
from anyengine.engine import contract
from anyengine.engine.core import EngineCore
from anyengine.engine.failures import message_of, name_of
from anyengine.engine.loading import build_engine
from anyengine.engine.proc import EngineCoreProc, Terminated
from anyengine.errors import AddressError, KeysError
from anyengine.keys import ConnectionKeys
from anyengine.keywords import did_you_mean
from anyengine.system_calls import check_calls_of_zmq
from anyengine.thread_limits import ZMQ_THREADS, check_threads
from anyengine.types import EngineSpec

logger: logging.Logger = logging.getLogger("anyengine")


def main(words: Sequence[str] | None = None) -> int:
    """Run one engine. The exit code is 0 after SIGTERM, 130 after Ctrl-C, 1 if it failed, 2 for bad arguments."""
    arguments = _parse(words)
    logging.basicConfig(level=logging.WARNING, format=f"[engine {arguments.rank}] %(message)s")
    logger.setLevel(logging.INFO)
    with contextlib.suppress(OSError):  # a sandbox refuses an alternate stack
        faulthandler.enable()
    signal.signal(signal.SIGTERM, _terminate)
    context: zmq.Context[Any] = zmq.Context()
    proc: EngineCoreProc | None = None
    try:
        # Before loading, which may take minutes.
        keys = None if arguments.keys is None else ConnectionKeys.load(arguments.keys)
        for address in arguments.connect:
            check_address(address, keys=keys is not None)
        core = _build(arguments.spec, dict(arguments.arguments))
        core.owns_process = True
        contract.load(core, _Progress())
        check_calls_of_zmq()
        check_threads(ZMQ_THREADS)
        proc = EngineCoreProc(None, context, rank=arguments.rank, engine=core)
        signal.signal(signal.SIGTERM, proc.terminate)
        for address in arguments.connect:
            proc.connect_client(address, arguments.keys)
            logger.info("ready; serves who listens at %s", address)
        proc.run()
    except (AddressError, KeysError, _WrongSpec) as error:
        sys.stderr.write(f"anyengine engine: {error}\n")
        return 2
    except ModuleNotFoundError as error:
        sys.stderr.write(f"anyengine engine: {error}\n")
        return 1
    except (KeyboardInterrupt, Terminated) as error:
        if proc is not None:
            proc.say_goodbye()
        return 130 if isinstance(error, KeyboardInterrupt) else 0
    except Exception as error:
        logger.exception("the engine failed")
        if proc is not None:
            proc.announce_death(error)
        return 1
    finally:
        context.term()
    return 0


class _WrongSpec(Exception):
    """There is no such engine, or it refuses its arguments."""


def _build(path: str, arguments: Mapping[str, Any]) -> EngineCore:
    """The engine. What it raises while it is constructed is about its arguments, which somebody has typed here.

    :raises _WrongSpec: if there is no such engine, or it refuses its arguments
    :raises Exception: what else constructing it raised
    """
    try:
        return build_engine(path, arguments)
    except (ImportError, AttributeError, TypeError, ValueError, OSError) as error:
        raise _WrongSpec(f"{name_of(error)}: {message_of(error)}") from error


class _Progress:
    def __init__(self) -> None:
        self._stage = ""

    def __call__(self, stage: str, fraction: float | None = None) -> None:
        if stage != self._stage:
            self._stage = stage
            logger.info("%s ...", stage)


_OPTIONS = ("--connect", "--keys", "--rank", "--help")


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="anyengine engine", description="Run an engine that clients attach to.", allow_abbrev=False
    )
    parser.add_argument("spec", metavar="SPEC", type=_spec, help="the engine's import path, package.module:Class")
    parser.add_argument(
        "arguments", metavar="NAME=VALUE", nargs="*", type=_argument, help="its arguments; values are JSON or text"
    )
    parser.add_argument(
        "--connect",
        metavar="ADDRESS",
        action="append",
        required=True,
        help="where a client listens: tcp://HOST:PORT or ipc:///PATH; can be repeated",
    )
    parser.add_argument("--keys", metavar="FILE", help="the file of keys that the client has too; needed for TCP")
    parser.add_argument("--rank", type=int, default=0, help="the engine's number among those of one client")
    # Before all else, for argparse would first miss whatever a misspelt option was to give.
    for option in (word.partition("=")[0] for word in (sys.argv[1:] if words is None else words)):
        if option.startswith("--") and option not in _OPTIONS:
            parser.error(f"there is no option {option}{did_you_mean(option, _OPTIONS)}")
    return parser.parse_intermixed_args(words)  # so that options may stand between


def _spec(text: str) -> str:
    try:
        return EngineSpec(text).path
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} does not have the form package.module:Class") from None


def _argument(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated(128 + number)


if __name__ == "__main__":
    sys.exit(main())
