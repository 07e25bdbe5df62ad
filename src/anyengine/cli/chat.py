"""Chat templates, rendered as transformers renders them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from anyengine.cli.text import ModelError


def render(template: str, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, str]) -> str:
    """The text of a conversation in which the assistant speaks next.

    The template comes with the model and is code of a stranger: it runs in a sandbox.

    :raises ModelError: if the template fails, or refuses the conversation
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception  # pyright: ignore[reportArgumentType]
    environment.globals["strftime_now"] = _strftime_now  # pyright: ignore[reportArgumentType]
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **special_tokens)
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise ModelError(f"the model's chat template failed: {error}") from error


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (the base class's own type)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
