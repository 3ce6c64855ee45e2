"""Tiny random Hugging Face models of several kinds, saved as folders with a tokenizer of words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WORDS = ("the", "a", "film", "book", "was", "is", "not", "very", "good", "bad", "dull", "bright")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def tokenizer(*, pairs: bool = True, segments: bool = True) -> Any:
    """Words of :data:`WORDS`, split at spaces; ``pairs``: [CLS] and [SEP] around them;
    ``segments``: with the ids that say which text of a pair a token belongs to."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
    actual = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    actual.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if pairs:
        actual.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=actual,
        model_max_length=16,
        model_input_names=["input_ids", *["token_type_ids"][:segments], "attention_mask"],
        **names,
    )


def build(kind: str, task: str = "classification", seed: int = 0, **settings: Any) -> Any:
    """A random model small enough to be compared with brute force, with weights far from their
    initial scale, so that no gradient vanishes."""
    import transformers

    small: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"intermediate_size": 12, "max_position_embeddings": 16}
    family, size = {
        "bert": ("Bert", small),
        "gpt2": ("GPT2", {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}),
        "llama": ("Llama", {**small, "num_key_value_heads": 1}),
    }[kind]
    size |= {"vocab_size": len(SPECIAL) + len(WORDS), "pad_token_id": 0}
    if kind != "bert":
        size |= {"bos_token_id": 2, "eos_token_id": 3}
    size |= settings
    if task == "causal_lm":
        head = "LMHeadModel" if kind == "gpt2" else "ForCausalLM"
    else:
        head = "ForSequenceClassification"
        size = {"num_labels": 3, **size}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = getattr(transformers, f"{family}Config")(**size)
        model = getattr(transformers, family + head)(config).eval()
        for p in model.parameters():
            p.data.add_(torch.randn_like(p), alpha=0.3)
    return model


def save(folder: Path, model: Any, *, pairs: bool = True) -> Path:
    """Model and tokenizer as ``save_pretrained`` leaves them."""
    model.save_pretrained(folder)
    segments = model.config.model_type == "bert"
    tokenizer(pairs=pairs, segments=segments).save_pretrained(folder)
    return folder


def sentences(n: int, *, low: int = 2, high: int = 9, seed: int = 0) -> list[str]:
    """Random words."""
    g = torch.Generator().manual_seed(seed)
    counts = torch.randint(low, high + 1, (n,), generator=g).tolist()
    chosen = [torch.randint(len(WORDS), (count,), generator=g).tolist() for count in counts]
    return [" ".join(WORDS[i] for i in row) for row in chosen]
