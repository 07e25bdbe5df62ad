"""Text on top of a client: prompts and chats to tokens, tokens to text as they come, stop strings.

    text = await ModelText.load("/models/some-model")
    async with text.open_stream(client, "Once upon a time", SamplingParams(max_tokens=64), stop=["The end."]) as stream:
        async for output in stream:
            print(output.text, end="")

It needs the extra ``text``. :class:`ModelText` is all that an application holds. Beneath it nothing waits:
:mod:`~anyengine.text.detokenizer` turns tokens into text, :mod:`~anyengine.text.stop_strings` finds stop strings, and
:mod:`~anyengine.text.assembler` puts both between a request's outputs and its reader, who awaits or blocks.
"""

import importlib.util

if importlib.util.find_spec("tokenizers") is None:
    raise ModuleNotFoundError(
        "anyengine.text needs the package 'tokenizers': pip install tokenizers", name="tokenizers"
    )

from anyengine.text.detokenizer import Detokenizer
from anyengine.text.model_text import ModelText
from anyengine.text.outputs import TextCompletion, TextOutput
from anyengine.text.sync_text_stream import SyncTextStream
from anyengine.text.text_request import TextOptions
from anyengine.text.text_stream import TextStream

__all__ = ["Detokenizer", "ModelText", "SyncTextStream", "TextCompletion", "TextOptions", "TextOutput", "TextStream"]
