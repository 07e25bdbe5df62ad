"""Chat templates, rendered as transformers renders them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from anyengine.brief import brief
from anyengine.errors import ModelError, RequestError

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ChatTemplate:
    """A model's template for chats.

    It comes with the model and is code of a stranger: it runs in a sandbox.

    :param variables: what the template may refer to besides the conversation, as ``bos_token``
    :raises ModelError: if the template is malformed
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._source = source
        self._variables = variables
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception  # pyright: ignore[reportArgumentType]
        environment.globals["strftime_now"] = _strftime_now  # pyright: ignore[reportArgumentType]
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the model's chat template is malformed: {error}") from error

    def render(self, messages: object, variables: Mapping[str, Any]) -> str:
        """The text of a conversation.

        :raises TypeError: if ``messages`` is not a sequence of mappings
        :raises RequestError: if a message has no role or one that nobody knows, or if the template refuses the
            conversation or fails on it
        """
        checked = self._check(messages)
        try:
            return self._template.render(**{**self._variables, **variables, "messages": checked})
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise RequestError(f"the model's chat template refuses this conversation: {error}") from error

    def _check(self, messages: object) -> Sequence[Mapping[str, Any]]:
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
            raise TypeError(f"messages={brief(messages)} ({type(messages).__name__}): expected a list of messages")
        listed = cast("Sequence[Any]", messages)
        if not listed:
            raise RequestError("messages=[]: expected at least one message")
        for index, message in enumerate(listed):
            if not isinstance(message, Mapping):
                kind = type(message).__name__
                raise TypeError(
                    f"messages[{index}]={brief(message)} ({kind}): expected a mapping with role and content"
                )
            role = cast("Mapping[str, Any]", message).get("role")
            if not isinstance(role, str):
                raise RequestError(f"messages[{index}] has the role {brief(role)}: expected a string")
            # Many templates print any role, so that a misspelt one would only be noticed in the answers. Some models
            # have roles of their own, and those stand in the template.
            if role not in _ROLES and f"'{role}'" not in self._source and f'"{role}"' not in self._source:
                raise RequestError(
                    f"messages[{index}] has the role {brief(role)}: expected one of {', '.join(_ROLES)}, or one that "
                    "the model's chat template names"
                )
        return listed


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (the base class's own type)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, and has other defaults.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
