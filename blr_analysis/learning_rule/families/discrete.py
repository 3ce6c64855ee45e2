"""Bernoulli on ±1 and categorical distributions, both minimal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, one_hot

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural
from blr_analysis.learning_rule.families.domain import expectation_inside, finite, points
from blr_analysis.learning_rule.families.drawing import many, uniform


@dataclass(frozen=True, eq=False)
class Bernoulli(ExponentialFamily):
    """P independent signs θ_j ∈ {−1, +1}: λ = ½ log(p / (1 − p)), μ = 2p − 1 = tanh λ.

    p is the probability of +1 and T(θ) = θ (Khan & Rue, section 4.5 and Table 2). Entropy and KL
    are exact also where tanh λ rounds to ±1; :meth:`with_expectation` cannot be.

    Attributes:
        half_logit: λ ``[..., P]``.

    Raises:
        InputError: λ is not finite.

    Example:
        >>> q = Bernoulli(torch.tensor([0.0, 1.0]))
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

    def with_natural(self, natural: Mapping[str, Tensor]) -> Self:
        self._check_keys(natural)
        return type(self)(natural["linear"])

    def with_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        self._check_keys(expectation)
        mean = expectation["linear"]
        expectation_inside("Bernoulli", mean.abs() < 1, "each lies strictly between −1 and 1")
        return type(self)(torch.atanh(mean))

    def statistics(self, theta: Tensor) -> Natural:
        """θ itself; for relaxed signs it may lie anywhere."""
        points(theta, self.half_logit, 1)
        return {"linear": theta}

    def log_partition(self) -> Tensor:
        return (self.half_logit - logsigmoid(2 * self.half_logit)).sum(-1)

    def log_prob(self, theta: Tensor) -> Tensor:
        """log q(θ), in nats.

        Raises:
            InputError: points that are not −1 or +1.
        """
        points(theta, self.half_logit, 1)
        if not bool((theta.abs() == 1).all()):
            raise InputError("points of a Bernoulli distribution are −1 or +1 (2y − 1 for 0 and 1)")
        return logsigmoid(2 * theta * self.half_logit).sum(-1)

    def entropy(self) -> Tensor:
        up, down = 2 * self.half_logit, -2 * self.half_logit
        parts = logsigmoid(up) * torch.sigmoid(up) + logsigmoid(down) * torch.sigmoid(down)
        return -parts.sum(-1)

    def _kl(self, other: Self) -> Tensor:
        signs = (2.0, -2.0)
        gaps = [
            torch.sigmoid(s * self.half_logit)
            * (logsigmoid(s * self.half_logit) - logsigmoid(s * other.half_logit))
            for s in signs
        ]
        return (gaps[0] + gaps[1]).sum(-1)

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Signs ±1 in the dtype of λ, ``[n, ..., P]``."""
        wanted = many(self.probability.detach(), n)
        ones = torch.ones_like(wanted)
        return torch.where(uniform(wanted, generator) < wanted, ones, -ones)


@dataclass(frozen=True, eq=False)
class Categorical(ExponentialFamily):
    """One of K classes: λ_k = log(p_k / p_K), μ_k = p_k, for k = 1 … K − 1.

    The minimal form, the last class being the one to compare with, so that λ and μ determine each
    other; :meth:`from_logits` takes K unnormalised log-probabilities, and :attr:`log_probs` has
    all K. θ is the index of a class, T(θ) the indicators of the first K − 1.

    Attributes:
        log_odds: λ ``[..., K − 1]``.

    Raises:
        InputError: λ is not finite, or there are no two classes.

    Example:
        >>> q = Categorical.from_logits(torch.tensor([0.2, 0.3, 0.5]).log())
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
        """From log p up to a constant, ``[..., K]``."""
        finite("logits", logits, rank=1, half=True)
        return cls(logits[..., :-1] - logits[..., -1:])

    @property
    def log_probs(self) -> Tensor:
        """log p of all K classes, ``[..., K]``."""
        full = torch.cat([self.log_odds, torch.zeros_like(self.log_odds[..., :1])], -1)
        return torch.log_softmax(full, -1)

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

    def with_natural(self, natural: Mapping[str, Tensor]) -> Self:
        self._check_keys(natural)
        return type(self)(natural["indicator"])

    def with_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        self._check_keys(expectation)
        probs = expectation["indicator"]
        last = 1 - probs.sum(-1, keepdim=True)
        inside = (probs > 0).all(-1) & (last > 0).squeeze(-1)
        expectation_inside("Categorical", inside, "they are above 0, and their sum below 1")
        return type(self)(probs.log() - last.log())

    def statistics(self, theta: Tensor) -> Natural:
        classes = self.log_odds.shape[-1] + 1
        points(theta, self.log_odds[..., 0], 0, "classes")
        if theta.is_floating_point() or not bool(((theta >= 0) & (theta < classes)).all()):
            raise InputError(f"classes must be integers from 0 to {classes - 1}")
        return {"indicator": one_hot(theta.long(), classes)[..., :-1].to(self.log_odds.dtype)}

    def log_partition(self) -> Tensor:
        return -self.log_probs[..., -1]

    def entropy(self) -> Tensor:
        return -(self.probs * self.log_probs).sum(-1)

    def _kl(self, other: Self) -> Tensor:
        return (self.probs * (self.log_probs - other.log_probs)).sum(-1)

    def expected_point(self) -> Tensor:
        raise InputError(
            "the mean of a class's number is no class: take the expectation parameters, or "
            "at_samples"
        )

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Indices of classes ``[n, ...]``, by the largest of Gumbel-perturbed log-probabilities."""
        logits = many(self.log_probs.detach(), n)
        return (logits - (-uniform(logits, generator).log()).log()).argmax(-1)
