"""Normal–Gamma distributions: mean and precision of normal distributions, elementwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural
from blr_analysis.learning_rule.families.domain import (
    above,
    expectation_inside,
    finite,
    points,
    same_shape,
)
from blr_analysis.learning_rule.families.drawing import many, normal
from blr_analysis.learning_rule.families.gamma import Gamma, shape_and_rate
from blr_analysis.learning_rule.families.special import LOG_2PI, log_ratio


@dataclass(frozen=True, eq=False)
class NormalGamma(ExponentialFamily):
    """Mean x and precision τ of a normal distribution: x | τ ~ N(m, 1/(κτ)), τ ~ Gamma(a, b).

    θ is a dictionary with ``mean`` and ``precision``. T(θ) = (τx, τx², τ, log τ), h = 1 and
    λ = (κm, −κ/2, −b − κm²/2, a − ½). An observation y adds (y, −½, −y²/2, ½) to λ.

    Attributes:
        mean: m ``[...]``.
        kappa: κ > 0, ``[...]``: how many observations the mean is worth.
        shape: a > 0, ``[...]``.
        rate: b > 0, ``[...]``.

    Raises:
        InputError: a parameter outside of its domain, or of another shape.

    Example:
        >>> zero, one = torch.tensor(0.0), torch.tensor(1.0)
        >>> q = NormalGamma(zero, one, one, one)
        >>> y = torch.tensor(2.0)
        >>> site = {"shift": y, "square": -one / 2, "linear": -y**2 / 2, "log": one / 2}
        >>> from blr_analysis.learning_rule.families.base import add
        >>> posterior = q.with_natural(add(q.natural, site))
        >>> posterior.mean, posterior.kappa, posterior.shape, posterior.rate
        (tensor(1.), tensor(2.), tensor(1.5000), tensor(2.))
    """

    mean: Tensor
    kappa: Tensor
    shape: Tensor
    rate: Tensor
    ranks: ClassVar[Mapping[str, int]] = {"shift": 0, "square": 0, "linear": 0, "log": 0}

    def __post_init__(self) -> None:
        finite("mean", self.mean)
        for name in ("kappa", "shape", "rate"):
            above(name, getattr(self, name))
        same_shape(mean=self.mean, kappa=self.kappa, shape=self.shape, rate=self.rate)

    @property
    def _gamma(self) -> Gamma:
        """The marginal of τ."""
        return Gamma(self.shape, self.rate)

    @property
    def natural(self) -> Natural:
        pull = self.kappa * self.mean
        return {
            "shift": pull,
            "square": -0.5 * self.kappa,
            "linear": -self.rate - 0.5 * pull * self.mean,
            "log": self.shape - 0.5,
        }

    @property
    def expectation(self) -> Natural:
        of_precision = self._gamma.expectation
        shift = of_precision["linear"] * self.mean
        square = 1 / self.kappa + of_precision["linear"] * self.mean.square()
        return {"shift": shift, "square": square, **of_precision}

    def with_natural(self, natural: Mapping[str, Tensor]) -> Self:
        self._check_keys(natural)
        kappa = -2 * natural["square"]
        above("kappa", kappa)
        mean = natural["shift"] / kappa
        rate = -natural["linear"] - 0.5 * kappa * mean.square()
        return type(self)(mean, kappa, natural["log"] + 0.5, rate)

    def with_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        self._check_keys(expectation)
        precision = expectation["linear"]
        shape, rate = shape_and_rate("NormalGamma", expectation["log"], precision)
        mean = expectation["shift"] / precision
        spread = expectation["square"] - mean * expectation["shift"]
        expectation_inside("NormalGamma", spread > 0, "E[τx²] lies above E[τx]² / E[τ]")
        return type(self)(mean, 1 / spread, shape, rate)

    def statistics(self, theta: Mapping[str, Tensor]) -> Natural:
        self._check_point(theta, ("mean", "precision"))
        x, tau = theta["mean"], theta["precision"]
        points(x, self.mean, 0, "mean")
        points(tau, self.mean, 0, "precision")
        above("precisions", tau, advice="")
        return {"shift": tau * x, "square": tau * x.square(), "linear": tau, "log": tau.log()}

    def log_partition(self) -> Tensor:
        return self._gamma.log_partition() + 0.5 * (LOG_2PI - self.kappa.log())

    def entropy(self) -> Tensor:
        # of the Gamma, and of a normal distribution of precision κτ on average over τ
        log_precision = self.kappa.log() + self.expectation["log"]
        return self._gamma.entropy() + 0.5 * (LOG_2PI + 1 - log_precision)

    def _kl(self, other: Self) -> Tensor:
        ratio = (other.kappa - self.kappa) / self.kappa
        gap = other.kappa * self.shape / self.rate * (self.mean - other.mean).square()
        of_mean = 0.5 * (ratio - log_ratio(other.kappa, self.kappa) + gap)
        return self._gamma.kl(other._gamma) + of_mean

    def expected_point(self) -> dict[str, Tensor]:
        """``{"mean": m, "precision": a / b}``; m is the centre of x where x has no mean, a ≤ ½."""
        return {"mean": self.mean, "precision": self.shape / self.rate}

    def sample(
        self, n: int | None = None, *, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """``{"mean": x, "precision": τ}``, each ``[n, ...]``."""
        tau = self._gamma.sample(n, generator=generator)
        noise = normal(many(self.mean, n), generator)
        return {"mean": self.mean + noise / (self.kappa * tau).sqrt(), "precision": tau}
