"""Addresses at which a client and engines that somebody else starts find each other."""

from __future__ import annotations

import os

from anyengine.brief import brief
from anyengine.errors import AddressError

LONGEST_PATH = 100
"""Bytes of an ipc path: the system allows 107, and the socket for outputs is bound beside it."""

_OUTPUTS = ".out"


def check_address(address: object, *, keys: bool) -> str:
    """``address`` itself, if it is ``tcp://HOST:PORT`` with keys or ``ipc:///PATH``.

    :raises TypeError: if it is not a string
    :raises AddressError: if it is malformed, has port 0, is too long, or is TCP without keys
    """
    if not isinstance(address, str):
        raise TypeError(f"address={brief(address)} ({type(address).__name__}): expected a string")
    scheme, separator, rest = address.partition("://")
    if scheme == "ipc" and separator:
        if not rest.startswith("/"):
            raise AddressError(f"address={brief(address)}: expected an absolute path, ipc:///run/engine")
        if len(os.fsencode(rest)) > LONGEST_PATH:
            raise AddressError(f"address={brief(address)}: the path may have {LONGEST_PATH} bytes at most")
        return address
    if scheme != "tcp" or not separator:
        raise AddressError(f"address={brief(address)}: expected tcp://HOST:PORT or ipc:///PATH")
    host, separator, port = rest.rpartition(":")
    if not separator or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise AddressError(f"address={brief(address)}: expected tcp://HOST:PORT with a port from 1 to 65535")
    if not keys:
        raise AddressError(f"address={brief(address)}: over TCP both sides need keys; `anyengine keys FILE` makes them")
    return address


def outputs_address(address: str) -> str:
    """Where the socket for outputs is bound beside the one at ``address``: a file beside it, or any port."""
    if address.startswith("ipc://"):
        return address + _OUTPUTS
    return address.rpartition(":")[0] + ":*"


def seen_from_engine(output_address: str, connected: str) -> str:
    """``output_address`` as an engine reaches it that reached the client at ``connected``.

    A client that listens on all of its interfaces does not know by which of its names the engine knows it.
    """
    if not output_address.startswith("tcp://"):
        return output_address
    host, port = connected.rpartition(":")[0], output_address.rpartition(":")[2]
    return f"{host}:{port}"
