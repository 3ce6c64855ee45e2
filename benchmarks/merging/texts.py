"""Three sorts of text, letter by letter, and a small Llama for them, whole or by adapters.

The texts are those of :mod:`benchmarks.merging.rated`.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.merging.rated import scored_texts
from benchmarks.merging.trained import Data, Trained, fine_tuned, fitted, joined

SORTS = ("films", "products", "editorials")
LETTERS = "\n abcdefghijklmnopqrstuvwxyz.,'!?-0"
LENGTH = 32
# passages of each sort
FIRST = 500
TRAIN = 1000
VALIDATE = 200
TEST = 300
BASE_EPOCHS = 8
EPOCHS = 6
ADAPTER_EPOCHS = 8
RANKS = {"films": (8, False), "products": (4, True), "editorials": (4, False)}  # and stabilised?
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def text_of(sort: str) -> str:
    """All text of a sort, in small letters, from the cache or fetched with pip."""
    return "\n".join(text.lower() for _, text in scored_texts(sort))


def passages(sort: str) -> Tensor:
    """Letters by number, ``[N, LENGTH]``; digits are one letter, what is no letter is left out."""
    index = {letter: number for number, letter in enumerate(LETTERS)}
    index |= dict.fromkeys("123456789", index["0"])
    ids = torch.tensor([index[letter] for letter in text_of(sort) if letter in index])
    count = len(ids) // LENGTH
    return ids[: count * LENGTH].view(count, LENGTH)


def llama() -> nn.Module:
    """Two layers of width 48."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(LETTERS), hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def read_on(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean loss of the next letter."""
    logits = model(x).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), y[:, 1:].flatten())


def _base(seed: int) -> tuple[nn.Module, dict[str, dict[str, Data]]]:
    torch.manual_seed(seed)
    data = {}
    for sort in SORTS:
        ids = passages(sort)
        rows = torch.randperm(len(ids))[: FIRST + TRAIN + VALIDATE + TEST]
        parts = ids[rows].split([FIRST, TRAIN, VALIDATE, TEST])
        names = ("first", "train", "validate", "test")
        data[sort] = {name: (part, part) for name, part in zip(names, parts, strict=True)}
    mixed = joined([part["first"] for part in data.values()])
    return fitted(llama(), mixed, read_on, epochs=BASE_EPOCHS, seed=seed, rate=3e-3), data


def texts_of(seed: int) -> Trained:
    """A base that read a little of every sort, and a model that read on in each."""
    base, data = _base(seed)
    return fine_tuned(base, data, read_on, epochs=EPOCHS, seed=seed, rate=3e-3)


def adapted_texts(seed: int) -> Trained:
    """The same by adapters, which are given as the weights that they make of the base.

    Only adapted weights are trainable, so that precisions are of these alone.
    """
    from peft import LoraConfig, get_peft_model

    base, data = _base(seed)
    models = {}
    for sort, part in data.items():
        rank, is_stabilised = RANKS[sort]
        config = LoraConfig(
            r=rank, lora_alpha=2 * rank, use_rslora=is_stabilised, target_modules=ADAPTED
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tuned = get_peft_model(copy.deepcopy(base), config)
            tuned = fitted(
                tuned, part["train"], read_on, epochs=ADAPTER_EPOCHS, seed=seed, rate=5e-3
            )
            model = cast(Any, tuned).merge_and_unload()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.split(".")[-2] in ADAPTED)
        models[sort] = model
    return Trained(base, models, data)
