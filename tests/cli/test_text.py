"""Tokens to text, and chat templates, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from anyengine.cli.chat import render
from anyengine.cli.text import ModelError, ModelText, TextDecoder

MESSAGES = [{"role": "user", "content": "Hi <there>"}]


def byte_tokenizer() -> Tokenizer:
    """Bytes as tokens, as byte-level models have them."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def fallback_tokenizer() -> Tokenizer:
    """Words that begin with a blank, and bytes for what is no word, as sentencepiece models have them."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocabulary |= {"▁hello": 300, "▁world": 301, "b": 302}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def test_a_character_comes_when_its_last_byte_has_come() -> None:
    tokenizer = byte_tokenizer()
    decoder = TextDecoder(tokenizer, [])
    text = "né 日本 🎉"
    pieces = [decoder.decode([token]) for token in tokenizer.encode(text).ids]
    assert [piece for piece in pieces if piece] == list(text)
    assert len(pieces) == len(text.encode())


def test_many_tokens_at_once_are_the_same_text() -> None:
    tokenizer = byte_tokenizer()
    text = "one, two, 三"
    assert TextDecoder(tokenizer, []).decode(tokenizer.encode(text).ids) == text


def test_a_continuation_keeps_its_first_blank() -> None:
    tokenizer = fallback_tokenizer()
    assert TextDecoder(tokenizer, []).decode([300, 301]) == "hello world"
    assert TextDecoder(tokenizer, [300]).decode([301, 300]) == " world hello"


def test_bytes_that_are_no_text_do_not_end_the_stream() -> None:
    tokenizer = fallback_tokenizer()
    decoder = TextDecoder(tokenizer, [])
    invalid = [0xBC, 0x83, 0xC0, 0x75, 0x81]  # bare, tokenizers 0.23 raises "Invalid prefix" at what follows
    shown = decoder.decode([byte + 1 for byte in invalid])
    assert decoder.decode([302, 300]).endswith("hello"), shown


def directory_with(tmp_path: Path, config: dict[str, object] | None = None, template: str | None = None) -> Path:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


@pytest.mark.parametrize(
    ("config", "template"),
    [
        (None, "<{{ messages[0].content }}>{{ bos_token }}"),
        ({"chat_template": "<{{ messages[0].content }}>{{ bos_token }}", "bos_token": "B"}, None),
        (
            {
                "chat_template": [
                    {"name": "tool_use", "template": "wrong"},
                    {"name": "default", "template": "<{{ messages[0].content }}>{{ bos_token }}"},
                ],
                "bos_token": {"content": "B", "special": True},
            },
            None,
        ),
    ],
)
def test_where_a_chat_template_is_found(tmp_path: Path, config: dict[str, object] | None, template: str | None) -> None:
    text = ModelText(directory_with(tmp_path, config, template), chat=True)
    expected = "<Hi>" if config is None else "<Hi>B"
    assert text.decoder([]).decode(text.encode("Hi")) == expected


def test_without_a_chat_only_the_tokenizer_is_needed(tmp_path: Path) -> None:
    text = ModelText(directory_with(tmp_path), chat=False)
    assert len(text.encode("Hi")) == 2
    with pytest.raises(ModelError, match=r"has no chat template (?s:.*) --no-chat"):
        ModelText(tmp_path, chat=True)


def test_a_broken_tokenizer_config(tmp_path: Path) -> None:
    directory_with(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read"):
        ModelText(tmp_path, chat=True)


def test_templates_are_rendered_as_transformers_renders_them() -> None:
    template = """
{%- for message in messages %}
    {%- if loop.index > 5 %}{% break %}{% endif %}
    {% generation %}{{ message | tojson }}{% endgeneration %}
{%- endfor %}
{% if add_generation_prompt %}
{{ bos_token + strftime_now('%Y')[:2] }}
{% endif %}
"""
    assert render(template, MESSAGES, {"bos_token": "B"}) == '{"role": "user", "content": "Hi <there>"}B20\n'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only assistants may speak') }}", "only assistants may speak"),
        ("{% if %}", "template failed"),
        ("{{ messages[0].content + 1 }}", "template failed"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_a_template_that_fails_or_attacks(template: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        render(template, MESSAGES, {})
