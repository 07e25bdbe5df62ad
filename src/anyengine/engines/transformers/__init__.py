"""An engine for Hugging Face causal language models on torch, on the CPU or on CUDA.

The modelling is transformers'; scheduling, the paged KV cache, its attention and the sampler are here. Importing this
package loads neither torch nor transformers: :meth:`TransformersEngine.load` does.
"""

from __future__ import annotations

from anyengine.engines.transformers.checkpoint import default_model
from anyengine.engines.transformers.engine import TransformersEngine

__all__ = ["TransformersEngine", "default_model"]
