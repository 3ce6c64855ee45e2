"""Gaussians whose covariance is fixed: the families of gradient descent and SGD (K&R, Table 2).

Only the mean is learned, so λ = S m is of the mean's size, and the rest of the Gaussian is the base
measure: log h(θ) = −½ θᵀSθ + ½ log|S| − ½ P log 2π, which is not constant in θ. Its gradient
∇_μ E_q[log h] = −S m cancels the decay of λ, so that a step of the rule is

    m ← m − ρ S⁻¹ E_q[∇ℓ̄(θ)]          (Khan & Rue, Eqs. 1 and 35)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from blr_analysis.checks import instance
from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural
from blr_analysis.learning_rule.families.domain import (
    finite,
    points,
    positive_definite,
    same_dtype,
)
from blr_analysis.learning_rule.families.drawing import many, normal
from blr_analysis.learning_rule.families.gaussian import ElementwiseGaussian
from blr_analysis.learning_rule.families.special import LOG_2PI, logdet, quadratic


@dataclass(frozen=True, eq=False)
class FixedGaussian(ElementwiseGaussian):
    """N(m, S⁻¹) with a fixed diagonal S: λ = S m, μ = m, T(θ) = θ.

    Attributes:
        mean: m ``[..., P]``.
        precision: the diagonal of S, above 0, ``[..., P]``; not learned.

    Raises:
        InputError: a precision that is not positive and finite, or of another shape or dtype than
            the mean.

    Example:
        >>> q = FixedGaussian(torch.zeros(2), torch.tensor([1.0, 4.0]))
        >>> q.with_natural({"linear": torch.tensor([1.0, 2.0])}).mean
        tensor([1.0000, 0.5000])
    """

    ranks: ClassVar[Mapping[str, int]] = {"linear": 1}

    @property
    def natural(self) -> Natural:
        return {"linear": self.precision * self.mean}

    @property
    def expectation(self) -> Natural:
        return {"linear": self.mean}

    def _of_natural(self, natural: Mapping[str, Tensor]) -> Self:
        linear, precision = self._with_copies(natural["linear"], "natural")
        return type(self)(linear / precision, precision)

    def _of_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        mean, precision = self._with_copies(expectation["linear"], "expectation")
        return type(self)(mean, precision)

    def _with_copies(self, parameters: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Parameters and the fixed precision, with the copies of both."""
        precision = self.precision.to(parameters)
        points(parameters, precision, 1, f"the {kind} parameters")
        parameters, precision = torch.broadcast_tensors(parameters, precision)
        return parameters, precision

    def statistics(self, theta: Tensor) -> Natural:
        points(theta, self.mean, 1)
        return {"linear": theta}

    def log_partition(self) -> Tensor:
        return 0.5 * (self.precision * self.mean.square()).sum(-1)

    def log_base(self, theta: Tensor) -> Tensor:
        points(theta, self.mean, 1)
        return self._log_density(self.precision * theta.square())

    def expected_log_base(self) -> Tensor:
        return self._log_density(self.precision * self.mean.square() + 1)

    def base_gradient(self) -> Natural:
        return {"linear": -self.precision * self.mean}

    def _kl(self, other: Self) -> Tensor:
        _refuse_another_precision(self.precision, other.precision)
        return 0.5 * (self.precision * (self.mean - other.mean).square()).sum(-1)

    def pull_back(self, gradient: Tensor, hessian: Tensor | None = None) -> Natural:
        """∇_μ E_q[ℓ] = E_q[∇ℓ] ``[..., P]``; a Hessian says nothing of a fixed covariance."""
        points(gradient, self.mean, 1, "the gradient")
        return {"linear": gradient}


@dataclass(frozen=True, eq=False)
class FixedFullGaussian(ExponentialFamily):
    """N(m, S⁻¹) with a fixed matrix S: λ = S m, μ = m, T(θ) = θ.

    Attributes:
        mean: m ``[..., P]``.
        precision: S ``[..., P, P]``, symmetric and positive definite; not learned.

    Raises:
        InputError: a precision that is none, or of another size or dtype than the mean.

    Example:
        >>> q = FixedFullGaussian(torch.zeros(2), torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        >>> q.with_natural({"linear": torch.tensor([3.0, 3.0])}).mean
        tensor([1., 1.])
    """

    mean: Tensor
    precision: Tensor
    ranks: ClassVar[Mapping[str, int]] = {"linear": 1}

    def __post_init__(self) -> None:
        finite("mean", self.mean, rank=1)
        instance("precision", self.precision, Tensor, "a tensor of floating-point numbers")
        if self.precision.shape != (*self.mean.shape, self.mean.shape[-1]):
            raise InputError(
                f"a mean {tuple(self.mean.shape)} has a matrix for each copy, got "
                f"{tuple(self.precision.shape)}"
            )
        positive_definite("precision", self.precision, advice="")
        same_dtype(mean=self.mean, precision=self.precision)

    @property
    def natural(self) -> Natural:
        return {"linear": (self.precision @ self.mean.unsqueeze(-1)).squeeze(-1)}

    @property
    def expectation(self) -> Natural:
        return {"linear": self.mean}

    def _of_natural(self, natural: Mapping[str, Tensor]) -> Self:
        linear, precision = self._with_copies(natural["linear"], "natural")
        factor = torch.linalg.cholesky(precision)
        mean = torch.cholesky_solve(linear.unsqueeze(-1), factor).squeeze(-1)
        return type(self)(mean, precision)

    def _of_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        mean, precision = self._with_copies(expectation["linear"], "expectation")
        return type(self)(mean, precision)

    def _with_copies(self, parameters: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Parameters and the fixed precision, with the copies of both."""
        precision = self.precision.to(parameters)
        points(parameters, precision[..., 0], 1, f"the {kind} parameters")
        columns, precision = torch.broadcast_tensors(parameters.unsqueeze(-1), precision)
        return columns[..., 0], precision

    def statistics(self, theta: Tensor) -> Natural:
        points(theta, self.mean, 1)
        return {"linear": theta}

    def log_partition(self) -> Tensor:
        return 0.5 * quadratic(self.mean, self.precision)

    def log_base(self, theta: Tensor) -> Tensor:
        points(theta, self.mean, 1)
        return self._log_density(quadratic(theta, self.precision))

    def expected_log_base(self) -> Tensor:
        size = self.mean.shape[-1]
        return self._log_density(quadratic(self.mean, self.precision) + size)

    def base_gradient(self) -> Natural:
        return {"linear": -self.natural["linear"]}

    def log_prob(self, theta: Tensor) -> Tensor:
        points(theta, self.mean, 1)
        return self._log_density(quadratic(theta - self.mean, self.precision))

    def entropy(self) -> Tensor:
        size = self.mean.shape[-1]
        return -self._log_density(torch.full_like(self.mean[..., 0], size))

    def _log_density(self, squares: Tensor) -> Tensor:
        """log q where (θ − m)ᵀS(θ − m) is ``squares``."""
        size = self.mean.shape[-1]
        return 0.5 * (logdet(self.precision) - size * LOG_2PI - squares)

    def _kl(self, other: Self) -> Tensor:
        _refuse_another_precision(self.precision, other.precision)
        return 0.5 * quadratic(self.mean - other.mean, self.precision)

    def pull_back(self, gradient: Tensor, hessian: Tensor | None = None) -> Natural:
        """∇_μ E_q[ℓ] = E_q[∇ℓ] ``[..., P]``; a Hessian says nothing of a fixed covariance."""
        points(gradient, self.mean, 1, "the gradient")
        return {"linear": gradient}

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        noise = normal(many(self.mean, n), generator).unsqueeze(-1)
        upper = torch.linalg.cholesky(self.precision).mT
        return self.mean + torch.linalg.solve_triangular(upper, noise, upper=True).squeeze(-1)


def _refuse_another_precision(left: Tensor, right: Tensor) -> None:
    """Raise :class:`InputError` unless both are the same, copy by copy."""
    left, right = torch.broadcast_tensors(left, right)
    if not torch.equal(left, right):
        raise InputError("the KL divergence of fixed Gaussians needs one precision for both")
