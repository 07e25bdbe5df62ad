"""A message's content as a list of parts, as OpenAI's API has it: texts are joined, all else is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from jinja2 import nodes

from anyengine.brief import brief
from anyengine.errors import RequestRefusedError


def takes_parts(template: nodes.Template) -> bool:
    """Whether a chat template goes through the parts of a content itself, as those of multimodal models do."""
    names = {"content"}
    for assignment in template.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    return any(_is_content(loop.iter, names) for loop in template.find_all(nodes.For))


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


def with_text(index: int, message: Mapping[str, Any], *, as_is: bool) -> Mapping[str, Any]:
    """The message with the parts of its content as one text, a line each.

    :param index: its place among the messages
    :param as_is: leave the parts as they are, and only look at them
    :raises RequestRefusedError: if a part is no text; the message has its place and kind
    """
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    parts = cast("Sequence[Any]", content)
    texts = [_text(f"messages[{index}].content[{place}]", part) for place, part in enumerate(parts)]
    return message if as_is else {**message, "content": "\n".join(texts)}


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
