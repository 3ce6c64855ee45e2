"""Networks and data of `benchmarks.papers.recipe`: pictures, letters and sentences."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks.cases import mlp
from benchmarks.merging.rated import rated_texts
from benchmarks.merging.sentiments import N_FIXED, LastLayer, minilm, read_by
from benchmarks.merging.texts import LETTERS, passages
from benchmarks.papers import clothes

Data = tuple[Tensor, Tensor]
FRESH = (0.001, 0.003, 0.01)
TUNED = (0.0001, 0.0003, 0.001)


@dataclass(frozen=True)
class Case:
    """A network to train, and the data; one of the rates is chosen on ``validation``."""

    network: Callable[[], nn.Module]
    train: Data
    validation: Data
    test: Data
    epochs: int
    batch: int
    rates: tuple[float, ...] = FRESH
    hess_init: Any = 1.0


class Letters(nn.Module):
    """A language model of characters: one LSTM."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 24)
        self.lstm = nn.LSTM(24, 64, batch_first=True)
        self.output = nn.Linear(64, characters)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.lstm(self.embedding(x))[0])


class Llama(nn.Module):
    """Logits of a small Llama."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=characters, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                num_attention_heads=4, max_position_embeddings=64,
            )
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def parts_of(x: Tensor, y: Tensor, *counts: int) -> tuple[Data, Data, Data]:
    """So many rows for training, validation and test."""
    train, validation, test = zip(x.split(counts), y.split(counts), strict=True)
    return train, validation, test


def digits(small: bool) -> Case:
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x = ((x - 4.9) / 6).float()[order]
    parts = parts_of(x, y[order], 1000, 300, 497)
    return Case(lambda: mlp(64, 48, 24, 10), *parts, 2 if small else 25, 50)


def images(small: bool) -> Case:
    x, y, x_test, y_test = clothes(500 if small else 4000)
    n = len(x) // 2
    test = (x_test[:4000], y_test[:4000])
    return Case(mlp_of_images, (x[:n], y[:n]), (x[n:], y[n:]), test, 2 if small else 25, 50)


def mlp_of_images() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def many_images(small: bool) -> Case:
    """All 60,000, of which 5,000 choose the rate."""
    x, y, *test = clothes(500 if small else 60_000)
    n = len(x) * 11 // 12
    epochs = 1 if small else 5
    return Case(mlp_of_images, (x[:n], y[:n]), (x[n:], y[n:]), (test[0], test[1]), epochs, 100)


def letters_of(ids: Tensor) -> Data:
    """Letters of passages, and the next letters."""
    return ids[:, :-1], ids[:, 1:]


def letters(small: bool) -> Case:
    ids = passages("films")
    train = letters_of(ids[: 64 if small else 800])
    validation = letters_of(ids[-1200:-600])
    test = letters_of(ids[-600:])
    network = partial(Letters, len(LETTERS))
    return Case(network, train, validation, test, 2 if small else 12, 32)


def llama(small: bool) -> Case:
    """Fine-tuned to editorials after films."""
    torch.manual_seed(0)
    base = Llama(len(LETTERS))
    _read(base, passages("films")[: 64 if small else 1500], 2 if small else 5)
    ids = passages("editorials")
    train = letters_of(ids[: 32 if small else 400])
    validation = letters_of(ids[-1200:-600])
    test = letters_of(ids[-600:])
    network = partial(copy.deepcopy, base)
    return Case(network, train, validation, test, 2 if small else 10, 16, TUNED, "weights")


def _read(model: nn.Module, ids: Tensor, epochs: int) -> None:
    """A training by AdamW, of the base that is fine-tuned."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for rows in torch.randperm(len(ids), generator=generator).split(32):
            x, y = letters_of(ids[rows])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()


def sentiment(small: bool) -> Case:
    """The last of MiniLM's layers, fine-tuned to what readers think of films."""
    counts = (20, 10, 10) if small else (400, 300, 600)
    torch.manual_seed(0)
    folder, trunk = minilm()
    encoder: Any = trunk.encoder
    network = LastLayer(encoder.layer[N_FIXED]).requires_grad_(True)
    encoder.layer = encoder.layer[:N_FIXED]
    rated = rated_texts("films")
    order = torch.randperm(len(rated))[: sum(counts)]
    chosen = [rated[k] for k in order.tolist()]
    x = read_by(trunk, folder, [text.text for text in chosen])
    y = torch.tensor([int(text.positive) for text in chosen])
    parts = parts_of(x, y, *counts)
    return Case(partial(copy.deepcopy, network), *parts, 1 if small else 3, 16, TUNED, "weights")


CASES = {
    "digits": digits,
    "clothes": images,
    "all clothes": many_images,
    "letters": letters,
    "llama": llama,
    "sentiment": sentiment,
}
