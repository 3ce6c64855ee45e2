"""Distributions of probabilities: Beta for one, Dirichlet for those of several classes.

Both are exact for concentrations from 1e-3 to 1e6 and beyond.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural
from blr_analysis.learning_rule.families.domain import (
    above,
    expectation_inside,
    finite,
    points,
    same_shape,
)
from blr_analysis.learning_rule.families.drawing import log_gamma_draw, many
from blr_analysis.learning_rule.families.special import (
    LAST_STEPS,
    SMALLEST_SHRINKAGE,
    inverse_digamma,
    trigamma,
)

TOLERANCE = 1e-14  # relative, of a sum of concentrations in float64
NEWTON_STEPS = 100  # at most; a few are usual


@dataclass(frozen=True, eq=False)
class Dirichlet(ExponentialFamily):
    """Dirichlet(α) on probabilities θ of K classes: λ = α − 1, T(θ) = log θ, h = 1.

    μ_k = ψ(α_k) − ψ(Σ α). Counting an example of class k adds 1 to λ_k.

    Attributes:
        concentration: α > 0, ``[..., K]``.

    Raises:
        InputError: the concentration is not positive and finite, or has a single class.

    Example:
        >>> q = Dirichlet(torch.tensor([1.0, 2.0, 3.0]))
        >>> q.natural["log"], q.mean
        (tensor([0., 1., 2.]), tensor([0.1667, 0.3333, 0.5000]))
    """

    concentration: Tensor
    ranks: ClassVar[Mapping[str, int]] = {"log": 1}

    def __post_init__(self) -> None:
        above("concentration", self.concentration, rank=1)
        if self.concentration.shape[-1] < 2:
            raise InputError("a Dirichlet distribution needs two classes or more, got one")

    @property
    def mean(self) -> Tensor:
        """E_q[θ] = α / Σ α."""
        return self.concentration / self.concentration.sum(-1, keepdim=True)

    def expected_point(self) -> Tensor:
        return self.mean

    @property
    def natural(self) -> Natural:
        return {"log": self.concentration - 1}

    @property
    def expectation(self) -> Natural:
        total = self.concentration.sum(-1, keepdim=True)
        return {"log": torch.digamma(self.concentration) - torch.digamma(total)}

    def _of_natural(self, natural: Mapping[str, Tensor]) -> Self:
        return type(self)(natural["log"] + 1)

    def _of_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        return type(self)(_concentration(expectation["log"]))

    def statistics(self, theta: Tensor) -> Natural:
        points(theta, self.concentration, 1)
        finite("points of a Dirichlet distribution", theta)
        rounding = torch.finfo(theta.dtype).eps ** 0.5
        sums_to_one = bool(((theta.sum(-1) - 1).abs() <= rounding).all())
        is_positive = bool((theta > 0).all())
        if not sums_to_one or not is_positive:
            raise InputError("points of a Dirichlet distribution are above 0 and sum to 1")
        return {"log": theta.log()}

    def log_partition(self) -> Tensor:
        total = self.concentration.sum(-1)
        return torch.lgamma(self.concentration).sum(-1) - torch.lgamma(total)

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Points of the simplex, ``[n, ..., K]``; none of their entries is 0."""
        log_gammas = log_gamma_draw(many(self.concentration, n), generator)
        smallest = torch.finfo(log_gammas.dtype).tiny
        return torch.softmax(log_gammas, -1).clamp(min=smallest)


@dataclass(frozen=True, eq=False)
class Beta(ExponentialFamily):
    """Beta(a, b) on (0, 1): λ = (a − 1, b − 1), T(θ) = (log θ, log(1 − θ)), h = 1.

    Attributes:
        a: above 0, ``[...]``.
        b: above 0, ``[...]``.

    Raises:
        InputError: a or b is not positive and finite, or their shapes differ.

    Example:
        Under a uniform prior a success adds 1 to the first entry of λ:

        >>> q = Beta(torch.tensor(1.0), torch.tensor(1.0))
        >>> site = {"log": torch.tensor(1.0), "log_complement": torch.tensor(0.0)}
        >>> from blr_analysis.learning_rule.families.base import add
        >>> q.with_natural(add(q.natural, site)).mean
        tensor(0.6667)
    """

    a: Tensor
    b: Tensor
    ranks: ClassVar[Mapping[str, int]] = {"log": 0, "log_complement": 0}

    def __post_init__(self) -> None:
        above("a", self.a)
        above("b", self.b)
        same_shape(a=self.a, b=self.b)

    @property
    def _dirichlet(self) -> Dirichlet:
        """The distribution of (θ, 1 − θ)."""
        return Dirichlet(torch.stack([self.a, self.b], -1))

    @property
    def mean(self) -> Tensor:
        """E_q[θ] = a / (a + b)."""
        return self.a / (self.a + self.b)

    def expected_point(self) -> Tensor:
        return self.mean

    @property
    def natural(self) -> Natural:
        return {"log": self.a - 1, "log_complement": self.b - 1}

    @property
    def expectation(self) -> Natural:
        log, log_complement = self._dirichlet.expectation["log"].unbind(-1)
        return {"log": log, "log_complement": log_complement}

    def _of_natural(self, natural: Mapping[str, Tensor]) -> Self:
        return type(self)(natural["log"] + 1, natural["log_complement"] + 1)

    def _of_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        same_shape(**expectation)
        logs = torch.stack([expectation["log"], expectation["log_complement"]], -1)
        a, b = _concentration(logs).unbind(-1)
        return type(self)(a, b)

    def statistics(self, theta: Tensor) -> Natural:
        points(theta, self.a, 0)
        finite("points of a Beta distribution", theta)
        if not bool(((theta > 0) & (theta < 1)).all()):
            raise InputError("points of a Beta distribution lie strictly between 0 and 1")
        return {"log": theta.log(), "log_complement": torch.log1p(-theta)}

    def log_partition(self) -> Tensor:
        return self._dirichlet.log_partition()

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Numbers strictly between 0 and 1, ``[n, ...]``."""
        log_gamma_a = log_gamma_draw(many(self.a, n), generator)
        log_gamma_b = log_gamma_draw(many(self.b, n), generator)
        limits = torch.finfo(log_gamma_a.dtype)
        largest = 1 - limits.eps / 2
        return torch.sigmoid(log_gamma_a - log_gamma_b).clamp(min=limits.tiny, max=largest)


def _concentration(logs: Tensor) -> Tensor:
    """α with ψ(α_k) − ψ(Σ α) = ``logs`` ``[..., K]``, differentiable.

    If the sum S of α were known, α_k would be ψ⁻¹(logs_k + ψ(S)). So first 1/S is found, such that
    these α_k add up to S. Then Newton's method takes two steps in all of α, which autograd records:
    their derivatives are right to third order.
    """
    finite("expectation parameters", logs, rank=1)
    constants = logs.detach()
    slack = -torch.expm1(torch.logsumexp(constants, -1))
    expectation_inside("Dirichlet", slack > 0, "the exponentials of E[log θ] sum to less than 1")
    with torch.no_grad():
        inverse_sum = _inverse_sum(constants, slack)
        digamma_of_sum = torch.digamma(1 / inverse_sum).unsqueeze(-1)
        alpha = inverse_digamma(constants + digamma_of_sum)
    for _ in range(LAST_STEPS):
        alpha = alpha - _newton_step(alpha, logs)
    return alpha


def _inverse_sum(logs: Tensor, slack: Tensor) -> Tensor:
    """u = 1/S with Σ_k ψ⁻¹(logs_k + ψ(S)) = S, ``[...]``.

    Newton's method starts at the left of the solution, where the function is concave.

    Args:
        logs: E[log θ], ``[..., K]``.
        slack: 1 − Σ_k exp(logs_k), ``[...]``.
    """
    n_classes = logs.shape[-1]
    u = 2 * slack / (n_classes - 1 + slack)
    for _ in range(NEWTON_STEPS):
        digamma_of_sum = torch.digamma(1 / u).unsqueeze(-1)
        alpha = inverse_digamma(logs + digamma_of_sum)
        total = alpha.sum(-1)
        slope_in_sum = (1 / trigamma(alpha)).sum(-1) * trigamma(1 / u)
        newton = u - (total * u - 1) / (total - slope_in_sum / u)
        next_u = torch.maximum(newton, SMALLEST_SHRINKAGE * u)
        has_converged = bool(((next_u - u).abs() <= TOLERANCE * next_u).all())
        u = next_u
        if has_converged:
            break
    return u


def _newton_step(alpha: Tensor, logs: Tensor) -> Tensor:
    """F⁻¹ (∇A(λ) − μ), ``[..., K]``, which Newton's method subtracts from α.

    The Fisher information F is diagonal but for a constant in all entries, and is inverted by the
    formula of Sherman and Morrison.
    """
    total = alpha.sum(-1, keepdim=True)
    diagonal = trigamma(alpha)
    residual = torch.digamma(alpha) - torch.digamma(total) - logs
    sum_of_steps = (residual / diagonal).sum(-1, keepdim=True)
    constant = 1 / trigamma(total) - (1 / diagonal).sum(-1, keepdim=True)
    return (residual + sum_of_steps / constant) / diagonal
