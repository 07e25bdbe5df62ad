"""Chat templates, rendered as transformers renders them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from anyengine.brief import brief
from anyengine.errors import ModelError, RequestRefusedError
from anyengine.text.content_parts import takes_parts, with_text

_FAILURES = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError)
"""What rendering raises over a conversation that the template was not made for."""

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
            parsed = environment.parse(source)
            self._takes_parts = takes_parts(parsed)
            self._names = find_undeclared_variables(parsed) - environment.globals.keys()
            self._template = environment.from_string(parsed)
        except TemplateError as error:
            raise ModelError(f"the model's chat template is malformed: {error}") from error

    def render(
        self,
        messages: object,
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The text of a conversation.

        :param variables: what else the caller says; the template must refer to each that is not None
        :raises TypeError: if ``messages`` is not a sequence of mappings
        :raises RequestRefusedError: if a message has no role or one that nobody knows, if the template refuses the
            conversation or fails on it, or if it leaves out the tools or refers to no such variable
        """
        checked = self._check(messages)
        for name, value in variables.items():
            if value is not None and name not in self._names:
                raise RequestRefusedError(
                    f"{name}={brief(value)}: the model's chat template does not refer to it{self._hint}"
                )
        given = {"documents": None, "add_generation_prompt": add_generation_prompt, **variables, "messages": checked}
        try:
            text = self._render({**given, "tools": tools})
        except _FAILURES as error:
            raise RequestRefusedError(f"the model's chat template refuses this conversation: {error}") from error
        if tools and ("tools" not in self._names or self._is_rendered_to(text, {**given, "tools": None})):
            raise RequestRefusedError(
                "tools: the model's chat template leaves them out of this conversation, so the model would not see them"
            )
        return text

    @property
    def _hint(self) -> str:
        known = sorted(self._names - {"messages", "tools", "add_generation_prompt", *self._variables})
        return f"; it knows {', '.join(known)}" if known else ""

    def _render(self, variables: Mapping[str, Any]) -> str:
        return self._template.render(**{**self._variables, **variables})

    def _is_rendered_to(self, text: str, variables: Mapping[str, Any]) -> bool:
        try:
            return self._render(variables) == text
        except _FAILURES:
            return False

    def _check(self, messages: object) -> Sequence[Mapping[str, Any]]:
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
            raise TypeError(f"messages={brief(messages)} ({type(messages).__name__}): expected a list of messages")
        listed = cast("Sequence[Any]", messages)
        if not listed:
            raise RequestRefusedError("messages=[]: expected at least one message")
        for index, message in enumerate(listed):
            if not isinstance(message, Mapping):
                kind = type(message).__name__
                raise TypeError(
                    f"messages[{index}]={brief(message)} ({kind}): expected a mapping with role and content"
                )
            role = cast("Mapping[str, Any]", message).get("role")
            if not isinstance(role, str):
                raise RequestRefusedError(f"messages[{index}] has the role {brief(role)}: expected a string")
            # Many templates print any role, so that a misspelt one would only be noticed in the answers. Some models
            # have roles of their own, and those stand in the template.
            if role not in _ROLES and f"'{role}'" not in self._source and f'"{role}"' not in self._source:
                raise RequestRefusedError(
                    f"messages[{index}] has the role {brief(role)}: expected one of {', '.join(_ROLES)}, or one that "
                    "the model's chat template names"
                )
        return [with_text(index, message, as_is=self._takes_parts) for index, message in enumerate(listed)]


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
