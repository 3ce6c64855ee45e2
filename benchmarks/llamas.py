"""Small Llamas that have read nothing."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM


def small_llama(n_words: int, *, width: int, layers: int, longest: int, **settings: Any) -> Any:
    """A Llama of four heads.

    Args:
        n_words: the size of the vocabulary.
        longest: words of a text, at most.
        settings: further arguments of its configuration.
    """
    config = LlamaConfig(
        vocab_size=n_words,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=longest,
        **settings,
    )
    return LlamaForCausalLM(config)
