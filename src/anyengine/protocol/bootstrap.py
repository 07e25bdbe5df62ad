"""What the parent hands to the child's process before any socket exists: a CBOR record on the lifeline pipe.

So nothing that must stay secret is in the child's arguments or environment, where other users could read it.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from anyengine.errors import ProtocolError
from anyengine.protocol import cbor
from anyengine.protocol.checks import expect_array, expect_type, expect_u16

LENGTH = struct.Struct("<I")
"""The record is preceded by its length in bytes."""


class CurveKeys(NamedTuple):
    """One peer's view of a CURVE connection, each key in Z85 (40 characters)."""

    server_public: str
    public: str
    secret: str


class Bootstrap(NamedTuple):
    """How the engine's process reaches its client. ``token`` proves in HELLO that it got this record.

    ``import_path`` is added to the child's ``sys.path``, so that engines can live beside the application's code.
    """

    address: str
    rank: int
    token: bytes
    keys: CurveKeys | None
    import_path: list[str]

    def encode(self) -> bytes:
        """The record with its length in front."""
        keys = None if self.keys is None else list(self.keys)
        body = cbor.encode_plain([self.address, self.rank, self.token, keys, self.import_path])
        return LENGTH.pack(len(body)) + body

    @classmethod
    def decode(cls, body: bytes) -> Bootstrap:
        """The record without its length.

        :raises ProtocolError: if it is not such a record
        """
        address, rank, token, keys, import_path = expect_array("the bootstrap record", cbor.decode_plain(body), 5)
        expect_type("bootstrap address", address, str)
        expect_u16("bootstrap rank", rank)
        expect_type("bootstrap token", token, bytes)
        if keys is not None:
            keys = CurveKeys(*expect_array("bootstrap keys", keys, 3))
            for key in keys:
                expect_type("bootstrap key", key, str)
        expect_type("bootstrap import path", import_path, list)
        if not all(type(entry) is str for entry in import_path):
            raise ProtocolError("the bootstrap import path holds something that is not a string")
        return cls(address, rank, token, keys, import_path)
