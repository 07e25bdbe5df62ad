"""Text from tokens as they come."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from tokenizers import Tokenizer

from anyengine.client.prompts import as_token_ids
from anyengine.text.vocabulary import TokenBytes

_CONTEXT = 6
"""Tokens before a text, or in it, that decide how its next token is written, where a token's bytes depend on them."""

_HELD_TOKENS = 8
"""Tokens that may be without text, one after the other, before what there is comes out as it is."""


class Detokenizer(Protocol):
    """Turns one text's tokens into characters, each of which comes with the last token that it is made of."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        ...

    def finish(self) -> str:
        """U+FFFD for what was no complete character, if there was such a thing; nothing more may be fed."""
        ...


class ByteDetokenizer:
    """For tokens that always stand for the same bytes: however they are split, the pieces are the same text.

    :param context: the tokens before the first one; where there is text in them, this one is its continuation
    """

    def __init__(self, table: TokenBytes, context: Sequence[int] = ()) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = any(table[token] for token in reversed(context))
        self._strip = 0 if self._begun else table.decoding.strip

    def feed(self, token_ids: Iterable[int]) -> str:
        """See :class:`Detokenizer`."""
        if self._begun and not self._strip:
            return self._utf8.decode(b"".join(map(self._table.__getitem__, token_ids)))
        return self._feed_first(iter(token_ids))

    def _feed_first(self, token_ids: Iterator[int]) -> str:
        data = b""
        while not self._begun and (token := next(token_ids, None)) is not None:
            data = self._table.as_first(token)
            # A first token may be nothing but the mark of a space; only a hidden one does not begin the text.
            self._begun = bool(self._table[token])
        text = self._utf8.decode(data + b"".join(map(self._table.__getitem__, token_ids)))
        while self._strip and text:
            self._strip, text = (self._strip - 1, text[1:]) if text[0] == " " else (0, text)
        return text

    def finish(self) -> str:
        """See :class:`Detokenizer`."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For every other decoder: the last tokens are decoded with and without the new one, which is the difference.

    Right wherever a longer sequence of tokens only ever adds to the text.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        shown = (token for token in reversed(context) if token not in hidden)
        self._window = list(itertools.islice(shown, _CONTEXT))[::-1]
        self._read = len(self._window)  # the tokens of the window whose text has come out

    def feed(self, token_ids: Iterable[int]) -> str:
        """See :class:`Detokenizer`."""
        shown = [token for token in token_ids if token not in self._hidden]
        return "".join(map(self._step, as_token_ids("token_ids", shown)))

    def _step(self, token: int) -> str:
        self._window.append(token)
        new = self._new()
        if (not new or new.endswith("\N{REPLACEMENT CHARACTER}")) and len(self._window) < self._read + _HELD_TOKENS:
            return ""
        self._window = self._window[max(self._read, len(self._window) - _CONTEXT) :]
        self._read = len(self._window)
        return new

    def _new(self) -> str:
        # Special tokens that are to be shown are in the window, hidden ones are not.
        before = self._tokenizer.decode(self._window[: self._read], skip_special_tokens=False)
        return self._tokenizer.decode(self._window, skip_special_tokens=False)[len(before) :]

    def finish(self) -> str:
        """See :class:`Detokenizer`."""
        return self._new()
