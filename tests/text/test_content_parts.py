"""A message whose content is a list of parts, and token ids that cannot be decoded."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from tests.text import kinds

from anyengine import RequestRefusedError
from anyengine.text import ModelText
from anyengine.text.chat_template import ChatTemplate

PLAIN = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] + '|' }}{% endfor %}"
OF_PARTS = (
    "{% for m in messages %}{% set content = m.content %}{% if content is string %}{{ content }}"
    "{% else %}{% for part in content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)

CHOSEN = (
    "{% for m in messages %}{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}[{{ part.text }}]"
    "{% endfor %}{% endfor %}"
)
MAPPED = "{% for m in messages %}[{{ m.content | map(attribute='text') | join('][') }}]{% endfor %}"


def render(template: str, content: Any) -> str:
    messages = [{"role": "user", "content": content}]
    return ChatTemplate(template, {}).render(messages, tools=None, add_generation_prompt=True, variables={})


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_text_parts_are_lines_of_one_text() -> None:
    assert render(PLAIN, [text("hi")]) == render(PLAIN, "hi") == "<user>hi|"
    assert render(PLAIN, (text("a"), {"text": "b"}, "c")) == "<user>a\nb\nc|"
    assert render(PLAIN, []) == "<user>|"


def test_a_template_that_takes_parts_gets_them() -> None:
    assert render(OF_PARTS, [text("a"), text("b")]) == "[a][b]"
    assert render(OF_PARTS, "whole") == "whole"
    assert render(OF_PARTS, [{"text": "a"}, "b"]) == "[a][b]"


@pytest.mark.parametrize("template", [CHOSEN, MAPPED])
def test_a_template_that_chooses_among_the_parts_gets_them(template: str) -> None:
    assert render(template, [text("a"), "b"]) == "[a][b]"


@pytest.mark.parametrize("template", [PLAIN, OF_PARTS])
@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, r"content\[1\] is of type 'image_url': .*VllmInputs"),
        ({"type": "input_audio", "input_audio": {}}, r"content\[1\] is of type 'input_audio': .*VllmInputs"),
        ({"type": "text"}, r"content\[1\]=\{'type': 'text'\}: expected"),
        ({"type": "text", "text": 7}, r"content\[1\]=.*: expected"),
        (7, r"content\[1\]=7: expected"),
        ({}, r"content\[1\]=\{\}: expected"),
    ],
)
def test_what_is_no_text_is_refused_by_name(template: str, part: Any, message: str) -> None:
    with pytest.raises(RequestRefusedError, match=rf"messages\[0\]\.{message}"):
        render(template, [text("look"), part])


@pytest.mark.parametrize("kind", [kinds.byte_level, kinds.byte_fallback, kinds.metaspace, kinds.suffixes, kinds.words])
def test_token_ids_that_cannot_be_are_named(kind: Any) -> None:
    model = ModelText(kind())
    assert model.decode([numpy.int64(1)]) == model.decode([1])
    assert model.decode([10**9]) == "" and model.token_bytes(10**9) == b""
    wrong: list[tuple[Any, type[Exception], str]] = [
        (-1, RequestRefusedError, r"=-1: a token id is 0 to 4294967295"),
        (2**32, RequestRefusedError, r"=4294967296: a token id"),
        (2**70, RequestRefusedError, r"=\d+: a token id"),
        (1.0, TypeError, r"=1.0 \(float\): expected integers"),
        ("a", TypeError, r"='a' \(str\): expected integers"),
    ]
    for token, error, message in wrong:
        with pytest.raises(error, match=r"token_ids\[1\]" + message):
            model.decode([1, token])
        with pytest.raises(error, match=r"token_ids\[0\]" + message):
            model.token_bytes(token)
        with pytest.raises(error, match=r"token_ids\[\d\]" + message):
            model.detokenizer().feed([token])
