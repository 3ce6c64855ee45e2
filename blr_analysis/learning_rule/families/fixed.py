"""Gaussians whose covariance is fixed: the families of gradient descent and SGD (K&R, Table 2).

Only the mean is learned. So λ = S m has the mean's size, and the rest of the Gaussian is the base
measure, log h(θ) = −½ θᵀSθ + ½ log|S| − ½ P log 2π, which depends on θ. Its gradient
∇_μ E_q[log h] = −S m cancels the decay of λ, so that a step of the rule is

    m ← m − ρ S⁻¹ E_q[∇ℓ̄(θ)]          (Khan & Rue, Eqs. 1 and 35)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural
from blr_analysis.learning_rule.families.domain import points
from blr_analysis.learning_rule.families.gaussian import ElementwiseGaussian, MatrixGaussian
from blr_analysis.learning_rule.families.matrices import logdet, quadratic, solve, times
from blr_analysis.learning_rule.families.special import LOG_2PI


class FixedPrecision(ExponentialFamily):
    """What Gaussians with a fixed precision share: only the mean is learned, and T(θ) = θ."""

    mean: Tensor
    precision: Tensor
    ranks: ClassVar[Mapping[str, int]] = {"linear": 1}

    @property
    def expectation(self) -> Natural:
        return {"linear": self.mean}

    def statistics(self, theta: Tensor) -> Natural:
        points(theta, self.mean, 1)
        return {"linear": theta}

    def base_gradient(self) -> Natural:
        return {"linear": -self.natural["linear"]}

    def pull_back(self, gradient: Tensor, hessian: Tensor | None = None) -> Natural:
        """∇_μ E_q[ℓ] = E_q[∇ℓ] ``[..., P]``; the Hessian has no effect on a fixed covariance."""
        points(gradient, self.mean, 1, "the gradient")
        return {"linear": gradient}

    def _check_alike(self, other: Self) -> None:
        super()._check_alike(other)
        left, right = torch.broadcast_tensors(self.precision, other.precision)
        if not torch.equal(left, right):
            raise InputError("the KL divergence of fixed Gaussians needs one precision for both")


@dataclass(frozen=True, eq=False)
class FixedGaussian(FixedPrecision, ElementwiseGaussian):
    """N(m, S⁻¹) with a fixed diagonal S: λ = S m, μ = m, T(θ) = θ.

    Attributes:
        mean: m ``[..., P]``.
        precision: the diagonal of S, above 0, ``[..., P]``; not learned.

    Raises:
        InputError: the precision is not positive and finite, or has another shape or dtype than the
            mean.

    Example:
        >>> q = FixedGaussian(torch.zeros(2), torch.tensor([1.0, 4.0]))
        >>> q.with_natural({"linear": torch.tensor([1.0, 2.0])}).mean
        tensor([1.0000, 0.5000])
    """

    @property
    def natural(self) -> Natural:
        return {"linear": self.precision * self.mean}

    def _of_natural(self, natural: Mapping[str, Tensor]) -> Self:
        linear, precision = self._with_copies(natural["linear"], "natural")
        return type(self)(linear / precision, precision)

    def _of_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        mean, precision = self._with_copies(expectation["linear"], "expectation")
        return type(self)(mean, precision)

    def _with_copies(self, parameters: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Parameters and the fixed precision, both with the copies of either.

        ``kind`` is what an error calls the parameters.
        """
        precision = self.precision.to(parameters)
        points(parameters, precision, 1, f"the {kind} parameters")
        parameters, precision = torch.broadcast_tensors(parameters, precision)
        return parameters, precision

    def log_partition(self) -> Tensor:
        return 0.5 * (self.precision * self.mean.square()).sum(-1)

    def log_base(self, theta: Tensor) -> Tensor:
        points(theta, self.mean, 1)
        return self._log_density(self.precision * theta.square())

    def expected_log_base(self) -> Tensor:
        return self._log_density(self.precision * self.mean.square() + 1)

    def _kl(self, other: Self) -> Tensor:
        return 0.5 * (self.precision * (self.mean - other.mean).square()).sum(-1)


@dataclass(frozen=True, eq=False)
class FixedFullGaussian(FixedPrecision, MatrixGaussian):
    """N(m, S⁻¹) with a fixed matrix S: λ = S m, μ = m, T(θ) = θ.

    Attributes:
        mean: m ``[..., P]``.
        precision: S ``[..., P, P]``, symmetric and positive definite; not learned.

    Raises:
        InputError: the precision is not symmetric and positive definite, or has another size or
            dtype than the mean.

    Example:
        >>> q = FixedFullGaussian(torch.zeros(2), torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        >>> q.with_natural({"linear": torch.tensor([3.0, 3.0])}).mean
        tensor([1., 1.])
    """

    @property
    def natural(self) -> Natural:
        return {"linear": times(self.precision, self.mean)}

    def _of_natural(self, natural: Mapping[str, Tensor]) -> Self:
        linear, precision = self._with_copies(natural["linear"], "natural")
        return type(self)(solve(precision, linear), precision)

    def _of_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        mean, precision = self._with_copies(expectation["linear"], "expectation")
        return type(self)(mean, precision)

    def _with_copies(self, parameters: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Parameters and the fixed precision, both with the copies of either.

        ``kind`` is what an error calls the parameters.
        """
        precision = self.precision.to(parameters)
        points(parameters, precision[..., 0], 1, f"the {kind} parameters")
        columns, precision = torch.broadcast_tensors(parameters.unsqueeze(-1), precision)
        return columns[..., 0], precision

    def log_partition(self) -> Tensor:
        return 0.5 * quadratic(self.mean, self.precision)

    def log_base(self, theta: Tensor) -> Tensor:
        points(theta, self.mean, 1)
        return self._log_density(quadratic(theta, self.precision))

    def expected_log_base(self) -> Tensor:
        size = self.mean.shape[-1]
        return self._log_density(quadratic(self.mean, self.precision) + size)

    def log_prob(self, theta: Tensor) -> Tensor:
        points(theta, self.mean, 1)
        return self._log_density(quadratic(theta - self.mean, self.precision))

    def entropy(self) -> Tensor:
        size = self.mean.shape[-1]
        return -self._log_density(torch.full_like(self.mean[..., 0], size))

    def _log_density(self, squares: Tensor) -> Tensor:
        """log q(θ) from ``squares`` = (θ − m)ᵀS(θ − m), in which no large terms cancel."""
        size = self.mean.shape[-1]
        return 0.5 * (logdet(self.precision) - size * LOG_2PI - squares)

    def _kl(self, other: Self) -> Tensor:
        return 0.5 * quadratic(self.mean - other.mean, self.precision)
