"""What the parent hands to the child's process before any socket exists: a CBOR record in a file without a name.

So nothing that must stay secret is in the child's arguments or environment, where other users could read it.
"""

from __future__ import annotations

from typing import NamedTuple

from anyengine.errors import ProtocolError
from anyengine.protocol import cbor
from anyengine.protocol.checks import expect_array, expect_type, expect_u16, expect_u64


class CurveKeys(NamedTuple):
    """One peer's view of a CURVE connection, each key in Z85 (40 characters)."""

    server_public: str
    public: str
    secret: str


class Bootstrap(NamedTuple):
    """How the engine's process reaches its client. ``token`` proves in HELLO that it got this record.

    ``lane`` is an inherited descriptor, the end of a socket pair through which shared memory comes; None without one.
    """

    address: str
    rank: int
    token: bytes
    keys: CurveKeys | None
    lane: int | None = None

    def encode(self) -> bytes:
        """The record as bytes."""
        keys = None if self.keys is None else list(self.keys)
        return cbor.encode_plain([self.address, self.rank, self.token, keys, self.lane])

    @classmethod
    def decode(cls, body: bytes) -> Bootstrap:
        """The record that :meth:`encode` made.

        :raises ProtocolError: if it is not such a record
        """
        fields = expect_array("the bootstrap record", cbor.decode_plain(body), 5)
        address, rank, token, keys, lane = fields
        expect_type("bootstrap address", address, str)
        expect_u16("bootstrap rank", rank)
        expect_type("bootstrap token", token, bytes)
        if keys is not None:
            keys = CurveKeys(*expect_array("bootstrap keys", keys, 3))
            for key in keys:
                expect_type("bootstrap key", key, str)
                if len(key) != 40:
                    raise ProtocolError(f"a bootstrap key has {len(key)} characters, expected 40")
        if lane is not None:
            expect_u64("bootstrap lane", lane)
        return cls(address, rank, token, keys, lane)
