"""A vision model of two layers with random weights, and images for it: Idefics3 takes them without torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
from PIL import Image
from tests.vllm.small_model import save_random
from transformers import AutoTokenizer, Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

ARGUMENTS: dict[str, Any] = {"limit_mm_per_prompt": {"image": 2}}

ONE = "User: <image> What is this? Answer:"
TWO = "User: <image> Once more: <image> What has changed? Answer:"

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}assistant:"
)
_TOKENS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
_TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))


def make_model(directory: Path, text_model: Path) -> None:
    """Write a model's directory.

    :param text_model: a model whose tokenizer it takes
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(text_model)
    tokenizer.add_special_tokens({"additional_special_tokens": [*_TOKENS, *_TILES]})
    ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=ends["pad_token_id"],
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 49216,
            "max_position_embeddings": 4096,
            **ends,
        },
    )
    save_random(Idefics3ForConditionalGeneration, config, directory)
    # An image becomes four tiles and itself, each of 4 x 4 patches, which the model joins to 2 x 2 tokens.
    images = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor = Idefics3Processor(
        image_processor=images, tokenizer=tokenizer, image_seq_len=4, chat_template=_CHAT_TEMPLATE
    )
    processor.save_pretrained(directory)


def image(number: int) -> Image.Image:
    """Another one for each number, in two shapes."""
    shape = (50, 70, 3) if number % 2 else (32, 32, 3)
    return Image.fromarray(numpy.random.default_rng(number).integers(0, 255, shape, dtype=numpy.uint8))


def prompt_of(text: str, images: list[int]) -> dict[str, Any]:
    """The prompt as vLLM takes it."""
    return {"prompt": text, "multi_modal_data": {"image": [image(number) for number in images]}}
