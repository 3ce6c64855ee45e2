"""What is trained, on what, and by which recipe; a case is one row of :data:`CASES`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import blr_analysis as blr
from benchmarks.cases import mlp as smooth
from benchmarks.resnet import Block, conv_norm

WRONG = 0.04  # of the training targets are another example's
TRAIN = 700


class Data(NamedTuple):
    """Inputs and targets to train on and held out, what is taken out together, and the wrong."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    groups: Tensor
    wrong: Tensor


def digits(n: int = TRAIN, test: int = TRAIN, shape: tuple[int, ...] = (64,)) -> Data:
    """scikit-learn's, the rest of them held out; groups are the classes."""
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(77))
    x = ((x[order] - 4.9) / 6).float().view(-1, *shape)
    y = y[order]
    return _spoilt(x[:n], y[:n], x[n : n + test], y[n : n + test], y[:n])


def digit_images() -> Data:
    return digits(shape=(1, 8, 8))


def diabetes() -> Data:
    """442 patients; groups are fifths of the body mass index."""
    x, y = (torch.tensor(part).float() for part in load_diabetes(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(77))
    x = x[order] / x.std(0)
    y = ((y[order] - y.mean()) / y.std())[:, None]
    fifth = x[:300, 2].argsort().argsort() * 5 // 300
    return _spoilt(x[:300], y[:300], x[300:], y[300:], fifth)


def table(load: Callable[..., Any], train: int, classes: int, share: float) -> Data:
    """A table of scikit-learn's, standardised, with more wrong labels; groups are the classes."""
    x, y = (torch.tensor(part) for part in load(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(77))
    x = ((x - x.mean(0)) / x.std(0)).float()[order]
    y = y[order]
    parts = x[:train], y[:train], x[train:], y[train:]
    return _spoilt(*parts, y[:train], classes=classes, share=share)


def _spoilt(
    x: Tensor,
    y: Tensor,
    x_test: Tensor,
    y_test: Tensor,
    groups: Tensor,
    classes: int = 10,
    share: float = WRONG,
) -> Data:
    generator = torch.Generator().manual_seed(78)
    wrong = torch.randperm(len(x), generator=generator)[: round(share * len(x))]
    own = y.clone()
    if y.is_floating_point():
        own[wrong] = -2 * y[wrong].sign()
    else:
        shift = torch.randint(1, classes, wrong.shape, generator=generator)
        own[wrong] = (y[wrong] + shift) % classes
    return Data(x, own, x_test, y_test, groups, wrong)


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutions() -> nn.Sequential:
    first = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(64, 10))


def normalised() -> nn.Sequential:
    first = nn.Linear(64, 80), nn.BatchNorm1d(80), nn.ReLU(), nn.Dropout(0.15)
    return nn.Sequential(*first, nn.Linear(80, 40), nn.ReLU(), nn.Linear(40, 10))


def residual() -> nn.Sequential:
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    stem = nn.Sequential(conv_norm(1, 8, 3), nn.ReLU())
    return nn.Sequential(stem, Block(8, 8, 1), Block(8, 16, 2), *pool, nn.Linear(16, 10))


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        recipe: how it is trained; with ``patience`` its epochs are the most, and those whose
            weights did best on 97 other digits for so many epochs are kept.
        base: epochs of a training on 400 digits a quarter turned, before the recipe.
        delta: the weights minimise Σ ℓ_i + δ/2 ‖θ‖² in float64, and nothing else is told.
    """

    data: Callable[[], Data]
    network: Callable[[], nn.Module]
    recipe: dict[str, Any]
    likelihood: str = "categorical"
    patience: int = 0
    base: int = 0
    delta: float = 0.0


IVON = {"lr": 0.2, "weight_decay": 1 / TRAIN, "steps": 1, "schedule": "cosine"}
NARROW = {"optimizer": "adamw", "lr": 2e-3, "weight_decay": 1e-2}
CASES = {
    "AdamW MLP": Case(digits, lambda: mlp(64, 64, 10), {**NARROW, "epochs": 25, "batch_size": 32}),
    "IVON MLP": Case(
        *(digits, lambda: mlp(64, 64, 10)),
        {"optimizer": "ivon", "epochs": 30, "batch_size": 32, **IVON},
    ),
    "SGD CNN": Case(
        *(digit_images, convolutions),
        {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "epochs": 15, "batch_size": 32,
         "schedule": "cosine"},
    ),
    "BatchNorm": Case(
        digits, normalised, {**NARROW, "epochs": 60, "batch_size": 40}, patience=8
    ),
    "ResNet": Case(
        *(digit_images, residual),
        {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4, "epochs": 15,
         "batch_size": 32, "schedule": "cosine"},
    ),
    "converged": Case(lambda: digits(400), lambda: smooth(64, 16, 10).double(), {}, delta=3.0),
    "fine-tuned": Case(
        *(lambda: digits(500), lambda: mlp(64, 64, 10)),
        {"optimizer": "adamw", "lr": 3e-3, "weight_decay": 1e-2, "epochs": 15, "batch_size": 32,
         "schedule": "linear"},
        base=25,
    ),
    "regression": Case(
        *(diabetes, lambda: mlp(10, 32, 1)),
        {"optimizer": "adamw", "lr": 5e-3, "weight_decay": 1e-2, "epochs": 40, "batch_size": 32},
        likelihood="gaussian",
    ),
    "wine": Case(
        *(lambda: table(load_wine, 130, 3, 0.1), lambda: mlp(13, 32, 3)),
        {"optimizer": "adam", "lr": 5e-3, "epochs": 40, "batch_size": 16},
    ),
    "breast cancer": Case(
        *(lambda: table(load_breast_cancer, 400, 2, 0.12), lambda: mlp(30, 32, 2)),
        {"optimizer": "adamw", "lr": 3e-3, "weight_decay": 1e-2, "epochs": 30, "batch_size": 32},
    ),
}  # fmt: skip


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of every example; a half of the squared error, or the cross-entropy."""
    with torch.no_grad():
        f = model.eval()(x)
    if y.is_floating_point():
        return 0.5 * (f - y).double().square().sum(1)
    return cross_entropy(f.double(), y, reduction="none")


def trained(case: Case, data: Data) -> tuple[nn.Module, blr.Checkpoints, blr.Recipe]:
    """The model in question, by an ordinary loop, its checkpoints, and what is told of it."""
    torch.manual_seed(0)
    model = case.network()
    how = case.recipe
    initial = None
    if case.base:
        model, initial = turned(case, model)
    recipe = blr.Recipe(**how, initial=initial)
    n = len(data.x)
    best = float("inf")
    kept = 0
    each = -(-n // recipe.batch_size)
    steps = recipe.epochs * each
    optimizer = recipe.made(model, n_data=n, steps=steps)
    checkpoints = blr.Checkpoints(model, steps=steps, structure="kron")
    loss = nn.MSELoss() if case.likelihood == "gaussian" else nn.CrossEntropyLoss()
    held = digits(TRAIN + 700, 97)
    for epoch in range(recipe.epochs):
        for k, batch in enumerate(torch.randperm(n).split(recipe.batch_size)):

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                value = loss(model(data.x[batch]), data.y[batch])
                value.backward()
                return value

            model.train()
            recipe.set_rate(optimizer, (epoch * each + k) / steps)
            optimizer.step(closure)  # type: ignore[arg-type]
            checkpoints.step()
        if case.patience:
            now = float(losses(model, held.x_test, held.y_test).mean())
            if now < best:
                best = now
                kept = epoch + 1
                state = copy.deepcopy(model.state_dict())
            if epoch + 1 - kept == case.patience:
                break
    if case.patience:
        model.load_state_dict(state)
        recipe = blr.Recipe(**how | {"epochs": kept})
    return model.eval(), checkpoints, recipe


def turned(case: Case, model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """The base of a fine-tune: 400 other digits, a quarter turned."""
    other = digits(TRAIN + 700, 397)
    x = other.x_test.view(-1, 8, 8).rot90(1, (1, 2)).reshape(-1, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    for _ in range(case.base):
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), other.y_test[batch]).backward()
            optimizer.step()
    return model, copy.deepcopy(model.state_dict())
