"""How well an estimate agrees with retraining.

Every score compares arrays that somebody else computed; nothing here knows of models. Sign:
``influence[i, j]`` is the change of test loss j when training example i is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DRAWS = 1000  # of the bootstrap


@dataclass(frozen=True)
class Scored:
    """A mean over test examples and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"


def ranks(values: Tensor) -> Tensor:
    """Ranks along the first dimension, ties sharing their mean."""
    values = values.double()
    order = values.argsort(0)
    ordered = values.gather(0, order)
    place = torch.arange(len(values), dtype=torch.float64)
    out = torch.empty_like(values)
    columns = range(1) if values.ndim == 1 else range(values.shape[1])
    for column in columns:
        sorted_, where = (t if t.ndim == 1 else t[:, column] for t in (ordered, order))
        _, group, count = torch.unique_consecutive(sorted_, return_inverse=True, return_counts=True)
        mean = torch.zeros(len(count), dtype=torch.float64).index_add_(0, group, place) / count
        target = out if out.ndim == 1 else out[:, column]
        target[where] = mean[group]
    return out


def pearson(a: Tensor, b: Tensor) -> Tensor:
    """Correlation along the first dimension; nan where one side is constant."""
    a, b = (t.double() - t.double().mean(0) for t in (a, b))
    return (a * b).sum(0) / (a.norm(dim=0) * b.norm(dim=0))


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Rank correlation along the first dimension; nan where one side is constant."""
    return pearson(ranks(a), ranks(b))


def bootstrap(values: Tensor, seed: int = 0) -> Scored:
    """The mean of finite values, and the spread of the means of resamplings of them."""
    values = values[values.isfinite()].double()
    if not len(values):
        return Scored(math.nan, math.nan)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(values), (DRAWS, len(values)), generator=generator)
    return Scored(float(values.mean()), float(values[drawn].mean(1).std()))


def linear_datamodeling(influence: Tensor, kept: Tensor, losses: Tensor) -> Scored:
    """Rank correlation of retrained losses with what is left of the influences, per test example.

    Args:
        influence: ``[N, M]``.
        kept: which examples each retraining had, bool ``[K, N]``.
        losses: of the test examples after each retraining, ``[K, M]``.

    Source: Park et al., ICML 2023 (TRAK), Definition 2.3.
    """
    predicted = -kept.to(influence.dtype) @ influence
    found = spearman(predicted, losses)
    # an estimate without any spread for an example predicts nothing of it
    blind = ~found.isfinite() & (losses.double().std(0) > 0)
    return bootstrap(torch.where(blind, 0.0, found))


def ceiling(losses: Tensor, again: Tensor) -> Scored:
    """What another seed's retrainings reach as predictor: no additive score can expect more."""
    return bootstrap(spearman(again, losses))


@dataclass(frozen=True)
class Changes:
    """Agreement of estimated with true changes of loss.

    Attributes:
        pearson, spearman: over the examples (or classes).
        total: Σ estimated / Σ true.
        relative: mean of |estimated − true| / |true|.
    """

    pearson: float
    spearman: float
    total: float
    relative: float


def changes(estimated: Tensor, true: Tensor) -> Changes:
    """Estimated against true changes, one number per example or class."""
    estimated, true = estimated.double(), true.double()
    return Changes(
        float(pearson(estimated, true)),
        float(spearman(estimated, true)),
        float(estimated.sum() / true.sum()),
        float(((estimated - true).abs() / true.abs()).mean()),
    )
