"""Gaussians: with a fixed, a diagonal, and a full precision (Khan & Rue, Eq. 9 and Table 2).

All three store mean and precision, of which λ and μ are views. Derivatives of a loss with respect
to θ become derivatives with respect to μ by the theorems of Bonnet and Price (K&R 10, 11):

    ∇_μ₁ E_q[ℓ] = E_q[∇ℓ] − E_q[∇²ℓ] m,      ∇_μ₂ E_q[ℓ] = ½ E_q[∇²ℓ]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural

LOG_2PI = math.log(2 * math.pi)


def _noise(mean: Tensor, n: int | None, generator: torch.Generator | None) -> Tensor:
    shape = mean.shape if n is None else (n, *mean.shape)
    device = mean.device if generator is None else generator.device
    return torch.randn(shape, dtype=mean.dtype, device=device, generator=generator).to(mean.device)


@dataclass(frozen=True, eq=False)
class FixedGaussian(ExponentialFamily):
    """N(m, S⁻¹) with known diagonal S: λ = S m, μ = m, log h = −½ θᵀSθ + const.

    Attributes:
        mean: m ``[..., P]``.
        precision: the diagonal of S, ``[..., P]``; not learned.

    Example:
        >>> q = FixedGaussian(torch.zeros(2), torch.ones(2))
        >>> q.with_natural({"linear": torch.tensor([1.0, 2.0])}).mean
        tensor([1., 2.])
    """

    mean: Tensor
    precision: Tensor
    ranks: ClassVar[Mapping[str, int]] = {"linear": 1}

    def __post_init__(self) -> None:
        _check_positive(self.precision, self.mean)

    @property
    def natural(self) -> Natural:
        return {"linear": self.precision * self.mean}

    @property
    def expectation(self) -> Natural:
        return {"linear": self.mean}

    def with_natural(self, natural: Mapping[str, Tensor]) -> Self:
        return type(self)(natural["linear"] / self.precision, self.precision)

    def with_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        return type(self)(expectation["linear"], self.precision)

    def statistics(self, theta: Tensor) -> Natural:
        return {"linear": theta}

    def log_partition(self) -> Tensor:
        return 0.5 * (self.precision * self.mean.square()).sum(-1)

    def log_base(self, theta: Tensor) -> Tensor:
        return 0.5 * (self.precision.log() - LOG_2PI - self.precision * theta.square()).sum(-1)

    def expected_log_base(self) -> Tensor:
        squares = self.precision * self.mean.square() + 1
        return 0.5 * (self.precision.log() - LOG_2PI - squares).sum(-1)

    def base_gradient(self) -> Natural:
        return {"linear": -self.precision * self.mean}

    def pull_back(self, gradient: Tensor, hessian: Tensor | None = None) -> Natural:
        """∇_μ E_q[ℓ] from E_q[∇ℓ]; a Hessian has nothing to say about a fixed covariance."""
        return {"linear": gradient}

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        return self.mean + _noise(self.mean, n, generator) / self.precision.sqrt()


@dataclass(frozen=True, eq=False)
class DiagonalGaussian(ExponentialFamily):
    """N(m, diag(s)⁻¹): λ = (s m, −s/2), μ = (m, m² + 1/s).

    Attributes:
        mean: m ``[..., P]``.
        precision: s > 0, ``[..., P]``.

    Raises:
        InputError: a precision that is not positive and finite.

    Example:
        >>> q = DiagonalGaussian(torch.tensor([1.0]), torch.tensor([4.0]))
        >>> q.natural, q.expectation["square"]
        ({'linear': tensor([4.]), 'square': tensor([-2.])}, tensor([1.2500]))
    """

    mean: Tensor
    precision: Tensor
    ranks: ClassVar[Mapping[str, int]] = {"linear": 1, "square": 1}

    def __post_init__(self) -> None:
        _check_positive(self.precision, self.mean)

    @property
    def natural(self) -> Natural:
        return {"linear": self.precision * self.mean, "square": -0.5 * self.precision}

    @property
    def expectation(self) -> Natural:
        return {"linear": self.mean, "square": self.mean.square() + 1 / self.precision}

    def with_natural(self, natural: Mapping[str, Tensor]) -> Self:
        precision = -2 * natural["square"]
        return type(self)(natural["linear"] / precision, precision)

    def with_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        mean = expectation["linear"]
        return type(self)(mean, 1 / (expectation["square"] - mean.square()))

    def statistics(self, theta: Tensor) -> Natural:
        return {"linear": theta, "square": theta.square()}

    def log_partition(self) -> Tensor:
        terms = self.precision * self.mean.square() - self.precision.log() + LOG_2PI
        return 0.5 * terms.sum(-1)

    def pull_back(self, gradient: Tensor, hessian: Tensor) -> Natural:
        """∇_μ E_q[ℓ] from E_q[∇ℓ] and the diagonal of E_q[∇²ℓ]."""
        return {"linear": gradient - hessian * self.mean, "square": 0.5 * hessian}

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        return self.mean + _noise(self.mean, n, generator) / self.precision.sqrt()


@dataclass(frozen=True, eq=False)
class FullGaussian(ExponentialFamily):
    """N(m, S⁻¹): λ = (S m, −S/2), μ = (m, S⁻¹ + m mᵀ).

    Attributes:
        mean: m ``[..., P]``.
        precision: S ``[..., P, P]``, symmetric and positive definite.

    Raises:
        InputError: a precision that is not.

    Example:
        >>> q = FullGaussian(torch.zeros(2), torch.diag(torch.tensor([1.0, 4.0])))
        >>> q.covariance.diagonal()
        tensor([1.0000, 0.2500])
    """

    mean: Tensor
    precision: Tensor
    ranks: ClassVar[Mapping[str, int]] = {"linear": 1, "square": 2}

    def __post_init__(self) -> None:
        if self.precision.shape != (*self.mean.shape, self.mean.shape[-1]):
            raise InputError(
                f"the precision of a mean {tuple(self.mean.shape)} is a matrix for each copy, got "
                f"{tuple(self.precision.shape)}"
            )
        _, failed = torch.linalg.cholesky_ex(self.precision.detach())
        if bool((failed != 0).any()) or not bool(torch.isfinite(self.precision).all()):
            raise InputError(
                "the precision is not positive definite: take a smaller learning rate, or an "
                "approximation of the Hessian that is (Gauss–Newton)"
            )

    @property
    def covariance(self) -> Tensor:
        """S⁻¹."""
        return torch.cholesky_inverse(torch.linalg.cholesky(self.precision))

    @property
    def natural(self) -> Natural:
        linear = (self.precision @ self.mean.unsqueeze(-1)).squeeze(-1)
        return {"linear": linear, "square": -0.5 * self.precision}

    @property
    def expectation(self) -> Natural:
        outer = self.mean.unsqueeze(-1) * self.mean.unsqueeze(-2)
        return {"linear": self.mean, "square": self.covariance + outer}

    def with_natural(self, natural: Mapping[str, Tensor]) -> Self:
        precision = -2 * natural["square"]
        precision = 0.5 * (precision + precision.mT)
        factor, failed = torch.linalg.cholesky_ex(precision)
        if bool((failed != 0).any()):
            return type(self)(natural["linear"], precision)  # which says what is wrong
        mean = torch.cholesky_solve(natural["linear"].unsqueeze(-1), factor).squeeze(-1)
        return type(self)(mean, precision)

    def with_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        mean = expectation["linear"]
        covariance = expectation["square"] - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return type(self)(mean, torch.cholesky_inverse(torch.linalg.cholesky(covariance)))

    def statistics(self, theta: Tensor) -> Natural:
        return {"linear": theta, "square": theta.unsqueeze(-1) * theta.unsqueeze(-2)}

    def log_partition(self) -> Tensor:
        quadratic = self._inner(
            {"linear": self.natural["linear"], "square": self.precision.new_zeros(())},
            {"linear": self.mean, "square": self.precision},
        )
        size = self.mean.shape[-1]
        return 0.5 * (quadratic - torch.linalg.slogdet(self.precision)[1] + size * LOG_2PI)

    def pull_back(self, gradient: Tensor, hessian: Tensor) -> Natural:
        """∇_μ E_q[ℓ] from E_q[∇ℓ] and E_q[∇²ℓ]."""
        product = (hessian @ self.mean.unsqueeze(-1)).squeeze(-1)
        return {"linear": gradient - product, "square": 0.5 * hessian}

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        noise = _noise(self.mean, n, generator).unsqueeze(-1)
        upper = torch.linalg.cholesky(self.precision).mT
        return self.mean + torch.linalg.solve_triangular(upper, noise, upper=True).squeeze(-1)


def _check_positive(precision: Tensor, mean: Tensor) -> None:
    if precision.shape != mean.shape:
        raise InputError(
            f"mean and precision must agree in shape, got {tuple(mean.shape)} and "
            f"{tuple(precision.shape)}"
        )
    if not bool((precision > 0).all()) or not bool(torch.isfinite(precision).all()):
        raise InputError(
            "the precision is not positive: take a smaller learning rate, an estimate of the "
            "Hessian that cannot be negative, or a move that keeps it positive"
        )
