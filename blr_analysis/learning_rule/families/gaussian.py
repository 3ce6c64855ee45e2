"""Gaussians with a diagonal and a full precision (Khan & Rue, Eq. 9 and Table 2).

Both store the mean and the precision; λ and μ are computed from them. Derivatives of a loss with
respect to θ become derivatives with respect to μ by the theorems of Bonnet and Price (K&R 10, 11):

    ∇_μ₁ E_q[ℓ] = E_q[∇ℓ] − E_q[∇²ℓ] m,      ∇_μ₂ E_q[ℓ] = ½ E_q[∇²ℓ]
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
    derivatives,
    expectation_inside,
    finite,
    points,
    positive_definite,
    same_dtype,
    same_shape,
)
from blr_analysis.learning_rule.families.drawing import many, normal
from blr_analysis.learning_rule.families.matrices import (
    compare,
    inverse,
    inverse_root_times,
    outer,
    quadratic,
    solve_by_factor,
    symmetric,
    times,
)
from blr_analysis.learning_rule.families.special import LOG_2PI, log_ratio


@dataclass(frozen=True, eq=False)
class ElementwiseGaussian(ExponentialFamily):
    """What Gaussians with a diagonal precision share."""

    mean: Tensor
    precision: Tensor

    def __post_init__(self) -> None:
        finite("mean", self.mean, rank=1, half=True)
        finite("precision", self.precision, half=True)
        same_shape(mean=self.mean, precision=self.precision)
        if not bool((self.precision > 0).all()):
            raise InputError("the precision is not positive: lower the learning rate")

    def log_prob(self, theta: Tensor) -> Tensor:
        points(theta, self.mean, 1)
        return self._log_density(self.precision * (theta - self.mean).square())

    def entropy(self) -> Tensor:
        return -self._log_density(torch.ones_like(self.precision))

    def _log_density(self, squares: Tensor) -> Tensor:
        """log q(θ) from ``squares`` = s (θ − m)², in which no large terms cancel."""
        return 0.5 * (self.precision.log() - LOG_2PI - squares).sum(-1)

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        return self.mean + normal(many(self.mean, n), generator) / self.precision.sqrt()


@dataclass(frozen=True, eq=False)
class DiagonalGaussian(ElementwiseGaussian):
    """N(m, diag(s)⁻¹): λ = (s m, −s/2), μ = (m, m² + 1/s).

    Attributes:
        mean: m ``[..., P]``.
        precision: s > 0, ``[..., P]``.

    Raises:
        InputError: the precision is not positive and finite, or has another shape or dtype than the
            mean.

    Example:
        >>> q = DiagonalGaussian(torch.tensor([1.0]), torch.tensor([4.0]))
        >>> q.natural, q.expectation["square"]
        ({'linear': tensor([4.]), 'square': tensor([-2.])}, tensor([1.2500]))
    """

    ranks: ClassVar[Mapping[str, int]] = {"linear": 1, "square": 1}

    @property
    def natural(self) -> Natural:
        return {"linear": self.precision * self.mean, "square": -0.5 * self.precision}

    @property
    def expectation(self) -> Natural:
        return {"linear": self.mean, "square": self.mean.square() + 1 / self.precision}

    def _of_natural(self, natural: Mapping[str, Tensor]) -> Self:
        precision = -2 * natural["square"]
        return type(self)(natural["linear"] / precision, precision)

    def _of_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        mean = expectation["linear"]
        variance = expectation["square"] - mean.square()
        expectation_inside("DiagonalGaussian", variance > 0, "E[θ²] lies above E[θ]²")
        return type(self)(mean, 1 / variance)

    def statistics(self, theta: Tensor) -> Natural:
        points(theta, self.mean, 1)
        return {"linear": theta, "square": theta.square()}

    def log_partition(self) -> Tensor:
        terms = self.precision * self.mean.square() - self.precision.log() + LOG_2PI
        return 0.5 * terms.sum(-1)

    def _kl(self, other: Self) -> Tensor:
        ratio = (other.precision - self.precision) / self.precision
        gap = other.precision * (self.mean - other.mean).square()
        return 0.5 * (ratio - log_ratio(other.precision, self.precision) + gap).sum(-1)

    def pull_back(self, gradient: Tensor, hessian: Tensor) -> Natural:
        """∇_μ E_q[ℓ] from E_q[∇ℓ] and the diagonal of E_q[∇²ℓ], ``[..., P]`` both.

        Raises:
            InputError: one of the two has another shape, such as that of a whole Hessian.
        """
        derivatives(self.mean, gradient, hessian, 1)
        return {"linear": gradient - hessian * self.mean, "square": 0.5 * hessian}


@dataclass(frozen=True, eq=False)
class MatrixGaussian(ExponentialFamily):
    """What Gaussians with a full precision matrix S share."""

    mean: Tensor
    precision: Tensor
    advice: ClassVar[str] = ""  # where the precision is not positive definite

    def __post_init__(self) -> None:
        finite("mean", self.mean, rank=1)
        instance("precision", self.precision, Tensor, "a tensor of floating-point numbers")
        if self.precision.shape != (*self.mean.shape, self.mean.shape[-1]):
            raise InputError(
                f"a mean {tuple(self.mean.shape)} has a matrix for each copy, got "
                f"{tuple(self.precision.shape)}"
            )
        positive_definite("precision", self.precision, advice=self.advice)
        same_dtype(mean=self.mean, precision=self.precision)

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        noise = normal(many(self.mean, n), generator)
        return self.mean + inverse_root_times(self.precision, noise)


@dataclass(frozen=True, eq=False)
class FullGaussian(MatrixGaussian):
    """N(m, S⁻¹): λ = (S m, −S/2), μ = (m, S⁻¹ + m mᵀ).

    Attributes:
        mean: m ``[..., P]``.
        precision: S ``[..., P, P]``, symmetric and positive definite.

    Raises:
        InputError: the precision is not symmetric and positive definite, or has another dtype than
            the mean; the numbers are in half precision, which has no factorisation.

    Example:
        >>> q = FullGaussian(torch.zeros(2), torch.diag(torch.tensor([1.0, 4.0])))
        >>> q.covariance.diagonal()
        tensor([1.0000, 0.2500])
    """

    ranks: ClassVar[Mapping[str, int]] = {"linear": 1, "square": 2}
    advice: ClassVar[str] = ": lower lr, or take Gauss–Newton"

    @property
    def covariance(self) -> Tensor:
        """S⁻¹."""
        return inverse(self.precision)

    @property
    def natural(self) -> Natural:
        linear = times(self.precision, self.mean)
        return {"linear": linear, "square": -0.5 * self.precision}

    @property
    def expectation(self) -> Natural:
        return {"linear": self.mean, "square": self.covariance + outer(self.mean, self.mean)}

    def _of_natural(self, natural: Mapping[str, Tensor]) -> Self:
        precision = symmetric(-2 * natural["square"])
        same_dtype(**natural)
        factor, failures = torch.linalg.cholesky_ex(precision)
        is_positive = not bool((failures != 0).any())
        linear = natural["linear"]
        if not is_positive or linear.shape != precision.shape[:-1]:
            return type(self)(linear, precision)  # raises the error that says what is wrong
        return type(self)(solve_by_factor(factor, linear), precision)

    def _of_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        mean = expectation["linear"]
        covariance = symmetric(expectation["square"]) - outer(mean, mean)
        factor, failures = torch.linalg.cholesky_ex(covariance)
        rule = "E[θθᵀ] − E[θ]E[θ]ᵀ is positive definite"
        expectation_inside("FullGaussian", failures == 0, rule)
        return type(self)(mean, torch.cholesky_inverse(factor))

    def statistics(self, theta: Tensor) -> Natural:
        points(theta, self.mean, 1)
        return {"linear": theta, "square": outer(theta, theta)}

    def log_partition(self) -> Tensor:
        return 0.5 * quadratic(self.mean, self.precision) + self._log_volume()

    def log_prob(self, theta: Tensor) -> Tensor:
        points(theta, self.mean, 1)
        return -0.5 * quadratic(theta - self.mean, self.precision) - self._log_volume()

    def entropy(self) -> Tensor:
        return self._log_volume() + 0.5 * self.mean.shape[-1]

    def _kl(self, other: Self) -> Tensor:
        trace, logs = compare(other.precision, self.precision)
        return 0.5 * (trace - logs + quadratic(self.mean - other.mean, other.precision))

    def _log_volume(self) -> Tensor:
        """−log q at the mean."""
        size = self.mean.shape[-1]
        _, log_determinant = torch.linalg.slogdet(self.precision)
        return 0.5 * (size * LOG_2PI - log_determinant)

    def pull_back(self, gradient: Tensor, hessian: Tensor) -> Natural:
        """∇_μ E_q[ℓ] from E_q[∇ℓ] ``[..., P]`` and E_q[∇²ℓ] ``[..., P, P]``.

        Raises:
            InputError: one of the two has another shape, such as that of a Hessian's diagonal.
        """
        derivatives(self.mean, gradient, hessian, 2)
        return {"linear": gradient - times(hessian, self.mean), "square": 0.5 * hessian}
