"""From a prompt to tokens and from tokens to text, with the files of a model's directory.

This uses ``tokenizers`` alone, and Jinja's sandbox for the chat template: transformers would bring torch into a process
that only talks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from anyengine.engines.transformers.checkpoint import NAME, cache_directory

DEFAULT = "default"
"""What stands for the bundled model in place of a directory."""


class ModelError(Exception):
    """A model's directory is not there, or lacks what is needed; the message says what."""


def model_directory(model: str) -> Path:
    """Where the model's files are; for the default model perhaps only after the engine has converted it.

    :raises ModelError: if this is not the directory of a model
    """
    if model == DEFAULT:
        return cache_directory() / NAME
    directory = Path(model).expanduser().absolute()
    # os.path and not Path: a prompt in the place of the model may be longer than any path.
    if not os.path.isdir(directory):
        problem = "it is not a directory" if os.path.exists(directory) else "there is no such directory"
    elif missing := [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]:
        problem = f"it has no {' and no '.join(missing)}"
    else:
        return directory
    raise ModelError(
        f"{directory}: {problem}\nMODEL is a directory in Hugging Face's format (config.json, tokenizer.json, "
        f"*.safetensors), or {DEFAULT!r} for {NAME}."
    )


class ModelText:
    """A model's tokenizer and, for a chat, its template.

    :raises ModelError: if a file is missing or unreadable
    """

    def __init__(self, directory: Path, *, chat: bool) -> None:
        self._chat = chat
        self._template = ""
        self._special_tokens: dict[str, str] = {}
        path = directory / "tokenizer.json"
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library has no narrower type
            raise ModelError(f"{path} cannot be read: {error}") from error
        if chat:
            config = _tokenizer_config(directory)
            self._template = _chat_template(directory, config)
            self._special_tokens = _special_tokens(config)

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt; in a chat those of the whole conversation so far.

        :raises ModelError: if the chat template fails
        """
        if not self._chat:
            return self._tokenizer.encode(prompt).ids
        from anyengine.cli.chat import render  # Jinja takes longer to import than everything else here

        conversation = [{"role": "user", "content": prompt}]
        text = render(self._template, conversation, self._special_tokens)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decoder(self, prompt: list[int]) -> TextDecoder:
        """A decoder of what follows ``prompt``."""
        return TextDecoder(self._tokenizer, [] if self._chat else prompt)


class TextDecoder:
    """Text from tokens as they come. A character that is not complete yet stays back until it is.

    :param prefix: the tokens before the first one; some tokenizers begin a text differently from its continuation
    """

    def __init__(self, tokenizer: Tokenizer, prefix: list[int]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=prefix, skip_special_tokens=True)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        return "".join(map(self._step, token_ids))

    def _step(self, token: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as error:  # the library has no narrower type
            if not str(error).startswith("Invalid prefix"):
                raise
            # Bytes that are no UTF-8, after which some tokenizers decode the text before them differently. What was
            # shown stays; decoding starts afresh from this token.
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._tokenizer, token) or ""


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return cast("dict[str, Any]", config) if isinstance(config, dict) else {}


def _chat_template(directory: Path, config: dict[str, Any]) -> str:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name, as older models have them
        named = cast("list[dict[str, str]]", template)
        template = next((entry["template"] for entry in named if entry.get("name") == "default"), None)
    if not isinstance(template, str):
        raise ModelError(
            f"{directory} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): "
            "run it with --no-chat."
        )
    return template


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like, which templates refer to; each is a string, or an object with its content."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        if name.endswith("_token"):
            content: Any = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens
