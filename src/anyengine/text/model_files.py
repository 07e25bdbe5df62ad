"""What a model's directory holds for text: its tokenizer, its chat templates, the tokens that these refer to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from anyengine.engines.transformers.checkpoint import NAME, cache_directory
from anyengine.errors import ModelError

DEFAULT = "default"
"""What stands for the bundled model in place of a directory."""


def model_directory(model: str | os.PathLike[str]) -> Path:
    """Where the model's files are; for the default model perhaps only after an engine has converted it.

    :raises ModelError: if this is not the directory of a model
    """
    if model == DEFAULT:
        return cache_directory() / NAME
    directory = Path(model).expanduser().absolute()
    # os.path and not Path: what stands in the place of a directory may be longer than any path.
    if not os.path.isdir(directory):
        problem = "it is not a directory" if os.path.exists(directory) else "there is no such directory"
    elif missing := [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]:
        problem = f"it has no {' and no '.join(missing)}"
    else:
        return directory
    raise ModelError(
        f"{directory}: {problem}\nA model is a directory in Hugging Face's format (config.json, tokenizer.json, "
        f"*.safetensors), or {DEFAULT!r} for {NAME}. For one on the Hugging Face hub pass "
        "huggingface_hub.snapshot_download(name)."
    )


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer, as it is after training: it cuts nothing off and fills nothing up.

    :raises ModelError: if its file is missing or cannot be read
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        hint = "transformers makes one of other formats: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        if directory == model_directory(DEFAULT):
            hint = "an engine converts it when it first loads it"
        raise ModelError(f"{path}: there is no such file; {hint}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no narrower type
        raise ModelError(f"{path} cannot be read: {error}") from error
    # Some files carry the settings of their training, by which long prompts would lose their ends.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_config(directory: Path) -> dict[str, Any]:
    """``tokenizer_config.json``; empty if there is none.

    :raises ModelError: if it cannot be read
    """
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read(path))
    except ValueError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return cast("dict[str, Any]", config) if isinstance(config, dict) else {}


def read_chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: ``"default"``, and perhaps others, as ``"tool_use"``.

    They have files of their own, or stand in ``tokenizer_config.json``, where older models have them.

    :raises ModelError: if a file cannot be read
    """
    templates: dict[str, str] = {}
    configured = config.get("chat_template")
    if isinstance(configured, str):
        templates["default"] = configured
    elif isinstance(configured, list):
        for entry in cast("list[dict[str, str]]", configured):
            templates[entry["name"]] = entry["template"]
    if (path := directory / "chat_template.jinja").is_file():
        templates["default"] = _read(path)
    for path in (directory / "additional_chat_templates").glob("*.jinja"):
        templates[path.stem] = _read(path)
    return templates


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like, which templates refer to; each is a string, or an object with its content."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        if name.endswith("_token"):
            content: Any = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
