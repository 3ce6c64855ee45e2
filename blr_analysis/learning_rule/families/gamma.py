"""Distributions of precisions: Gamma for numbers, Wishart and Normal–Wishart for matrices."""

from __future__ import annotations

import math
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
    positive_definite,
    same_dtype,
    same_shape,
)
from blr_analysis.learning_rule.families.drawing import log_gamma_draw, many, normal
from blr_analysis.learning_rule.families.matrices import (
    inverse,
    inverse_root_times,
    logdet,
    outer,
    symmetric,
    times,
)
from blr_analysis.learning_rule.families.special import (
    LOG_2PI,
    invert_excess_logarithm,
    multivariate_digamma,
)


@dataclass(frozen=True, eq=False)
class Gamma(ExponentialFamily):
    """Gamma(a, b) on θ > 0: λ = (a − 1, −b), T(θ) = (log θ, θ), μ = (ψ(a) − log b, a/b), h = 1.

    Attributes:
        shape: a > 0, ``[...]``.
        rate: b > 0, ``[...]``.

    Raises:
        InputError: shape or rate is not positive and finite, or their shapes differ.

    Example:
        The posterior of a Poisson rate after counts of 2 and 4, under the prior Gamma(1, 1):

        >>> q = Gamma(torch.tensor(1.0), torch.tensor(1.0))
        >>> site = {"log": torch.tensor(6.0), "linear": torch.tensor(-2.0)}
        >>> from blr_analysis.learning_rule.families.base import add
        >>> q.with_natural(add(q.natural, site))
        Gamma(shape=tensor(7.), rate=tensor(3.))
    """

    shape: Tensor
    rate: Tensor
    ranks: ClassVar[Mapping[str, int]] = {"log": 0, "linear": 0}

    def __post_init__(self) -> None:
        above("shape", self.shape)
        above("rate", self.rate)
        same_shape(shape=self.shape, rate=self.rate)

    @property
    def natural(self) -> Natural:
        return {"log": self.shape - 1, "linear": -self.rate}

    @property
    def expectation(self) -> Natural:
        return {
            "log": torch.digamma(self.shape) - self.rate.log(),
            "linear": self.shape / self.rate,
        }

    def _of_natural(self, natural: Mapping[str, Tensor]) -> Self:
        return type(self)(natural["log"] + 1, -natural["linear"])

    def _of_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        shape, rate = shape_and_rate("Gamma", expectation["log"], expectation["linear"])
        return type(self)(shape, rate)

    def statistics(self, theta: Tensor) -> Natural:
        points(theta, self.shape, 0)
        above("points of a Gamma distribution", theta, advice="")
        return {"log": theta.log(), "linear": theta}

    def log_partition(self) -> Tensor:
        return torch.lgamma(self.shape) - self.shape * self.rate.log()

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Positive numbers ``[n, ...]``; none underflows to 0."""
        log_draws = log_gamma_draw(many(self.shape, n), generator) - self.rate.log()
        smallest = torch.finfo(log_draws.dtype).tiny
        return log_draws.exp().clamp(min=smallest)


def shape_and_rate(family: str, log: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """a and b with ψ(a) − log b = ``log`` and a/b = ``mean``; ``family`` is for messages."""
    finite("expectation parameters", log)
    finite("expectation parameters", mean)
    excess = torch.where(mean > 0, mean, math.nan).log() - log
    rule = "a mean lies above 0, and its logarithm above the mean of the logarithm"
    expectation_inside(family, excess > 0, rule)
    shape = invert_excess_logarithm(excess)
    return shape, shape / mean


@dataclass(frozen=True, eq=False)
class Wishart(ExponentialFamily):
    """Wishart(V, ν) on p×p precision matrices θ: λ = ((ν − p − 1)/2, −½V⁻¹), h = 1.

    T(θ) = (log|θ|, θ) and μ = (ψ_p(ν/2) + p log 2 + log|V|, νV).

    Attributes:
        dof: ν > p − 1, ``[...]``.
        rate: V⁻¹ ``[..., p, p]``, symmetric and positive definite.

    Raises:
        InputError: a parameter is outside of its domain, or its shape does not fit the others.

    Example:
        >>> q = Wishart(torch.tensor(4.0), torch.diag(torch.tensor([1.0, 2.0])))
        >>> q.natural["logdet"], q.expectation["linear"]
        (tensor(0.5000), tensor([[4., 0.],
                [0., 2.]]))
    """

    dof: Tensor
    rate: Tensor
    ranks: ClassVar[Mapping[str, int]] = {"logdet": 0, "linear": 2}

    def __post_init__(self) -> None:
        positive_definite("rate", self.rate)
        above("dof", self.dof, self.size - 1)
        if self.dof.shape != self.rate.shape[:-2]:
            raise InputError(
                f"dof needs one number for each of the copies of {tuple(self.rate.shape)}, got "
                f"{tuple(self.dof.shape)}"
            )
        same_dtype(dof=self.dof, rate=self.rate)

    @property
    def size(self) -> int:
        """p."""
        return self.rate.shape[-1]

    @property
    def natural(self) -> Natural:
        return {"logdet": 0.5 * (self.dof - self.size - 1), "linear": -0.5 * self.rate}

    @property
    def expectation(self) -> Natural:
        scale = inverse(self.rate)  # V
        mean_logdet = multivariate_digamma(0.5 * self.dof, self.size) - logdet(0.5 * self.rate)
        return {"logdet": mean_logdet, "linear": _per_matrix(self.dof) * scale}

    def _of_natural(self, natural: Mapping[str, Tensor]) -> Self:
        rate = symmetric(-2 * natural["linear"])
        return type(self)(2 * natural["logdet"] + self.size + 1, rate)

    def _of_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        dof, rate = _dof_and_rate("Wishart", expectation["logdet"], expectation["linear"])
        return type(self)(dof, rate)

    def statistics(self, theta: Tensor) -> Natural:
        points(theta, self.rate, 2)
        positive_definite("points of a Wishart distribution", theta, advice="")
        return {"logdet": logdet(theta), "linear": theta}

    def log_partition(self) -> Tensor:
        half_dof = 0.5 * self.dof
        return torch.mvlgamma(half_dof, self.size) - half_dof * logdet(0.5 * self.rate)

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Precision matrices ``[n, ..., p, p]``, by Bartlett's decomposition."""
        rows = torch.arange(self.size, dtype=self.dof.dtype, device=self.dof.device)
        gamma_shapes = 0.5 * (many(self.dof, n).unsqueeze(-1) - rows)
        log_chi_squares = math.log(2) + log_gamma_draw(gamma_shapes, generator)
        diagonal = torch.diag_embed((0.5 * log_chi_squares).exp())
        below_diagonal = normal(many(self.rate, n), generator).tril(-1)
        upper_of_rate = torch.linalg.cholesky(self.rate).mT
        root = torch.linalg.solve_triangular(upper_of_rate, below_diagonal + diagonal, upper=True)
        return symmetric(root @ root.mT)


@dataclass(frozen=True, eq=False)
class NormalWishart(ExponentialFamily):
    """Mean x and precision Λ of a Gaussian: x | Λ ~ N(m, (κΛ)⁻¹), Λ ~ Wishart(V, ν).

    θ is a dictionary with ``mean`` ``[..., p]`` and ``precision`` ``[..., p, p]``, and

        T(θ) = (Λx, xᵀΛx, Λ, log|Λ|),   λ = (κm, −κ/2, −½(V⁻¹ + κmmᵀ), (ν − p)/2),   h = 1.

    An observation y adds (y, −½, −½yyᵀ, ½) to λ.

    Attributes:
        mean: m ``[..., p]``.
        kappa: κ > 0, ``[...]``: as many observations would make the mean as certain.
        dof: ν > p − 1, ``[...]``.
        rate: V⁻¹ ``[..., p, p]``, symmetric and positive definite.

    Raises:
        InputError: a parameter is outside of its domain, or its shape does not fit the others.

    Example:
        >>> q = NormalWishart(torch.zeros(2), torch.tensor(1.0), torch.tensor(3.0), torch.eye(2))
        >>> q.wishart.expectation["linear"]
        tensor([[3., 0.],
                [0., 3.]])
    """

    mean: Tensor
    kappa: Tensor
    dof: Tensor
    rate: Tensor
    ranks: ClassVar[Mapping[str, int]] = {"shift": 1, "square": 0, "linear": 2, "logdet": 0}

    def __post_init__(self) -> None:
        finite("mean", self.mean, rank=1)
        above("kappa", self.kappa)
        size = self.mean.shape[-1]
        if self.wishart.size != size or self.mean.shape[:-1] != self.dof.shape:
            shapes = f"a mean {tuple(self.mean.shape)} does not go with a rate"
            raise InputError(f"{shapes} {tuple(self.rate.shape)}")
        same_shape(kappa=self.kappa, dof=self.dof)
        same_dtype(mean=self.mean, kappa=self.kappa, dof=self.dof)

    @property
    def wishart(self) -> Wishart:
        """The marginal of Λ."""
        return Wishart(self.dof, self.rate)

    @property
    def natural(self) -> Natural:
        shift = self.kappa.unsqueeze(-1) * self.mean
        return {
            "shift": shift,
            "square": -0.5 * self.kappa,
            "linear": -0.5 * (self.rate + outer(shift, self.mean)),
            "logdet": 0.5 * (self.dof - self.mean.shape[-1]),
        }

    @property
    def expectation(self) -> Natural:
        of_precision = self.wishart.expectation
        shift = times(of_precision["linear"], self.mean)
        square = self.mean.shape[-1] / self.kappa + (shift * self.mean).sum(-1)
        return {"shift": shift, "square": square, **of_precision}

    def _of_natural(self, natural: Mapping[str, Tensor]) -> Self:
        kappa = -2 * natural["square"]
        above("kappa", kappa)
        mean = natural["shift"] / kappa.unsqueeze(-1)
        dof = 2 * natural["logdet"] + mean.shape[-1]
        rate = -2 * natural["linear"] - outer(natural["shift"], mean)
        return type(self)(mean, kappa, dof, symmetric(rate))

    def _of_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        precision = expectation["linear"]
        shift = expectation["shift"]
        dof, rate = _dof_and_rate("NormalWishart", expectation["logdet"], precision)
        mean = torch.linalg.solve(symmetric(precision), shift.unsqueeze(-1)).squeeze(-1)
        excess_square = expectation["square"] - (mean * shift).sum(-1)  # p/κ
        expectation_inside("NormalWishart", excess_square > 0, "E[xᵀΛx] lies above mᵀE[Λ]m")
        kappa = mean.shape[-1] / excess_square
        return type(self)(mean, kappa, dof, rate)

    def statistics(self, theta: Mapping[str, Tensor]) -> Natural:
        self._check_point(theta, ("mean", "precision"))
        x = theta["mean"]
        precision = theta["precision"]
        points(x, self.mean, 1, "mean")
        points(precision, self.rate, 2, "precision")
        shift = times(precision, x)
        of_precision = self.wishart.statistics(precision)
        return {"shift": shift, "square": (shift * x).sum(-1), **of_precision}

    def log_partition(self) -> Tensor:
        size = self.mean.shape[-1]
        return self.wishart.log_partition() + 0.5 * size * (LOG_2PI - self.kappa.log())

    def expected_point(self) -> dict[str, Tensor]:
        """``{"mean": m, "precision": νV}``; for ν ≤ p, where x has no mean, m is its centre."""
        return {"mean": self.mean, "precision": self.wishart.expected_point()}

    def sample(
        self, n: int | None = None, *, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """``{"mean": x, "precision": Λ}``, ``[n, ..., p]`` and ``[n, ..., p, p]``."""
        precision = self.wishart.sample(n, generator=generator)
        noise = normal(many(self.mean, n), generator)
        offset = inverse_root_times(_per_matrix(self.kappa) * precision, noise)
        return {"mean": self.mean + offset, "precision": precision}


def _dof_and_rate(family: str, log: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """ν and V⁻¹ with E[log|Λ|] = ``log`` and E[Λ] = ``mean``; ``family`` is for messages."""
    finite("expectation parameters", log)
    mean = symmetric(mean)
    positive_definite("the expectation of the precision", mean, advice="")
    size = mean.shape[-1]
    excess = logdet(mean) - log
    expectation_inside(family, excess > 0, "E[log|Λ|] lies below log|E[Λ]|")
    dof = 2 * invert_excess_logarithm(excess, size)
    return dof, _per_matrix(dof) * inverse(mean)


def _per_matrix(numbers: Tensor) -> Tensor:
    """Numbers ``[...]`` as ``[..., 1, 1]``, so that they multiply the matrices of their copies."""
    return numbers.unsqueeze(-1).unsqueeze(-1)
