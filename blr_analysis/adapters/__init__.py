"""A LoRA adapter as a fine-tuned model: the base's tensors, with the adapter added.

    W = W_0 + s·B·A,      s = α/r, or α/√r where rank-stabilised.

A merge therefore adds the weights of adapted models: the sum of two adapters holds B₁A₁ + B₂A₂.
Adding A to A and B to B would bring the cross terms B₁A₂ as well. The pairs of matrices of linear
layers are added as they are read. PEFT merges every other adapter (DoRA, convolutions, embeddings,
biases, whole modules, other methods than LoRA), with the whole model in memory.
"""

from __future__ import annotations

from blr_analysis.adapters.base_names import translate
from blr_analysis.adapters.opening import open_adapter
from blr_analysis.adapters.products import PAIR, PREFIX, stores_transposed
from blr_analysis.adapters.settings import (
    CONFIG,
    PLAIN_SETTINGS,
    TENSORS,
    is_adapter,
    read_entries,
    scaling_of,
    switched_on,
)
from blr_analysis.adapters.sources import Adapted, Untied

__all__ = [
    "CONFIG",
    "PAIR",
    "PLAIN_SETTINGS",
    "PREFIX",
    "TENSORS",
    "Adapted",
    "Untied",
    "is_adapter",
    "open_adapter",
    "read_entries",
    "scaling_of",
    "stores_transposed",
    "switched_on",
    "translate",
]
