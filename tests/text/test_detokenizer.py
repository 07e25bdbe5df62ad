"""Tokens to text: however they come in pieces, it is the text that the tokenizer itself makes of all of them."""

from __future__ import annotations

import codecs
import functools
import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.text import kinds
from tokenizers import Tokenizer, decoders

from anyengine.text import ModelText
from anyengine.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_KINDS = [kinds.byte_level, kinds.byte_fallback, kinds.gemma, kinds.metaspace, kinds.metaspace_never]
OTHER_KINDS = [kinds.suffixes, kinds.words]


@functools.cache
def made_once(kind: Callable[[], Tokenizer]) -> tuple[Tokenizer, ModelText]:
    tokenizer = kind()
    return tokenizer, ModelText(tokenizer)


def pieces(detokenizer: Detokenizer, token_ids: Sequence[int], cuts: Sequence[int] = ()) -> list[str]:
    """The text of the tokens, fed in pieces that end at ``cuts``."""
    ends = sorted({*(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids)})
    fed = [detokenizer.feed(token_ids[start:end]) for start, end in itertools.pairwise([0, *ends])]
    return [*fed, detokenizer.finish()]


def spoils_bytes(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bool:
    """Whether a run of byte tokens is no UTF-8: then tokenizers replaces every byte of it, also those that are."""
    run = b""
    for token_id in [*token_ids, None]:
        token = "" if token_id is None else tokenizer.id_to_token(token_id)
        if token and token.startswith("<0x"):
            run += bytes.fromhex(token[3:5])
            continue
        try:
            run.decode()
        except UnicodeDecodeError:
            return True
        run = b""
    return False


def visible(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return [token_id for token_id in token_ids if token_id not in special]


@pytest.mark.parametrize("skip", [True, False], ids=["skip", "show"])
@pytest.mark.parametrize("kind", BYTE_KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_any_split_is_the_whole(kind: Callable[[], Tokenizer], skip: bool, data: st.DataObject) -> None:
    tokenizer, text = made_once(kind)
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 1), max_size=24))
    cuts = data.draw(st.lists(st.integers(0, 100), max_size=8))
    joined = "".join(pieces(text.detokenizer(skip_special_tokens=skip), token_ids, cuts))
    assert joined == text.decode(token_ids, skip_special_tokens=skip)
    shown = visible(tokenizer, token_ids) if skip else token_ids
    if not spoils_bytes(tokenizer, shown):
        assert joined == tokenizer.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", BYTE_KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_a_continuation_is_what_the_whole_has_more_than_the_prompt(
    kind: Callable[[], Tokenizer], data: st.DataObject
) -> None:
    tokenizer, text = made_once(kind)
    tokens = st.integers(0, tokenizer.get_vocab_size() - 1)
    prompt, more = data.draw(st.lists(tokens, max_size=6)), data.draw(st.lists(tokens, max_size=8))
    before, whole = text.decode(prompt), text.decode(prompt + more)
    if before.endswith(REPLACEMENT):  # the prompt may end within a character, and that one belongs to neither
        return
    assert before + "".join(pieces(text.detokenizer(prompt), more)) == whole


@pytest.mark.engines
@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_any_split_with_the_real_tokenizer(smol: ModelText, data: st.DataObject) -> None:
    tokenizer = smol._tokenizer
    size = tokenizer.get_vocab_size()
    # Half of the tokens from text with characters of many bytes: random tokens alone rarely make one.
    some = st.lists(st.integers(0, size + 100), max_size=10) | st.text(max_size=10).map(smol.encode)
    token_ids = [token for part in data.draw(st.lists(some, max_size=5)) for token in part]
    cuts = data.draw(st.lists(st.integers(0, 100), max_size=8))
    for skip in (True, False):
        joined = "".join(pieces(smol.detokenizer(skip_special_tokens=skip), token_ids, cuts))
        assert joined == tokenizer.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", [kinds.byte_level, kinds.byte_fallback, kinds.gemma])
@given(text=st.text(max_size=30))
@settings(deadline=None)
def test_text_comes_back_and_each_character_with_its_last_token(kind: Callable[[], Tokenizer], text: str) -> None:
    _, model = made_once(kind)
    for added in (*kinds.ADDED, "<s>", kinds.SPECIAL, "▁"):
        text = text.replace(added, "")
    token_ids = model.encode(text)
    detokenizer = model.detokenizer()
    shown = ""
    for token_id in token_ids:
        piece = detokenizer.feed([token_id])
        shown += piece
        assert text.startswith(shown)
    assert detokenizer.finish() == ""
    assert shown == text


def test_a_character_is_held_back_until_it_is_complete() -> None:
    text = ModelText(kinds.byte_level())
    tokens = text.encode("nü 🎉")
    detokenizer = text.detokenizer()
    assert [piece for token in tokens for piece in [detokenizer.feed([token])] if piece] == list("nü 🎉")
    detokenizer = text.detokenizer()
    assert "".join(detokenizer.feed([token]) for token in tokens[:-1]) == "nü "
    assert detokenizer.finish() == REPLACEMENT


def test_bytes_that_are_no_text_come_out_at_once_and_at_the_same_cost() -> None:
    text = ModelText(kinds.byte_level())
    (stray,) = (token for token in range(256) if text.token_bytes(token) == b"\xbc")
    detokenizer = text.detokenizer()
    assert {detokenizer.feed([stray]) for _ in range(5000)} == {REPLACEMENT}
    (incomplete,) = (token for token in range(256) if text.token_bytes(token) == b"\xe6")
    # What comes next shows that the character will never be complete.
    assert detokenizer.feed([incomplete]) == ""
    assert detokenizer.feed([incomplete]) == REPLACEMENT
    assert detokenizer.feed(text.encode("h")) == REPLACEMENT + "h"


def test_byte_tokens_that_are_no_text_spoil_only_themselves() -> None:
    tokenizer = kinds.byte_fallback()
    text = ModelText(tokenizer)
    token_ids = [byte + 1 for byte in (*"é".encode(), 0xFF, *"日".encode())]
    assert text.decode(token_ids) == f"é{REPLACEMENT}日"
    # What the tokenizer itself says cannot be said while the tokens come: "é" was there before the stray byte.
    assert tokenizer.decode(token_ids) == REPLACEMENT * 6


@pytest.mark.parametrize(
    ("kind", "whole"),
    [(kinds.byte_fallback, "hello world"), (kinds.gemma, " hello world"), (kinds.metaspace, "hello world")],
)
def test_a_continuation_keeps_its_first_space(kind: Callable[[], Tokenizer], whole: str) -> None:
    tokenizer = kind()
    text = ModelText(tokenizer)
    hello, world, end = (tokenizer.token_to_id(token) for token in ("▁hello", "▁world", kinds.SPECIAL))
    assert "".join(pieces(text.detokenizer(), [hello, world])) == whole
    assert "".join(pieces(text.detokenizer([hello]), [world, hello])) == " world hello"
    # A special token is no text, so nothing goes on after it.
    assert "".join(pieces(text.detokenizer([end]), [end, hello, world])) == whole
    assert "".join(pieces(text.detokenizer([hello, end]), [world])) == " world"


@pytest.mark.parametrize("kind", OTHER_KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_other_decoders(kind: Callable[[], Tokenizer], data: st.DataObject) -> None:
    tokenizer, text = made_once(kind)
    tokens = st.integers(0, tokenizer.get_vocab_size() - 1)
    prompt, more = data.draw(st.lists(tokens, max_size=10)), data.draw(st.lists(tokens, max_size=20))
    cuts = data.draw(st.lists(st.integers(0, 100), max_size=8))
    assert isinstance(text.detokenizer(), WindowDetokenizer)
    assert "".join(pieces(text.detokenizer(), more, cuts)) == tokenizer.decode(more)
    assert text.decode(prompt) + "".join(pieces(text.detokenizer(prompt), more, cuts)) == tokenizer.decode(
        prompt + more
    )


def test_a_window_does_not_grow() -> None:
    """With bytes among the tokens too, for which other decoders have no rules here."""
    tokenizer = kinds.byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    text = ModelText(tokenizer)
    detokenizer = text.detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer)
    (stray,) = (token for token in range(256) if tokenizer.id_to_token(token) == "¼")
    assert sum(len(detokenizer.feed([stray])) for _ in range(500)) > 480
    assert len(detokenizer._window) < 20
    assert detokenizer.feed(text.encode("日")).endswith("日")


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_kinds_have_rules_for_bytes(kind: Callable[[], Tokenizer]) -> None:
    assert isinstance(ModelText(kind()).detokenizer(), ByteDetokenizer)


@pytest.mark.engines
def test_the_bytes_of_single_tokens(smol: ModelText) -> None:
    token_ids = smol.encode("né 日本 🎉<|im_end|>")
    assert b"".join(map(smol.token_bytes, token_ids)) == "né 日本 🎉<|im_end|>".encode()
    assert smol.token_bytes(2**31) == b""
    assert ModelText(kinds.words()).token_bytes(1) == b"one"
    incomplete = [smol.token_bytes(token) for token in token_ids if not _is_utf8(smol.token_bytes(token))]
    assert incomplete, "no token is a part of a character, so that the test shows nothing"


def _is_utf8(data: bytes) -> bool:
    try:
        codecs.decode(data)
    except UnicodeDecodeError:
        return False
    return True
