"""The file by which a client and engines that somebody else starts recognize each other.

It holds the CURVE keys of both sides and a token, so it is as secret as a private key: it is written readable by its
owner alone, and one that others can read is refused. Copy it to the engine's machine as you would copy an SSH key.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from pathlib import Path
from typing import Any, Self, cast

import zmq

from anyengine.errors import KeysError
from anyengine.protocol.bootstrap import CurveKeys

_FIELDS = ("server_public", "server_secret", "engine_public", "engine_secret", "token")


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ConnectionKeys:
    """What both sides know: keys in Z85 (40 characters), and the token that HELLO proves to have (32 hex digits)."""

    server_public: str
    server_secret: str
    engine_public: str
    engine_secret: str
    token: str

    @classmethod
    def generate(cls) -> Self:
        """New keys."""
        server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
        engine_public, engine_secret = (key.decode() for key in zmq.curve_keypair())
        return cls(server_public, server_secret, engine_public, engine_secret, secrets.token_hex(16))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that :meth:`save` wrote.

        :raises KeysError: if there is none, others can read it, or it does not hold keys
        """
        try:
            mode, text = os.stat(path).st_mode, Path(path).read_bytes()
        except OSError as error:
            raise KeysError(
                f"{os.fspath(path)} cannot be read: {error.strerror}; `anyengine keys FILE` makes one"
            ) from None
        if mode & 0o077:
            raise KeysError(f"{os.fspath(path)} can be read by others than its owner; chmod 600 it")
        try:
            fields: Any = json.loads(text)
        except ValueError:
            raise KeysError(f"{os.fspath(path)} is not a file of keys; `anyengine keys FILE` makes one") from None
        if not isinstance(fields, dict) or sorted(cast("dict[str, Any]", fields)) != sorted(_FIELDS):
            raise KeysError(f"{os.fspath(path)} does not hold exactly {', '.join(_FIELDS)}")
        keys = cast("dict[str, Any]", fields)
        for name, value in keys.items():
            length = 32 if name == "token" else 40
            if not isinstance(value, str) or len(value) != length:
                raise KeysError(f"{os.fspath(path)}: {name} is not a string of {length} characters")
        loaded = cls(**keys)
        try:
            bytes.fromhex(loaded.token)
            for public, secret in (
                (loaded.server_public, loaded.server_secret),
                (loaded.engine_public, loaded.engine_secret),
            ):
                if zmq.curve_public(secret.encode()) != public.encode():
                    raise ValueError
        except (ValueError, zmq.ZMQError):
            raise KeysError(
                f"{os.fspath(path)}: its keys do not belong together; `anyengine keys FILE` makes new ones"
            ) from None
        return loaded

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a new file that its owner alone can read.

        :raises KeysError: if there is a file already, or it cannot be written
        """
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise KeysError(f"{os.fspath(path)} cannot be written: {error.strerror}") from None
        with open(fd, "w") as file:
            json.dump(dataclasses.asdict(self), file, indent=1)

    @property
    def token_bytes(self) -> bytes:
        """The token as it travels."""
        return bytes.fromhex(self.token)

    @property
    def for_engine(self) -> CurveKeys:
        """The engine's view."""
        return CurveKeys(self.server_public, self.engine_public, self.engine_secret)
