"""How long a request may become: prompt and completion together, within the model's length.

Clients refuse what does not fit at the call. Engines look again: the request may come from before a restart, and the
engine's next life may have a shorter model.
"""

from __future__ import annotations

from anyengine.errors import RequestRefusedError
from anyengine.params import SamplingParams
from anyengine.types import U32_MAX


def token_limit(sampling: SamplingParams, prompt_length: int, max_model_len: int) -> int:
    """How many tokens a request may generate: its ``max_tokens``, or as many as fit where that is None.

    :param prompt_length: in tokens
    :raises RequestRefusedError: if so many tokens do not fit beside the prompt, or not even one, or not ``min_tokens``
    """
    room = max_model_len - prompt_length
    if room < 1:
        raise RequestRefusedError(
            f"the prompt has {prompt_length} tokens, but max_model_len is {max_model_len} with the completion: "
            f"expected a prompt of at most {max_model_len - 1}"
        )
    if sampling.max_tokens is None:
        wanted, what = sampling.min_tokens, f"min_tokens={sampling.min_tokens}"
    else:
        wanted, what = sampling.max_tokens, f"max_tokens={sampling.max_tokens}"
    if wanted > room:
        raise RequestRefusedError(
            f"SamplingParams.{what}: expected at most {room}, for the prompt has {prompt_length} tokens and "
            f"max_model_len is {max_model_len} with the completion; max_tokens=None asks for as many as fit"
        )
    return min(room, U32_MAX) if sampling.max_tokens is None else wanted
