"""The demo's data, network and recipe: 1,797 digits of 8×8 pixels, 1,898 weights, IVON.

Five annotators labelled the digits, and one of them, eve, was careless: a fifth of her labels is
wrong.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blr_analysis.checkpoints import Checkpoints
from blr_analysis.progress import track
from blr_analysis.recipe import Recipe

TRAIN_SHARE = 2 / 3
EPOCHS = 40
BATCH = 100
ANNOTATORS = ("ann", "bob", "cara", "dan", "eve")
CARELESS = "eve"
SHARE_WRONG = 0.2  # of her labels


@dataclass(frozen=True)
class Digits:
    """The demo's training and test data.

    Attributes:
        images, test_images: ``[N, 1, 8, 8]`` in 0 … 1.
        labels, test_labels: ``[N]``.
        rows, test_rows: their rows in scikit-learn's data, ``[N]``.
        annotators, test_annotators: who labelled each digit.
        planted: which training labels were planted wrong, ``[N]`` bool.
    """

    images: Tensor
    labels: Tensor
    rows: Tensor
    annotators: list[str]
    planted: Tensor
    test_images: Tensor
    test_labels: Tensor
    test_rows: Tensor
    test_annotators: list[str]


def load(seed: int = 0) -> Digits:
    """scikit-learn's digits, split at random: two thirds to train, one third to test.

    >>> data = load()
    >>> len(data.labels), len(data.test_labels)
    (1198, 599)
    """
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    truth = torch.tensor(y, dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(truth), generator=generator)
    annotators, labels = annotated(truth, generator)
    n = int(len(order) * TRAIN_SHARE)
    train_rows = order[:n]
    test_rows = order[n:]
    return Digits(
        images=images[train_rows],
        labels=labels[train_rows],
        rows=train_rows,
        annotators=[annotators[i] for i in train_rows],
        planted=(labels != truth)[train_rows],
        test_images=images[test_rows],
        test_labels=labels[test_rows],
        test_rows=test_rows,
        test_annotators=[annotators[i] for i in test_rows],
    )


def annotated(truth: Tensor, generator: torch.Generator) -> tuple[list[str], Tensor]:
    """The annotator of each digit, and the labels: a share of eve's labels are wrong."""
    n = len(truth)
    people = torch.randint(len(ANNOTATORS), (n,), generator=generator).tolist()
    annotators = [ANNOTATORS[person] for person in people]
    is_careless = torch.tensor([name == CARELESS for name in annotators])
    is_wrong = is_careless & (torch.rand(n, generator=generator) < SHARE_WRONG)
    wrong_labels = (truth + torch.randint(1, 10, (n,), generator=generator)) % 10
    return annotators, torch.where(is_wrong, wrong_labels, truth)


def network(seed: int = 0) -> nn.Sequential:
    """Two convolutions and a linear read-out, 1,898 weights; torch's generator stays where it is.

    >>> sum(p.numel() for p in network().parameters())
    1898
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.Tanh(),
            nn.Conv2d(8, 16, 3),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(64, 10),
        )


def recipe(n: int, epochs: int = EPOCHS) -> Recipe:
    """The recipe of the training on n digits."""
    return Recipe(
        "ivon",
        lr=0.3,
        epochs=epochs,
        batch_size=BATCH,
        schedule="cosine",
        hess_init=0.12,
        beta2=0.999,
        weight_decay=1.0 / n,
    )


def train(
    images: Tensor,
    labels: Tensor,
    *,
    seed: int = 0,
    epochs: int = EPOCHS,
    folder: str | os.PathLike[str] | None = None,
) -> tuple[nn.Module, Checkpoints]:
    """Train a new network from scratch by :func:`recipe`.

    Returns:
        The network in eval mode, and its checkpoints, which are in the folder if there is one.
    """
    n = len(labels)
    model = network(seed)
    steps = epochs * math.ceil(n / BATCH)
    optimizer: Any = recipe(n, epochs).made(model, n_data=n, steps=steps)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    checkpoints = Checkpoints(model, steps=steps, folder=folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in track(range(epochs), total=epochs, label="training"):
            for chosen in torch.randperm(n).split(BATCH):
                with optimizer.sampled_params(train=True):
                    optimizer.zero_grad()
                    F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
                optimizer.step()
                schedule.step()
                checkpoints.step()
    optimizer.zero_grad()
    return model.eval(), checkpoints
