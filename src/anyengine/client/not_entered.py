"""What a block says when it is taken for the client that it gives."""

from __future__ import annotations


def not_entered(block: object, name: str, client: type, how: str) -> str:
    """The text of the AttributeError for the attribute ``name`` of ``block``.

    :param client: the class of what entering the block gives
    :param how: how it is entered
    """
    text = f"{type(block).__name__!r} object has no attribute {name!r}"
    if name.startswith("_") or not hasattr(client, name):
        return text
    return f"{text}: it is the client's, which entering the block gives: {how}: client.{name}"
