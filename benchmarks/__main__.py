"""``python -m benchmarks``: measure, print one table, and write ``build/bench.json``.

Targets stand beside the figures and are not asserted: what else a machine does moves absolute figures. Ratios are
medians over rounds in which the rivals took turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from benchmarks.contest import Contestant
from benchmarks.report import Figure, print_table
from benchmarks.suites import FULL, QUICK, SUITES

OUTPUT = Path("build/bench.json")
_BACKENDS = ("asyncio", "uvloop", "trio")
_PACKAGES = ("anyengine", "anyio", "trio", "uvloop", "pyzmq", "cbor2", "msgspec")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and steps")
    parser.add_argument("--only", action="append", choices=list(SUITES), help="this suite alone; can be repeated")
    parser.add_argument("--backends", default=",".join(_BACKENDS), help="event loops, separated by commas")
    arguments = parser.parse_args()
    backends = arguments.backends.split(",")
    for backend in backends:
        if backend not in _BACKENDS:
            parser.error(f"unknown event loop {backend!r}; there are {', '.join(_BACKENDS)}")
        if backend != "asyncio" and importlib.util.find_spec(backend) is None:
            parser.error(f"{backend} is not installed")
    started = time.perf_counter()
    scale = QUICK if arguments.quick else FULL
    figures: list[Figure] = []
    with ExitStack() as stack:
        contestants = [stack.enter_context(Contestant("ours", backend)) for backend in backends]
        contestants += [
            stack.enter_context(Contestant("baseline", backend)) for backend in backends if backend != "trio"
        ]
        for name, suite in SUITES.items():
            if arguments.only is None or name in arguments.only:
                figures += suite(contestants, scale)
        keys = [contestant.key for contestant in contestants]
    machine = f"{os.cpu_count()} CPUs, {platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    print_table(figures, keys, f"anyengine and a lean client of the usual shape, on {machine}")
    missed = [(figure.name, target.text) for figure in figures for target in figure.targets if not target.met]
    print(f"{len(missed)} targets missed; {time.perf_counter() - started:.0f} s; details in {OUTPUT}")
    OUTPUT.parent.mkdir(exist_ok=True)
    document = {
        "machine": machine,
        "quick": arguments.quick,
        "versions": {name: version(name) for name in _PACKAGES if importlib.util.find_spec(_module(name))},
        "figures": [figure.as_json() for figure in figures],
    }
    OUTPUT.write_text(json.dumps(document, indent=1) + "\n")


def _module(package: str) -> str:
    return "zmq" if package == "pyzmq" else package


if __name__ == "__main__":
    main()
