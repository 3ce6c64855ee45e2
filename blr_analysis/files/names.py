"""The names of tensors, and the modules that they tell."""

from __future__ import annotations

# The modules whose weights have a row for each token.
TOKEN_TABLES = {
    "embed",
    "embed_in",
    "embed_tokens",
    "embedding",
    "embeddings",
    "shared",
    "wte",
    "tok_embeddings",
    "token_embedding",
    "word_embedding",
    "word_embeddings",
    "decoder",
    "embed_out",
    "lm_head",
    "output",
    "output_projection",
}


def module_word(name: str) -> str:
    """The last word of a tensor's module."""
    module, _, _ = name.rpartition(".")
    _, _, word = module.rpartition(".")
    return word
