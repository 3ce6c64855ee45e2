"""Categorical distributions: one of K classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural
from blr_analysis.learning_rule.families.domain import expectation_inside, finite, points
from blr_analysis.learning_rule.families.drawing import many, uniform


@dataclass(frozen=True, eq=False)
class CategoricalFamily(ExponentialFamily):
    """One of K classes: λ_k = log(p_k / p_K), μ_k = p_k, for k = 1 … K − 1.

    This form is minimal: λ compares the first K − 1 classes with the last one, so that λ and μ
    determine each other. :meth:`from_logits` takes K unnormalised log-probabilities, and
    :attr:`log_probs` has all K. θ is the index of a class, T(θ) the indicators of the first K − 1.

    Attributes:
        log_odds: λ ``[..., K − 1]``.

    Raises:
        InputError: λ is not finite, or there is a single class.

    Example:
        >>> q = CategoricalFamily.from_logits(torch.tensor([0.2, 0.3, 0.5]).log())
        >>> q.expectation["indicator"], q.probs
        (tensor([0.2000, 0.3000]), tensor([0.2000, 0.3000, 0.5000]))
    """

    log_odds: Tensor
    ranks: ClassVar[Mapping[str, int]] = {"indicator": 1}

    def __post_init__(self) -> None:
        finite("log_odds", self.log_odds, rank=1, half=True)
        if self.log_odds.shape[-1] < 1:
            raise InputError("a categorical distribution needs two classes or more, got one")

    @classmethod
    def from_logits(cls, logits: Tensor) -> Self:
        """The distribution with log p = ``logits`` ``[..., K]`` up to a constant."""
        finite("logits", logits, rank=1, half=True)
        return cls(logits[..., :-1] - logits[..., -1:])

    @property
    def log_probs(self) -> Tensor:
        """log p of all K classes, ``[..., K]``."""
        of_last_class = torch.zeros_like(self.log_odds[..., :1])
        log_odds = torch.cat([self.log_odds, of_last_class], -1)
        return torch.log_softmax(log_odds, -1)

    @property
    def probs(self) -> Tensor:
        """p of all K classes, ``[..., K]``."""
        return self.log_probs.exp()

    @property
    def natural(self) -> Natural:
        return {"indicator": self.log_odds}

    @property
    def expectation(self) -> Natural:
        return {"indicator": self.probs[..., :-1]}

    def _of_natural(self, natural: Mapping[str, Tensor]) -> Self:
        return type(self)(natural["indicator"])

    def _of_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        probs = expectation["indicator"]
        prob_of_last = 1 - probs.sum(-1, keepdim=True)
        inside = (probs > 0).all(-1) & (prob_of_last > 0).squeeze(-1)
        expectation_inside("Categorical", inside, "they are above 0, and their sum below 1")
        return type(self)(probs.log() - prob_of_last.log())

    def statistics(self, theta: Tensor) -> Natural:
        n_classes = self.log_odds.shape[-1] + 1
        points(theta, self.log_odds[..., 0], 0, "classes")
        is_in_range = (theta >= 0) & (theta < n_classes)
        if theta.is_floating_point() or not bool(is_in_range.all()):
            raise InputError(f"classes must be integers from 0 to {n_classes - 1}")
        indicators = one_hot(theta.long(), n_classes)[..., :-1]
        return {"indicator": indicators.to(self.log_odds.dtype)}

    def log_partition(self) -> Tensor:
        return -self.log_probs[..., -1]

    def entropy(self) -> Tensor:
        return -(self.probs * self.log_probs).sum(-1)

    def _kl(self, other: Self) -> Tensor:
        return (self.probs * (self.log_probs - other.log_probs)).sum(-1)

    def expected_point(self) -> Tensor:
        raise InputError("a class number has no mean: use .expectation")

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Indices of classes ``[n, ...]``: where log p plus Gumbel noise is largest."""
        logits = many(self.log_probs.detach(), n)
        gumbel = -(-uniform(logits, generator).log()).log()
        return (logits + gumbel).argmax(-1)
