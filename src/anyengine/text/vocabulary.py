"""What a token stands for, as bytes.

A byte-level tokenizer's text, and a sentencepiece one's, is the bytes of its tokens one after the other, read as UTF-8.
So a token's bytes are looked up once, and after that a token costs the same wherever it stands.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Tokenizer

from anyengine.client.prompts import as_token_ids

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes: themselves if visible, else those from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in visible)
    return {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


@dataclasses.dataclass(frozen=True, slots=True)
class Decoding:
    """How a tokenizer's decoder turns its tokens into bytes.

    ``first_token`` is the rule for the token that begins a text, and ``strip`` the number of spaces that are taken
    away there: sentencepiece writes a space before each word, the first one included.
    """

    token: Callable[[str], bytes]
    first_token: Callable[[str], bytes]
    strip: int = 0


def decoding_of(tokenizer: Tokenizer) -> Decoding | None:
    """The rules of a tokenizer, or None if its decoder is of another kind: there a token is not always the same."""
    decoder = tokenizer.decoder
    # The state that it pickles is its part of tokenizer.json; all of that file takes seconds for a large vocabulary.
    config = None if decoder is None else json.loads(decoder.__getstate__())
    match _steps(config):
        case [{"type": "ByteLevel"}]:
            return Decoding(_byte_level, _byte_level)
        case [{"type": "Metaspace", "replacement": str(mark), "prepend_scheme": scheme}]:
            later = _replacing({mark: " "})
            return Decoding(later, later if scheme == "never" else _replacing({mark: ""}))
        case [*steps, {"type": "ByteFallback"}, {"type": "Fuse"}]:
            strip = 0
        case [*steps, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "stop": 0, **last}]:
            strip = int(last["start"])
        case _:
            return None
    replacements: dict[str, str] = {}
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                replacements[pattern] = content
            case _:
                return None
    rule = _replacing(replacements, byte_fallback=True)
    return Decoding(rule, rule, strip)


def _steps(config: Any) -> list[Any]:
    if config is None:
        return []
    if config["type"] != "Sequence":
        return [config]
    return [step for part in config["decoders"] for step in _steps(part)]


def _byte_level(token: str) -> bytes:
    try:
        return bytes(map(_ALPHABET.__getitem__, token))
    except KeyError:  # an added token, which is written as it is
        return token.encode()


def _replacing(replacements: Mapping[str, str], *, byte_fallback: bool = False) -> Callable[[str], bytes]:
    def rule(token: str) -> bytes:
        for pattern, content in replacements.items():
            token = token.replace(pattern, content)
        if byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return token.encode()

    return rule


class TokenBytes(dict[int, bytes]):
    """The bytes of each token by its id, looked up when first asked for; none for an id that no token has.

    :param hidden: ids of the tokens that stand for nothing
    """

    def __init__(self, tokenizer: Tokenizer, decoding: Decoding, hidden: frozenset[int] = frozenset()) -> None:
        self.decoding = decoding
        self._tokenizer = tokenizer
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        token = self._name_of(token_id)
        if token is None:
            return b""
        self[token_id] = found = b"" if token_id in self._hidden else self.decoding.token(token)
        return found

    def as_first(self, token_id: int) -> bytes:
        """The bytes of a token that begins a text."""
        token = self._name_of(token_id)
        return b"" if token is None or token_id in self._hidden else self.decoding.first_token(token)

    def _name_of(self, token_id: int) -> str | None:
        try:
            return self._tokenizer.id_to_token(token_id)
        except (OverflowError, TypeError):
            (token_id,) = as_token_ids("token_ids", [token_id])  # which says what is wrong
            return self._tokenizer.id_to_token(token_id)
