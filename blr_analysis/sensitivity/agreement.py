"""How well scores agree with retraining: rank correlations over retrainings, with their errors.

    c_j = rank correlation over k of −Σ_{i∈S_k} a_ij and ℓ_j(S_k),     score = mean_j c_j

S_k are the examples of retraining k, ℓ_j(S_k) is the loss of test example j after it, a_ij the rise
of ℓ_j that the scores predict for leaving i out. The squared standard error of the score is the
variance of a jackknife over retrainings, plus the variance of c_j over M test examples, over M. The
score that a method reaches which predicts all but the noise is the root of the reliability of a
mean over S seeds, by Spearman and Brown:

    ceiling = √( S r / (1 + (S − 1) r) ),     r the mean rank correlation of two seeds
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist

import torch
from torch import Tensor

FOUR_OF_FIVE = NormalDist().inv_cdf(0.9)  # standard errors on either side that hold 80 %


@dataclass(frozen=True)
class Agreement:
    """The linear datamodeling score of one method.

    Attributes:
        name: of the method.
        value: the mean rank correlation, between -1 and 1; NaN where every loss is always the same.
        error: its standard error, over retrainings and test examples.
        by_test: the rank correlation of every test example, ``[M]``; NaN where retraining always
            gave the same loss.
    """

    name: str
    value: float
    error: float
    by_test: Tensor

    @property
    def low(self) -> float:
        """The lower end of a range that should hold the score in four of five cases."""
        return max(self.value - FOUR_OF_FIVE * self.error, -1.0)

    @property
    def high(self) -> float:
        """Its upper end."""
        return min(self.value + FOUR_OF_FIVE * self.error, 1.0)


def agreement_of(name: str, matrix: Tensor, halves: Tensor, losses: Tensor) -> Agreement:
    """How well a method predicts retrained losses.

    Args:
        name: of the method.
        matrix: a_ij, ``[N, M]``.
        halves: which examples each retraining had, bool ``[K, N]``.
        losses: of the test examples after it, ``[K, S, M]`` for S seeds.
    """
    predicted = -halves.to(torch.float64) @ matrix.to(torch.float64)
    return _with_error(name, rank_correlations, predicted, losses.mean(1))


def agreement_of_seeds(losses: Tensor) -> Agreement:
    """How well the losses after one seed's retrainings predict those after another's.

    Args:
        losses: ``[K, S, M]``, of two seeds or more.
    """
    return _with_error("one seed", _correlations_of_seeds, losses)


def _correlations_of_seeds(losses: Tensor) -> Tensor:
    """The mean rank correlation of two seeds of each test example, ``[M]``."""
    pairs = combinations(losses.unbind(1), 2)
    return torch.stack([rank_correlations(first, second) for first, second in pairs]).mean(0)


def _with_error(name: str, measure: Callable[..., Tensor], *columns: Tensor) -> Agreement:
    """The mean of a measure over test examples, and its standard error.

    Args:
        measure: of retrainings, a number for each test example.
        columns: what it takes; their first dimension are the retrainings.
    """
    by_test = measure(*columns)
    defined = by_test[by_test.isfinite()]
    if not len(defined):
        return Agreement(name, math.nan, math.nan, by_test)
    n_retrained = len(columns[0])
    means_without_one = []
    for k in range(n_retrained):
        stays = torch.arange(n_retrained) != k
        means_without_one.append(measure(*(column[stays] for column in columns)).nanmean())
    variance = (n_retrained - 1) * float(torch.stack(means_without_one).var(correction=0))
    if len(defined) > 1:
        variance += float(defined.var()) / len(defined)
    return Agreement(name, float(defined.mean()), math.sqrt(variance), by_test)


def rank_correlations(predicted: Tensor, losses: Tensor) -> Tensor:
    """Spearman's correlation along the first dimension, ``[M]``: 0 where what is predicted is
    always the same, NaN where the losses are."""
    centre = (len(losses) + 1) / 2
    predicted_ranks = ranks_of(predicted) - centre
    loss_ranks = ranks_of(losses) - centre
    loss_norms = loss_ranks.norm(dim=0)
    norms = predicted_ranks.norm(dim=0) * loss_norms
    correlations = (predicted_ranks * loss_ranks).sum(0) / norms.clamp_min(1e-12)
    return correlations.masked_fill(loss_norms == 0, math.nan)


def ranks_of(values: Tensor) -> Tensor:
    """Ranks along the first dimension, from 1; equal values share their mean rank.

    >>> ranks_of(torch.tensor([[3.0], [1.0], [3.0]])).flatten().tolist()
    [2.5, 1.0, 2.5]
    """
    n_below = (values[:, None] > values).sum(1)
    n_equal = (values[:, None] == values).sum(1)
    return n_below + (n_equal.double() + 1) / 2


def ceiling_of(correlation: float, seeds: int) -> float:
    """The score of noise-free losses, by the rank correlation of two seeds; 0 where they do not
    agree.

    >>> ceiling_of(0.25, seeds=1), round(ceiling_of(0.25, seeds=2), 3)
    (0.5, 0.632)
    """
    r = min(max(correlation, 0.0), 1.0)  # NaN stays NaN
    return math.sqrt(seeds * r / (1 + (seeds - 1) * r))
