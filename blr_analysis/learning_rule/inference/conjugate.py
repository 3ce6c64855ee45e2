"""Conjugate Bayes: one step of the rule with ρ = 1 (Khan & Rue, section 5.1).

A likelihood is conjugate to a family if it is linear in the family's statistics,

    log p(y|θ) = ⟨λ̃(y), T(θ)⟩ + c(y).

Then ∇_μ E_q[log p(y|θ)] = λ̃(y) for every q, and one step of the rule reaches the posterior
(Eq. 54). A model defines λ̃ and c. All models share the formulas of posterior and predictive:

    λ = λ_0 + Σ_i λ̃(y_i),      log p(y|D) = A(λ + λ̃(y)) − A(λ) + c(y).

These are the likelihoods:

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
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from blr_analysis.checks import at_least, positive_number
from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural, add, scale
from blr_analysis.learning_rule.families.dirichlet import Beta, Dirichlet
from blr_analysis.learning_rule.families.gamma import Gamma, NormalWishart
from blr_analysis.learning_rule.families.gaussian import FullGaussian
from blr_analysis.learning_rule.families.special import LOG_2PI
from blr_analysis.learning_rule.inference.fitted import Fitted, Model, count, moved, rows, total
from blr_analysis.learning_rule.rule import blr_step


@dataclass(frozen=True)
class Factor:
    """A likelihood that is conjugate to a family: log p(y|θ) = ⟨λ̃(y), T(θ)⟩ + c(y).

    Attributes:
        family: the class of the prior.
        check: (data, prior) → the data in the prior's dtype; it raises for data that do not fit.
        site: data → λ̃, with a leading dimension for the examples.
        constant: data → c ``[N]``.

    Example:
        Waiting times y > 0 with an unknown rate θ, log p(y|θ) = log θ − θ y:

        >>> from blr_analysis.learning_rule.inference import Conjugate, Factor
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


def bernoulli() -> Factor:
    """Outcomes y ``[N]``, 0 or 1, of probability θ; conjugate to :class:`Beta`.

    λ̃(y) = (y, 1 − y), c(y) = 0.

    Example:
        >>> bernoulli().site(torch.tensor([1.0, 0.0]))
        {'log': tensor([1., 0.]), 'log_complement': tensor([0., 1.])}
    """

    return Factor(
        family=Beta,
        check=_numbers(lambda y: (y == 0) | (y == 1), "0 or 1"),
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

    return Factor(
        family=Gamma,
        check=_numbers(lambda y: (y >= 0) & (y == y.round()), "a count: a whole number from 0 up"),
        site=lambda y: {"log": y, "linear": -torch.ones_like(y)},
        constant=lambda y: -torch.lgamma(y.double() + 1),
    )


def categorical(n_classes: int) -> Factor:
    """Classes y ``[N]``, integers 0 … K − 1; conjugate to :class:`Dirichlet`.

    λ̃(y) is the indicator of y, c(y) = 0.

    Raises:
        InputError: there are fewer than two classes.

    Example:
        >>> categorical(3).site(torch.tensor([2, 0]))
        {'log': tensor([[0, 0, 1],
                [1, 0, 0]])}
    """
    at_least(2, "n_classes", n_classes)
    check_classes = _numbers(
        lambda y: (y >= 0) & (y < n_classes) & (y == y.round()),
        f"a class: an integer from 0 to {n_classes - 1}",
    )

    def check(y: Any, prior: Dirichlet) -> Tensor:
        classes_of_prior = prior.concentration.shape[-1]
        if classes_of_prior != n_classes:
            raise InputError(f"the prior has {classes_of_prior} classes, not {n_classes}")
        return check_classes(y, prior)

    return Factor(
        family=Dirichlet,
        check=check,
        site=lambda y: {"log": one_hot(y.long(), n_classes).to(y)},
        constant=torch.zeros_like,
    )


def gaussian() -> Factor:
    """Vectors y ``[N, D]`` of unknown mean and precision; conjugate to :class:`NormalWishart`.

    λ̃(y) = (y, −½, −½ y yᵀ, ½), c(y) = −½ D log 2π. The second moments y yᵀ are taken about 0: if
    the mean of the data is many standard deviations away from 0, give a prior in double precision.

    Example:
        >>> sorted(gaussian().site(torch.ones(4, 2)))
        ['linear', 'logdet', 'shift', 'square']
    """

    def check(y: Any, prior: NormalWishart) -> Tensor:
        n_columns = prior.mean.shape[-1]
        y = real("y", y, prior.mean, ndim=2)
        if y.shape[1] != n_columns:
            raise DataError(f"y must be [N, {n_columns}], got {tuple(y.shape)}")
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
    """Linear regression y ~ N(xᵀθ, σ²) with known σ²; the data are (x ``[N, P]``, y ``[N]``).

    Conjugate to :class:`FullGaussian` (K&R, section 5.1): λ̃ = (x y, −½ x xᵀ) / σ² and
    c = −½ (y²/σ² + log 2πσ²).

    Raises:
        InputError: the variance is not positive.

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
        _, y = data
        return -0.5 * (y.square() / noise_variance + math.log(noise_variance) + LOG_2PI)

    def check(data: Any, prior: FullGaussian) -> tuple[Tensor, Tensor]:
        x, y = pairs(data, prior.mean)
        return columns(x, prior.mean, len(prior.mean)), y

    return Factor(FullGaussian, check, site, constant)


def real(name: str, values: Any, like: Tensor, ndim: int) -> Tensor:
    """``values`` as a finite, non-empty tensor of ``ndim`` dimensions, or a DataError."""
    if not isinstance(values, Tensor) or values.is_complex():
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise DataError(f"{name} must be a real tensor, got {kind}")
    if values.ndim != ndim or values.numel() == 0:
        shape = "[N]" if ndim == 1 else "[N, D]"
        raise DataError(f"{name} must be a non-empty tensor {shape}, got {tuple(values.shape)}")
    values = values.to(like)
    is_finite = torch.isfinite(values.reshape(len(values), -1)).all(1)
    if not bool(is_finite.all()):
        first = int((~is_finite).nonzero()[0])
        raise DataError(f"{name} is not finite at example {first}")
    return values


def _numbers(inside: Callable[[Tensor], Tensor], support: str) -> Callable[[Any, Any], Tensor]:
    """The check (y, prior) → y ``[N]`` of numbers that must lie in a support.

    Args:
        inside: y → whether each number lies in the support ``[N]``.
        support: the same in words, for the message.
    """

    def check(y: Any, prior: ExponentialFamily) -> Tensor:
        some_parameter = next(iter(prior.natural.values()))
        y = real("y", y, some_parameter, ndim=1)
        is_inside = inside(y)
        if not bool(is_inside.all()):
            first = int((~is_inside).nonzero()[0])
            raise DataError(f"y must be {support}; example {first} is {float(y[first]):g}")
        return y

    return check


def pairs(data: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """The data of a regression, (x ``[N, P]``, y ``[N]``), or a DataError."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise DataError("the data of a regression are a pair (x [N, P], y [N])")
    x = real("x", data[0], like, ndim=2)
    y = real("y", data[1], like, ndim=1)
    if len(x) != len(y):
        raise DataError(f"x and y must have the same length, got {len(x)} and {len(y)}")
    return x, y


def columns(x: Any, like: Tensor, size: int) -> Tensor:
    """Inputs ``[M, D]`` with D = ``size`` columns, or a DataError."""
    x = real("x", x, like, ndim=2)
    if x.shape[1] != size:
        raise DataError(f"x has {x.shape[1]} columns; the model takes {size}")
    return x


Q = TypeVar("Q", bound=ExponentialFamily)


@dataclass(frozen=True)
class Conjugate(Model):
    """A conjugate model: a prior, and the likelihood of one example; in double precision.

    The posterior of one fit may be the prior of the next one; two such fits give what a single fit
    on all their data gives.

    Attributes:
        prior: a member of the factor's family.
        factor: the likelihood, such as :func:`bernoulli` or another :class:`Factor`.

    Raises:
        InputError: the factor is no :class:`Factor`, or the prior is of another family or more
            than one distribution.

    Example:
        >>> from blr_analysis.learning_rule.families import FullGaussian
        >>> from blr_analysis.learning_rule.inference import Conjugate, linear
        >>> prior = FullGaussian(torch.zeros(1), torch.eye(1))
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 3.0])
        >>> Conjugate(prior, linear(noise_variance=1.0)).fit((x, y)).q.mean
        tensor([1.1667], dtype=torch.float64)
    """

    prior: ExponentialFamily
    factor: Factor

    def __post_init__(self) -> None:
        if not isinstance(self.factor, Factor):
            raise InputError(f"factor must be one such as bernoulli(), got {self.factor!r}")
        is_of_family = isinstance(self.prior, self.factor.family)
        if not is_of_family or self.prior.log_partition().ndim > 0:
            raise InputError(
                f"the prior of this factor is one {self.factor.family.__name__} without copies, "
                f"got {type(self.prior).__name__}"
            )

    def fit(self, data: Any) -> Fitted[Any]:
        """The posterior, by one step of the rule.

        Args:
            data: a tensor ``[N, …]`` or a tuple of them, as the factor takes them.

        Returns:
            The posterior, with exact sites, predictive and left-out densities. Its ``history`` is
            one number, the log evidence.

        Raises:
            DataError: there are no examples, or they are misshapen, not finite or out of range.
            InputError: the data are so large that rounding leaves no posterior.
        """
        data = self.check(data)
        prior = wide(self.prior)
        q = self.step(prior, data)
        constant = self.factor.constant(data).sum()
        evidence = float((q.log_partition() - prior.log_partition() + constant).detach())
        return Fitted(q, [evidence], "log evidence", prior=prior, model=self, data=data)

    def check(self, data: Any) -> Any:
        return self.factor.check(data, wide(self.prior))

    def sites(self, q: Any, data: Any) -> Natural:
        return self.factor.site(data)

    def step(self, q: Any, data: Any) -> Any:
        """The posterior of these examples: the prior plus all their sites."""

        def site_of(chosen: Tensor) -> Natural:
            return self.factor.site(rows(data, chosen))

        sites = total(site_of, torch.arange(count(data)))
        return bayes(wide(self.prior), sites)

    def log_predictive(self, q: Any, data: Any) -> Tensor:
        """log p(y|D) = A(λ + λ̃(y)) − A(λ) + c(y) of M examples, in nats ``[M]``."""
        after = moved(q, self.sites(q, data), 1.0)
        return after.log_partition() - q.log_partition() + self.factor.constant(data)


def bayes(prior: Q, site: Natural) -> Q:
    """The posterior λ_0 + λ̃: the rule at ρ = 1 for the loss −log prior − ⟨λ̃, T(θ)⟩.

    Raises:
        InputError: λ_0 + λ̃ is outside of the family.

    >>> from blr_analysis.learning_rule.families import Beta
    >>> bayes(Beta(torch.tensor(1.0), torch.tensor(1.0)),
    ...       {"log": torch.tensor(2.0), "log_complement": torch.tensor(1.0)})
    Beta(a=tensor(3.), b=tensor(2.))
    """
    return toward(prior, prior, site, 1.0)


def toward(q: Q, prior: Q, sites: Natural, rho: float) -> Q:
    """q after one step of the rule, of size ρ, for the loss −log prior − ⟨λ̃, T(θ)⟩.

    The prior has a base measure h: ∇_μ E_q[−log prior] = −λ_0 − ∇_μ E_q[log h].
    """
    loss_gradient = scale(add(prior.natural, sites, q.base_gradient()), -1.0)
    return blr_step(q, loss_gradient, rho)


def wide(q: Q) -> Q:
    """The same distribution in double precision."""
    return q.with_natural({name: value.double() for name, value in q.natural.items()})
