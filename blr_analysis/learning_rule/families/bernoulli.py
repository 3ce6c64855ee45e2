"""Signs θ ∈ {−1, +1}: the family of binary weights (Khan & Rue, section 4.5 and Table 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural
from blr_analysis.learning_rule.families.domain import expectation_inside, finite, points
from blr_analysis.learning_rule.families.drawing import many, uniform


@dataclass(frozen=True, eq=False)
class BernoulliFamily(ExponentialFamily):
    """P independent signs θ_j ∈ {−1, +1}: λ = ½ log(p / (1 − p)), μ = 2p − 1 = tanh λ, h = 1.

    p is the probability of +1, and T(θ) = θ. Entropy and KL are exact also where tanh λ rounds to
    ±1, but :meth:`with_expectation` cannot tell such μ apart.

    Attributes:
        half_logit: λ ``[..., P]``.

    Raises:
        InputError: λ is not finite.

    Example:
        >>> q = BernoulliFamily(torch.tensor([0.0, 1.0]))
        >>> q.expectation["linear"], q.probability
        (tensor([0.0000, 0.7616]), tensor([0.5000, 0.8808]))
    """

    half_logit: Tensor
    ranks: ClassVar[Mapping[str, int]] = {"linear": 1}

    def __post_init__(self) -> None:
        finite("half_logit", self.half_logit, rank=1, half=True)

    @property
    def probability(self) -> Tensor:
        """P(θ_j = +1), ``[..., P]``."""
        return torch.sigmoid(2 * self.half_logit)

    @property
    def natural(self) -> Natural:
        return {"linear": self.half_logit}

    @property
    def expectation(self) -> Natural:
        return {"linear": torch.tanh(self.half_logit)}

    def _of_natural(self, natural: Mapping[str, Tensor]) -> Self:
        return type(self)(natural["linear"])

    def _of_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        mean = expectation["linear"]
        expectation_inside("Bernoulli", mean.abs() < 1, "each lies strictly between −1 and 1")
        return type(self)(torch.atanh(mean))

    def statistics(self, theta: Tensor) -> Natural:
        """T(θ) = θ, for any real numbers, such as relaxed signs."""
        points(theta, self.half_logit, 1)
        return {"linear": theta}

    def log_partition(self) -> Tensor:
        return (self.half_logit - logsigmoid(2 * self.half_logit)).sum(-1)

    def log_prob(self, theta: Tensor) -> Tensor:
        """log q(θ), in nats.

        Raises:
            InputError: a point is not −1 or +1.
        """
        points(theta, self.half_logit, 1)
        if not bool((theta.abs() == 1).all()):
            raise InputError("points of a Bernoulli distribution are −1 or +1 (2y − 1 for 0 and 1)")
        return logsigmoid(2 * theta * self.half_logit).sum(-1)

    def entropy(self) -> Tensor:
        log_plus = logsigmoid(2 * self.half_logit)
        log_minus = logsigmoid(-2 * self.half_logit)
        return -(log_plus.exp() * log_plus + log_minus.exp() * log_minus).sum(-1)

    def _kl(self, other: Self) -> Tensor:
        divergence = torch.zeros_like(self.log_partition())
        for sign in (1, -1):
            log_prob = logsigmoid(2 * sign * self.half_logit)
            other_log_prob = logsigmoid(2 * sign * other.half_logit)
            terms = log_prob.exp() * (log_prob - other_log_prob)
            divergence = divergence + terms.sum(-1)
        return divergence

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Signs ±1 in the dtype of λ, ``[n, ..., P]``."""
        probability = many(self.probability.detach(), n)
        plus = torch.ones_like(probability)
        return torch.where(uniform(probability, generator) < probability, plus, -plus)
