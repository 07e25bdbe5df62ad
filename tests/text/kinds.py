"""Small tokenizers of every kind, made here."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPECIAL = "<|end|>"
ADDED = ("<tool>", "é", "two words", "字")
"""Added tokens that are no special ones; a byte-level tokenizer decodes the second as if it were a byte."""


def byte_level() -> Tokenizer:
    """Bytes, some words, and added tokens with characters that are and are not of the byte alphabet."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["he", "hel", "hell", "hello", "Ġw", "Ġwo", "æĹ", "æĹ¥"]
    merges = [("h", "e"), ("he", "l"), ("hel", "l"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o"), ("æ", "Ĺ"), ("æĹ", "¥")]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols + words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added_tokens(tokenizer)


def byte_fallback(*, strip: bool = True) -> Tokenizer:
    """Words that begin with a mark, and bytes for what is no word, as Llama's (``strip``) and Gemma's."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for word in ("▁", "▁hello", "▁world", "b", "hello", "▁▁x", "日本"):
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    steps: list[Any] = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    last = [decoders.Strip(" ", 1, 0)] if strip else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last])
    return _with_added_tokens(tokenizer)


def gemma() -> Tokenizer:
    return byte_fallback(strip=False)


def metaspace(scheme: str = "always") -> Tokenizer:
    """Words that begin with a mark, and no bytes, as T5's."""
    words = ["<unk>", "▁", "▁hello", "▁world", "b", "hello", "▁▁x", "日本", "a▁b"]
    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _with_added_tokens(tokenizer)


def metaspace_never() -> Tokenizer:
    return metaspace("never")


def suffixes() -> Tokenizer:
    """Words that end with a mark, as the first GPT's: of another kind than all above."""
    words = {word: index for index, word in enumerate(["<unk>", "hello</w>", "wor", "ld</w>", ".</w>"])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


def words() -> Tokenizer:
    """Words without any decoder: they are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(["?", "one", "two"])}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


def _with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([SPECIAL, "<s>"])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return tokenizer
