"""Likelihoods that are conjugate to a family: the site λ̃ of an example, and its constant.

    log p(y|θ) = ⟨λ̃(y), T(θ)⟩ + c(y)

| factor | θ | prior | λ̃(y) |
|---|---|---|---|
| :func:`bernoulli` | P(y = 1) | :class:`Beta` | (y, 1 − y) |
| :func:`poisson` | rate | :class:`Gamma` | (y, −1) |
| :func:`categorical` | P(y = k) | :class:`Dirichlet` | the indicator of y |
| :func:`gaussian` | mean and precision | :class:`NormalWishart` | (y, −½, −½ y yᵀ, ½) |
| :func:`linear` | weights | :class:`FullGaussian` | (x y, −½ x xᵀ) / σ² |

(Khan & Rue, section 5.1; Murphy, "Probabilistic Machine Learning: Advanced Topics", 3.4.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from blr_analysis.checks import at_least, positive_number
from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural
from blr_analysis.learning_rule.families.dirichlet import Beta, Dirichlet
from blr_analysis.learning_rule.families.gamma import Gamma, NormalWishart
from blr_analysis.learning_rule.families.gaussian import FullGaussian
from blr_analysis.learning_rule.families.special import LOG_2PI


@dataclass(frozen=True)
class Factor:
    """A likelihood that is conjugate to a family: log p(y|θ) = ⟨λ̃(y), T(θ)⟩ + c(y).

    Attributes:
        family: the class of the prior.
        check: (data, prior) → the data in the prior's dtype; raises what is wrong with them.
        site: data → λ̃, with a leading dimension for the examples.
        constant: data → c ``[N]``.
        predictive: (q, data) → ``[N]`` where there is a form that loses fewer digits than the
            difference of log-partitions.

    Example:
        Waiting times y > 0 of unknown rate θ, log p(y|θ) = log θ − θ y:

        >>> from blr_analysis.learning_rule.inference import Conjugate
        >>> exponential = Factor(
        ...     family=Gamma,
        ...     check=lambda y, prior: real("y", y, prior.rate, 1),
        ...     site=lambda y: {"log": torch.ones_like(y), "linear": -y},
        ...     constant=torch.zeros_like,
        ... )
        >>> prior = Gamma(torch.tensor(1.0), torch.tensor(1.0))
        >>> Conjugate(prior, exponential).fit(torch.tensor([2.0, 3.0])).q
        Gamma(shape=tensor(3., dtype=torch.float64), rate=tensor(6., dtype=torch.float64))
    """

    family: type[ExponentialFamily]
    check: Callable[[Any, Any], Any]
    site: Callable[[Any], Natural]
    constant: Callable[[Any], Tensor]
    predictive: Callable[[Any, Any], Tensor] | None = None


def bernoulli() -> Factor:
    """Outcomes y ``[N]``, 0 or 1, of probability θ; conjugate to :class:`Beta`.

    λ̃(y) = (y, 1 − y), c(y) = 0.

    Example:
        >>> bernoulli().site(torch.tensor([1.0, 0.0]))
        {'log': tensor([1., 0.]), 'log_complement': tensor([0., 1.])}
    """

    def check(y: Any, prior: Beta) -> Tensor:
        y = real("y", y, prior.a, 1)
        _within(y, (y == 0) | (y == 1), "0 or 1")
        return y

    return Factor(
        family=Beta,
        check=check,
        site=lambda y: {"log": y, "log_complement": 1 - y},
        constant=torch.zeros_like,
    )


def poisson() -> Factor:
    """Counts y ``[N]`` of rate θ; conjugate to :class:`Gamma`.

    λ̃(y) = (y, −1), c(y) = −log y!.

    Example:
        >>> poisson().site(torch.tensor([3.0]))
        {'log': tensor([3.]), 'linear': tensor([-1.])}
    """

    def check(y: Any, prior: Gamma) -> Tensor:
        y = real("y", y, prior.shape, 1)
        _within(y, (y >= 0) & (y == y.round()), "a count: a whole number from 0 up")
        return y

    return Factor(
        family=Gamma,
        check=check,
        site=lambda y: {"log": y, "linear": -torch.ones_like(y)},
        constant=lambda y: -torch.lgamma(y.double() + 1),
    )


def categorical(n_classes: int) -> Factor:
    """Classes y ``[N]``, integers 0 … K − 1; conjugate to :class:`Dirichlet`.

    λ̃(y) is the indicator of y, c(y) = 0.

    Raises:
        InputError: fewer than two classes.

    Example:
        >>> categorical(3).site(torch.tensor([2, 0]))
        {'log': tensor([[0, 0, 1],
                [1, 0, 0]])}
    """
    at_least(2, "n_classes", n_classes)

    def check(y: Any, prior: Dirichlet) -> Tensor:
        if prior.concentration.shape[-1] != n_classes:
            raise InputError(
                f"the prior has {prior.concentration.shape[-1]} classes, not {n_classes}"
            )
        y = real("y", y, prior.concentration, 1)
        inside = (y >= 0) & (y < n_classes) & (y == y.round())
        _within(y, inside, f"a class: an integer from 0 to {n_classes - 1}")
        return y

    return Factor(
        family=Dirichlet,
        check=check,
        site=lambda y: {"log": one_hot(y.long(), n_classes).to(y)},
        constant=torch.zeros_like,
    )


def gaussian() -> Factor:
    """Vectors y ``[N, D]`` of unknown mean and precision; conjugate to :class:`NormalWishart`.

    Second moments are counted from 0: with data whose mean is many standard deviations away from
    it, take the prior in double precision. λ̃(y) = (y, −½, −½ y yᵀ, ½), c(y) = −½ D log 2π.

    Example:
        >>> sorted(gaussian().site(torch.ones(4, 2)))
        ['linear', 'logdet', 'shift', 'square']
    """

    def check(y: Any, prior: NormalWishart) -> Tensor:
        y = real("y", y, prior.mean, 2)
        if y.shape[1] != prior.mean.shape[-1]:
            raise DataError(f"y must be [N, {prior.mean.shape[-1]}], got {tuple(y.shape)}")
        return y

    def site(y: Tensor) -> Natural:
        half = torch.full_like(y[:, 0], 0.5)
        outer = y.unsqueeze(-1) * y.unsqueeze(-2)
        return {"shift": y, "square": -half, "linear": -0.5 * outer, "logdet": half}

    return Factor(
        family=NormalWishart,
        check=check,
        site=site,
        constant=lambda y: torch.full_like(y[:, 0], -0.5 * y.shape[1] * LOG_2PI),
    )


def linear(noise_variance: float) -> Factor:
    """Linear regression y ~ N(xᵀθ, σ²) with known noise; data (x ``[N, P]``, y ``[N]``).

    Conjugate to :class:`FullGaussian` (K&R, section 5.1): λ̃ = (x y, −½ x xᵀ) / σ² and
    c = −½ (y²/σ² + log 2πσ²).

    Raises:
        InputError: a variance that is not positive.

    Example:
        >>> linear(2.0).site((torch.tensor([[2.0]]), torch.tensor([3.0])))
        {'linear': tensor([[3.]]), 'square': tensor([[[-1.]]])}
    """
    noise_variance = positive_number("noise_variance", noise_variance)

    def site(data: tuple[Tensor, Tensor]) -> Natural:
        x, y = data
        outer = x.unsqueeze(-1) * x.unsqueeze(-2)
        return {
            "linear": x * y.unsqueeze(-1) / noise_variance,
            "square": -0.5 * outer / noise_variance,
        }

    def constant(data: tuple[Tensor, Tensor]) -> Tensor:
        return -0.5 * (data[1].square() / noise_variance + math.log(noise_variance) + LOG_2PI)

    def predictive(q: FullGaussian, data: tuple[Tensor, Tensor]) -> Tensor:
        x, y = data
        solved = torch.linalg.solve(q.precision, x.unsqueeze(-1)).squeeze(-1)
        variance = noise_variance + (x * solved).sum(-1)
        residual = y - (x * q.mean).sum(-1)
        return -0.5 * (residual.square() / variance + variance.log() + LOG_2PI)

    return Factor(FullGaussian, _pairs, site, constant, predictive)


def real(name: str, values: Any, like: Tensor, ndim: int) -> Tensor:
    """``values`` as a finite, non-empty tensor of ``ndim`` dimensions, or what is wrong."""
    if not isinstance(values, Tensor) or values.is_complex():
        got = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise DataError(f"{name} must be a real tensor, got {got}")
    if values.ndim != ndim or not values.numel():
        shape = "[" + ", ".join(("N", "D")[:ndim]) + "]"
        raise DataError(f"{name} must be a non-empty tensor {shape}, got {tuple(values.shape)}")
    values = values.to(like)
    bad = ~torch.isfinite(values.reshape(len(values), -1)).all(1)
    if bool(bad.any()):
        raise DataError(f"{name} is not finite at example {int(bad.nonzero()[0])}")
    return values


def _within(values: Tensor, inside: Tensor, wanted: str) -> None:
    if not bool(inside.all()):
        bad = int((~inside).nonzero()[0])
        raise DataError(f"y must be {wanted}; example {bad} is {float(values[bad]):g}")


def _pairs(data: Any, prior: FullGaussian) -> tuple[Tensor, Tensor]:
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise DataError("the data of a regression are a pair (x [N, P], y [N])")
    x, y = real("x", data[0], prior.mean, 2), real("y", data[1], prior.mean, 1)
    if len(x) != len(y) or x.shape[1] != prior.mean.shape[-1]:
        raise DataError(
            f"x must be [N, {prior.mean.shape[-1]}] and y [N], got {tuple(x.shape)} and "
            f"{tuple(y.shape)}"
        )
    return x, y
