"""A message's content as a list of parts, as OpenAI's API has it: texts are joined, all else is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from jinja2 import nodes

from anyengine.brief import brief
from anyengine.errors import RequestRefusedError

_OF_PARTS = ("map", "selectattr", "rejectattr")
"""Filters that a template has for the parts of a content, and not for a text."""


def takes_parts(template: nodes.Template) -> bool:
    """Whether a chat template goes through the parts of a content itself, as those of multimodal models do."""
    names = {"content"}
    for assignment in template.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    if any(_is_content(loop.iter, names) for loop in template.find_all(nodes.For)):
        return True
    filters = template.find_all(nodes.Filter)
    return any(chosen.name in _OF_PARTS and _is_content(chosen, names) for chosen in filters)


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


def with_text(index: int, message: Mapping[str, Any], *, as_is: bool) -> Mapping[str, Any]:
    """The message with the parts of its content as one text, a line each.

    :param index: its place among the messages
    :param as_is: leave them parts, each of them in the form that templates know
    :raises RequestRefusedError: if a part is no text; the message has its place and kind
    """
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    parts = cast("Sequence[Any]", content)
    texts = [_text(f"messages[{index}].content[{place}]", part) for place, part in enumerate(parts)]
    if as_is:
        return {**message, "content": [{"type": "text", "text": text} for text in texts]}
    return {**message, "content": "\n".join(texts)}


def _text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    fields: Mapping[str, Any] = cast("Mapping[str, Any]", part) if isinstance(part, Mapping) else {}
    kind = fields.get("type", "text" if "text" in fields else None)
    if kind == "text" and isinstance(fields.get("text"), str):
        return fields["text"]
    if isinstance(kind, str) and kind != "text":
        raise RequestRefusedError(
            f"{where} is of type {brief(kind)}: a chat template makes text only. Of images, sounds and videos make "
            "token ids and features with anyengine.engines.vllm.inputs.VllmInputs, and give the client both"
        )
    raise RequestRefusedError(f'{where}={brief(part)}: expected {{"type": "text", "text": "..."}}')
