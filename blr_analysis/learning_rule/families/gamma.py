"""Gamma and inverse-Gamma distributions, elementwise."""

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
    same_shape,
)
from blr_analysis.learning_rule.families.drawing import log_gamma_draw, many
from blr_analysis.learning_rule.families.special import (
    HALF_LOG_2PI,
    digamma,
    invert_excess_logarithm,
    lgamma,
    lgamma_divergence,
    log_minus_digamma,
    log_ratio,
    stirling_remainder,
)


@dataclass(frozen=True, eq=False)
class Gamma(ExponentialFamily):
    """Gamma(a, b) on θ > 0: λ = (a − 1, −b), T(θ) = (log θ, θ), μ = (ψ(a) − log b, a/b), h = 1.

    Attributes:
        shape: a > 0, ``[...]``.
        rate: b > 0, ``[...]``.

    Raises:
        InputError: shape or rate that is not positive and finite, or of different shapes.

    Example:
        Seeing counts 2 and 4 of a Poisson distribution under the prior Gamma(1, 1):

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
        return {"log": digamma(self.shape) - self.rate.log(), "linear": self.shape / self.rate}

    def with_natural(self, natural: Mapping[str, Tensor]) -> Self:
        self._check_keys(natural)
        return type(self)(natural["log"] + 1, -natural["linear"])

    def with_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        self._check_keys(expectation)
        return type(self)(*shape_and_rate("Gamma", expectation["log"], expectation["linear"]))

    def statistics(self, theta: Tensor) -> Natural:
        points(theta, self.shape, 0)
        above("points of a Gamma distribution", theta, advice="")
        return {"log": theta.log(), "linear": theta}

    def log_partition(self) -> Tensor:
        return lgamma(self.shape) - self.shape * self.rate.log()

    def entropy(self) -> Tensor:
        # a − log b + log Γ(a) + (1 − a) ψ(a), without cancellation
        shape = self.shape
        remainder = stirling_remainder(shape) + (shape - 1) * log_minus_digamma(shape)
        return 0.5 * shape.log() + HALF_LOG_2PI + remainder - self.rate.log()

    def _kl(self, other: Self) -> Tensor:
        logs = log_ratio(other.rate, self.rate)
        of_shapes = lgamma_divergence(other.shape, self.shape)
        of_rates = self.shape * ((other.rate - self.rate) / self.rate - logs)
        return of_shapes + of_rates - (other.shape - self.shape) * logs

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Positive numbers ``[n, ...]``; none underflows to 0."""
        logs = log_gamma_draw(many(self.shape, n), generator) - self.rate.log()
        return logs.exp().clamp(min=torch.finfo(logs.dtype).tiny)


@dataclass(frozen=True, eq=False)
class InverseGamma(ExponentialFamily):
    """1/θ ~ Gamma(a, b): λ = (−a − 1, −b), T(θ) = (log θ, 1/θ), μ = (log b − ψ(a), a/b), h = 1.

    Attributes:
        shape: a > 0, ``[...]``.
        scale: b > 0, ``[...]``.

    Raises:
        InputError: shape or scale that is not positive and finite, or of different shapes.

    Example:
        >>> InverseGamma(torch.tensor(3.0), torch.tensor(4.0)).natural
        {'log': tensor(-4.), 'inverse': tensor(-4.)}
    """

    shape: Tensor
    scale: Tensor
    ranks: ClassVar[Mapping[str, int]] = {"log": 0, "inverse": 0}

    def __post_init__(self) -> None:
        above("shape", self.shape)
        above("scale", self.scale)
        same_shape(shape=self.shape, scale=self.scale)

    @property
    def _reciprocal(self) -> Gamma:
        """The distribution of 1/θ."""
        return Gamma(self.shape, self.scale)

    @property
    def natural(self) -> Natural:
        return {"log": -self.shape - 1, "inverse": -self.scale}

    @property
    def expectation(self) -> Natural:
        return {"log": self.scale.log() - digamma(self.shape), "inverse": self.shape / self.scale}

    def with_natural(self, natural: Mapping[str, Tensor]) -> Self:
        self._check_keys(natural)
        return type(self)(-natural["log"] - 1, -natural["inverse"])

    def with_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        self._check_keys(expectation)
        log, inverse = expectation["log"], expectation["inverse"]
        return type(self)(*shape_and_rate("InverseGamma", -log, inverse))

    def statistics(self, theta: Tensor) -> Natural:
        points(theta, self.shape, 0)
        above("points of an inverse-Gamma distribution", theta, advice="")
        return {"log": theta.log(), "inverse": 1 / theta}

    def log_partition(self) -> Tensor:
        return self._reciprocal.log_partition()

    def entropy(self) -> Tensor:
        # d(1/θ) = −dθ/θ²: the entropy of 1/θ, + 2 E[log θ]
        alone = Gamma(self.shape, torch.ones_like(self.shape)).entropy()
        return alone + self.scale.log() - 2 * digamma(self.shape)

    def _kl(self, other: Self) -> Tensor:
        return self._reciprocal.kl(other._reciprocal)

    def expected_point(self) -> Tensor:
        """b / (a − 1)."""
        if bool((self.shape <= 1).any()):
            least = float(self.shape.amin())
            raise InputError(f"an InverseGamma has a mean for shapes above 1, got {least:.6g}")
        return self.scale / (self.shape - 1)

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Positive numbers ``[n, ...]``; none overflows."""
        logs = self.scale.log() - log_gamma_draw(many(self.shape, n), generator)
        return logs.exp().clamp(max=torch.finfo(logs.dtype).max)


def shape_and_rate(family: str, log: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """(a, b) with ψ(a) − log b = ``log`` and a/b = ``mean``."""
    finite("expectation parameters", log)
    finite("expectation parameters", mean)
    positive = mean > 0
    excess = torch.where(positive, mean, math.nan).log() - log
    expectation_inside(
        family, excess > 0, "a mean lies above 0, and its logarithm above the mean of the logarithm"
    )
    shape = invert_excess_logarithm(excess)
    return shape, shape / mean
