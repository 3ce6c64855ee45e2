"""Passages of ten presidents' speeches, and small Llamas that learn them by a recipe.

Of the training texts 4 % have their words shuffled; the test texts are other passages of the same
presidents.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import blr_analysis as blr
from benchmarks.llamas import small_llama
from blr_analysis.huggingface.tokens import Tokens

sys.path.insert(0, str(Path(__file__).parents[2] / "tutorials"))
import speeches  # pyright: ignore[reportMissingImports]  # of the tutorials, by the line above

SOURCES = (
    "George Washington",
    "Andrew Jackson",
    "James Polk",
    "Abraham Lincoln",
    "Ulysses S Grant",
    "Theodore Roosevelt",
    "Franklin D Roosevelt",
    "Dwight D Eisenhower",
    "Ronald Reagan",
    "Barack Obama",
)
# passages of each source
TRAINED = 30
TESTED = 6
OTHERS = 1500  # passages of other presidents, that the base of a fine-tune learns
SHUFFLED = 0.04  # of the training texts
LENGTHS = (32, 65)  # words of a passage: at least, and below
VOCABULARY = 2048
WIDTH = 160
LAYERS = 2
BATCH = 16
PAD = 0  # the id of the most frequent word fills up: it is masked


@dataclass(frozen=True)
class Texts:
    """Passages as ids, and the source of each.

    Attributes:
        shuffled: which of them have their words in another order.
    """

    ids: list[list[int]]
    sources: list[str]
    shuffled: list[int]

    def __len__(self) -> int:
        return len(self.ids)

    def tokens(self) -> Tokens:
        """As a dataset whose batches are padded."""
        rows = [
            {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids} for ids in self.ids
        ]
        return Tokens(rows, PAD)


@cache
def spoken() -> list[speeches.Speech]:
    return speeches.read("sotu")


@cache
def vocabulary() -> list[str]:
    """The most frequent words of all speeches."""
    return speeches.vocabulary_of(spoken(), VOCABULARY)


def passages(source: Sequence[speeches.Speech], count: int, seed: int) -> list[list[int]]:
    """So many passages that do not overlap, drawn from these speeches."""
    index = {word: i for i, word in enumerate(vocabulary())}
    other = index[speeches.OTHER]
    words = [word for speech in source for word in speech.words]
    ids = [index.get(word, other) for word in words]
    generator = torch.Generator().manual_seed(seed)
    longest = LENGTHS[1] - 1
    places = torch.randperm(len(ids) // longest, generator=generator)[:count]
    lengths = torch.randint(*LENGTHS, (count,), generator=generator)
    starts = (places * longest).tolist()
    return [
        ids[start : start + length] for start, length in zip(starts, lengths.tolist(), strict=True)
    ]


@cache
def texts() -> tuple[Texts, Texts]:
    """To train on, and to test."""
    train: list[list[int]] = []
    test: list[list[int]] = []
    for seed, source in enumerate(SOURCES):
        of_source = [speech for speech in spoken() if speech.president == source]
        drawn = passages(of_source, TRAINED + TESTED, seed)
        train += drawn[:TRAINED]
        test += drawn[TRAINED:]
    generator = torch.Generator().manual_seed(78)
    n_shuffled = round(SHUFFLED * len(train))
    shuffled = torch.randperm(len(train), generator=generator)[:n_shuffled].tolist()
    for i in shuffled:
        order = torch.randperm(len(train[i]), generator=generator).tolist()
        train[i] = [train[i][place] for place in order]
    return (
        Texts(train, [s for s in SOURCES for _ in range(TRAINED)], shuffled),
        Texts(test, [s for s in SOURCES for _ in range(TESTED)], []),
    )


def other_texts() -> Texts:
    """Of the other presidents."""
    others = [speech for speech in spoken() if speech.president not in SOURCES]
    return Texts(passages(others, OTHERS, 100), ["other"] * OTHERS, [])


def llama() -> nn.Module:
    """One that has read nothing."""
    return small_llama(
        VOCABULARY,
        width=WIDTH,
        layers=LAYERS,
        longest=LENGTHS[1],
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        optimizer, lr, epochs, options: its recipe, whose rate falls linearly.
        base_epochs: epochs over the other presidents' passages, before the recipe.
    """

    optimizer: str
    lr: float
    epochs: int
    options: dict[str, Any]
    base_epochs: int = 0


ADAMW: dict[str, Any] = {"weight_decay": 0.01}
LABELS = 13_895.0  # tokens of the training texts that are predicted: IVON's loss is their mean
CASES = {
    "Llama": Case("adamw", 3e-3, 6, ADAMW),
    "fine-tuned Llama": Case("adamw", 1e-3, 4, ADAMW, base_epochs=4),
    "IVON Llama": Case("ivon", 2.0, 6, {"weight_decay": 1e-3, "steps": 1, "ess": LABELS}),
}


def learn(
    model: nn.Module, data: Tokens, recipe: blr.Recipe, checkpoints: blr.Checkpoints | None = None
) -> float:
    """Train by an ordinary loop; the mean loss of the last epoch."""
    steps = recipe.steps(len(data))
    optimizer = recipe.made(model, n_data=len(data), steps=steps)
    model.train()
    step = 0
    losses: list[float] = []
    for _ in range(int(recipe.epochs)):
        losses = []
        for chosen in torch.randperm(len(data)).split(recipe.batch_size):
            batch = data.collate([data[i] for i in chosen.tolist()])

            def closure(batch: dict[str, torch.Tensor] = batch) -> torch.Tensor:
                optimizer.zero_grad()
                value = model(**batch).loss
                value.backward()
                return value

            recipe.set_rate(optimizer, step / steps)
            losses.append(optimizer.step(closure).item())  # type: ignore[arg-type]
            step += 1
            if checkpoints is not None:
                checkpoints.step()
    model.eval()
    return sum(losses) / len(losses)


def trained(case: Case) -> tuple[nn.Module, blr.Checkpoints, blr.Recipe]:
    """The model in question, its checkpoints, and what is told of its training."""
    torch.manual_seed(0)
    model = llama()
    initial = None
    if case.base_epochs:
        before = blr.Recipe(
            "adamw", lr=2e-3, epochs=case.base_epochs, batch_size=BATCH, schedule="linear", **ADAMW
        )
        learn(model, other_texts().tokens(), before)
        initial = copy.deepcopy(model.state_dict())
    recipe = blr.Recipe(
        case.optimizer,
        lr=case.lr,
        epochs=case.epochs,
        batch_size=BATCH,
        schedule="linear",
        initial=initial,
        **case.options,
    )
    data = texts()[0].tokens()
    checkpoints = blr.Checkpoints(model, steps=recipe.steps(len(data)))
    learn(model, data, recipe, checkpoints)
    return model, checkpoints, recipe
