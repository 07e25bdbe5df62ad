"""Which of a model's files cannot be read: transformers' own errors name none, as a rule."""

from __future__ import annotations

import contextlib
import json
import zipfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from anyengine.brief import brief


@contextlib.contextmanager
def naming_broken_files(directory: Path) -> Generator[None]:
    """What is raised in the block becomes a ValueError that names the broken file, if there is one.

    :raises ValueError: if something is raised, and a file of the model in ``directory`` is broken
    """
    try:
        yield
    except Exception as error:
        if (problem := broken_file(directory)) is not None:
            raise ValueError(problem) from error
        raise


def broken_file(directory: Path) -> str | None:
    """The first file of weights or settings that cannot be read, and why; None if all can."""
    # Those alone that are read for the model: others may lie there as well.
    for path in sorted(
        [directory / "config.json", directory / "generation_config.json", *directory.glob("*.index.json")]
    ):
        try:
            json.loads(path.read_bytes())
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
        except ValueError as error:
            return f"{path} is broken: it is no JSON ({brief(str(error))})"
    for path in sorted(directory.glob("*.safetensors")):
        opened: Any = safe_open
        try:
            with opened(path, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            return f"{path} is broken: {brief(str(error))}; it may have been copied or downloaded in part"
    for path in sorted(directory.glob("pytorch_model*.bin")):
        if not zipfile.is_zipfile(path):
            return f"{path} is broken: it is no archive of torch's; it may have been copied or downloaded in part"
    return None
