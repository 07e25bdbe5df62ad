"""Seeing to it that nothing of vLLM is left on the host, however the engine's process ends."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anyengine.directories import PrivateDirectory

_LONGEST_BASE = 46
"""Bytes that the path of the directory may have around it: a socket's path, with a UUID as its name, has to fit 107."""

_children: list[subprocess.Popen[bytes]] = []


@contextmanager
def scratch_directory() -> Generator[Path]:
    """A private directory for as long as the block lasts.

    If this process is killed in it, the next client of this user sweeps the directory away: it has the name and the
    lock of a client's directory for sockets.
    """
    directory = PrivateDirectory(_LONGEST_BASE)
    try:
        yield directory.path
    finally:
        directory.close()


@contextmanager
def files_in(directory: Path, config: Any) -> Generator[None]:
    """Have vLLM make its files for sockets and for the rendezvous of workers in ``directory``.

    They are only needed until all workers have found each other, but vLLM leaves them in the directory of temporary
    files: the sockets always, the other when it is killed. On the CPU its workers also share memory under the name of
    their rendezvous, which stays when one of them is killed; all of them have it by the end of the block.

    A connector for KV caches or encodings may make sockets later, in workers that have their environment for good. With
    one, ``config`` being vLLM's, all sockets are where vLLM would have them.
    """
    network: Any = importlib.import_module("vllm.utils.network_utils")
    files = getattr(network, "tempfile", None)
    if files is not None:  # before 0.28 the workers met at a port
        network.tempfile = SimpleNamespace(gettempdir=lambda: str(directory))
    has_connector = config.kv_transfer_config is not None or getattr(config, "ec_transfer_config", None) is not None
    try:
        with contextlib.nullcontext() if has_connector else _sockets_in(directory):
            yield
    finally:
        for rendezvous in directory.glob("vllm_dist_*"):
            for segment in Path("/dev/shm").glob(f"{rendezvous.name}*"):  # noqa: S108 - where shm_open has its names
                segment.unlink(missing_ok=True)
        if files is not None:
            network.tempfile = files


@contextmanager
def _sockets_in(directory: Path) -> Generator[None]:
    envs: Any = importlib.import_module("vllm.envs")
    base = os.environ.get("VLLM_RPC_BASE_PATH")
    os.environ["VLLM_RPC_BASE_PATH"] = str(directory)
    envs.disable_envs_cache()  # of another engine in this process
    try:
        yield
    finally:
        if base is None:
            del os.environ["VLLM_RPC_BASE_PATH"]
        else:
            os.environ["VLLM_RPC_BASE_PATH"] = base
        # An engine core that is made reads its environment for the last time: it would keep the directory.
        envs.disable_envs_cache()
    envs.enable_envs_cache()


def start_resource_tracker() -> None:
    """Start Python's resource tracker so that it outlives this process's group.

    It removes shared memory and semaphores that processes leave which are killed, as soon as the last of them is gone.
    In the group of an engine that is killed as a whole, it would be killed with it.
    """
    if os.getpgrp() != os.getpid():
        return  # not an engine's own process: nobody kills this group

    def spawn(path: Any, args: Sequence[Any], pass_fds: Sequence[int]) -> int:
        # What it removes it would also complain about.
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        child = subprocess.Popen(args, executable=path, pass_fds=pass_fds, process_group=0, env=environment)
        _children.append(child)  # it ends after this process, which must not wait for it
        return child.pid

    module: Any = util
    original, module.spawnv_passfds = module.spawnv_passfds, spawn
    try:
        resource_tracker.ensure_running()
    finally:
        module.spawnv_passfds = original
