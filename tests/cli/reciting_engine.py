"""An engine for the command line that needs no torch: whatever it is asked, it recites one sentence over and over."""

from __future__ import annotations

import sys

from tokenizers import Tokenizer

from anyengine.engines.scripted import ScriptedEngine
from anyengine.text.model_files import model_directory

SENTENCE = " Paris. Once upon a time there was a road along the sea"

CLI = [
    sys.executable,
    "-c",
    f"from anyengine.cli import generate, main; generate.ENGINE = '{__name__}:RecitingEngine'; main()",
]
"""The command line, with this engine instead of the real one."""


class RecitingEngine(ScriptedEngine):
    """Takes the arguments that the command line gives to its engine, and has the default model's tokenizer."""

    def __init__(self, *, model: str, max_num_seqs: int, max_num_batched_tokens: int, num_threads: int = 0) -> None:
        if num_threads:
            print(f"{num_threads} threads")
        tokenizer = Tokenizer.from_file(str(model_directory(model) / "tokenizer.json"))
        script = tokenizer.encode(SENTENCE, add_special_tokens=False).ids * 500
        super().__init__(script=script, step_delay=0.01, max_num_seqs=max_num_seqs, max_model_len=8192)
