"""Likelihoods of one number f, log p(y|f), and their integrals over a Gaussian f ~ N(m, v).

A likelihood has to define log p(y|f) only. Expectations of it have a closed form, or are computed
by Gauss–Hermite quadrature; their derivatives come from autograd:

    E_q[g(f)] ≈ Σ_k w_k g(m + √v z_k)

The nodes are √v / 3 apart where q has most of its mass. That is enough for functions which vary on
no shorter scale, such as log p(y|f) of the likelihoods here for √v up to 3. The density p(y|f),
for example of a large count, may be much narrower than q and far from its mean. Its integral is
therefore a sum over a grid whose spacing is √v / 50.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.expectations import places
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian
from blr_analysis.learning_rule.inference.fitted import answer
from blr_analysis.likelihoods import Bernoulli, Gaussian, Likelihood, Poisson

NODES = 100  # of the quadrature
GRID_POINTS = 1601
GRID_REACH = 16  # standard deviations on either side of the mean
Function = Callable[[Tensor], Tensor]
"""Points ``[K, N]`` → values ``[K, N]``, element by element."""
Integral = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(y, m, v) → an integral over f ~ N(m, v), element by element."""


def expected(f: DiagonalGaussian, function: Function) -> Tensor:
    """E_q[function(f_i)] of each number, ``[N]``; differentiable in mean and precision of ``f``.

    >>> expected(DiagonalGaussian(torch.zeros(2), torch.tensor([1.0, 0.01])), torch.square)
    tensor([  1., 100.])
    """
    nodes, weights = places(f, "quadrature", NODES)
    return weights @ function(nodes)


def log_expected(f: DiagonalGaussian, log_function: Function) -> Tensor:
    """log E_q[exp(log_function(f_i))] of each number, ``[N]``; safe where the integral underflows.

    >>> log_expected(DiagonalGaussian(torch.zeros(1), torch.ones(1)), lambda t: 2 * t)
    tensor([2.])
    """
    grid = torch.linspace(-GRID_REACH, GRID_REACH, GRID_POINTS, dtype=torch.float64)
    z = grid.to(f.mean).unsqueeze(1)
    std = f.precision.rsqrt()

    def log_sum(part: Tensor) -> Tensor:
        log_density = -0.5 * part.square()
        return (log_function(f.mean + part * std) + log_density).logsumexp(0)

    log_total = reduce(torch.logaddexp, map(log_sum, z.split(NODES)))
    return log_total - (-0.5 * z.square()).logsumexp(0)


@dataclass(frozen=True)
class ScalarLikelihood:
    """p(y_i | f_i) with one number f_i for each example.

    Attributes:
        name: the likelihood's name in messages.
        log_prob: (y ``[N]``, f ``[N]`` or ``[K, N]``) → log p(y|f), element by element and
            broadcast, in nats; differentiable.
        mean: f → E[y|f], for labels the probability of y = 1; None: it is not known.
        targets: a likelihood of :mod:`blr_analysis.likelihoods`, which checks the targets; None:
            any finite number is a target.
        expected: E_q[log p(y|f)] in closed form; None: by quadrature.
        predictive: log E_q[p(y|f)] in closed form; None: by a sum over the grid.

    Example:
        >>> logistic = scalar_likelihood("bernoulli")
        >>> logistic.log_prob(torch.tensor([1.0]), torch.tensor([0.0]))
        tensor([-0.6931])
    """

    name: str
    log_prob: Callable[[Tensor, Tensor], Tensor]
    mean: Callable[[Tensor], Tensor] | None = None
    targets: Likelihood | None = None
    expected: Integral | None = None
    predictive: Integral | None = None


AnyLikelihood = str | Likelihood | ScalarLikelihood | Callable[[Tensor, Tensor], Tensor]


def from_package(likelihood: Likelihood) -> ScalarLikelihood:
    """A likelihood of :mod:`blr_analysis.likelihoods` with one output.

    log p(y|f) includes the terms that do not depend on f, whatever the options of ``likelihood``.
    """
    if isinstance(likelihood, Poisson):
        likelihood = Poisson()
    elif isinstance(likelihood, Gaussian):
        likelihood = Gaussian(likelihood.variance)

    def log_prob(y: Tensor, f: Tensor) -> Tensor:
        return -likelihood.nll(f.unsqueeze(-1), y.expand_as(f).unsqueeze(-1))

    expected_in_closed_form, predictive_in_closed_form = _closed_forms(likelihood)
    return ScalarLikelihood(
        name=likelihood.name,
        log_prob=log_prob,
        mean=likelihood.mean,  # works element by element
        targets=likelihood,
        expected=expected_in_closed_form,
        predictive=predictive_in_closed_form,
    )


def _closed_forms(likelihood: Likelihood) -> tuple[Integral | None, Integral | None]:
    """``expected`` and ``predictive`` of a likelihood, where there is a closed form."""
    if isinstance(likelihood, Poisson):
        return _expected_poisson, None
    if not isinstance(likelihood, Gaussian):
        return None, None
    variances = likelihood.variance
    noise = variances[0] if isinstance(variances, tuple) else variances  # f is one number

    def expected_gaussian(y: Tensor, m: Tensor, v: Tensor) -> Tensor:
        return _log_normal(y - m, torch.full_like(v, noise)) - 0.5 * v / noise

    def predictive_gaussian(y: Tensor, m: Tensor, v: Tensor) -> Tensor:
        return _log_normal(y - m, v + noise)

    return expected_gaussian, predictive_gaussian


def _expected_poisson(y: Tensor, m: Tensor, v: Tensor) -> Tensor:
    """E[y f − e^f] − log y! for f ~ N(m, v)."""
    return y * m - (m + 0.5 * v).exp() - torch.lgamma(y + 1)


def _log_normal(residual: Tensor, variance: Tensor) -> Tensor:
    """The log density of a Gaussian at these distances from its mean."""
    return -0.5 * (residual.square() / variance + (2 * math.pi * variance).log())


def _probit(y: Tensor, f: Tensor) -> Tensor:
    """log Φ(±f), with + for y = 1 and − for y = 0."""
    sign = 2 * y - 1
    return torch.special.log_ndtr(sign * f)


def _predictive_probit(y: Tensor, m: Tensor, v: Tensor) -> Tensor:
    """log Φ(±m / √(1 + v)), the log predictive of the probit likelihood for f ~ N(m, v)."""
    return _probit(y, m * (1 + v).rsqrt())


NAMED = {
    "bernoulli": from_package(Bernoulli()),
    "poisson": from_package(Poisson()),
    "gaussian": from_package(Gaussian()),
    "probit": ScalarLikelihood(
        name="probit",
        log_prob=_probit,
        mean=torch.special.ndtr,
        targets=Bernoulli(),
        predictive=_predictive_probit,
    ),
}


def scalar_likelihood(likelihood: AnyLikelihood) -> ScalarLikelihood:
    """The :class:`ScalarLikelihood` for a name, a likelihood object, or a function log p(y|f).

    Raises:
        InputError: the name is unknown, or the likelihood has many outputs.
    """
    if isinstance(likelihood, ScalarLikelihood):
        return likelihood
    if isinstance(likelihood, Bernoulli | Poisson | Gaussian):
        return from_package(likelihood)
    if isinstance(likelihood, str) and likelihood in NAMED:
        return NAMED[likelihood]
    if callable(likelihood) and not isinstance(likelihood, type | Likelihood):
        return ScalarLikelihood(getattr(likelihood, "__name__", "given"), likelihood)
    named = ", ".join(map(repr, NAMED))
    raise InputError(f"likelihood must be one of {named}, or (y, f) -> log p(y|f)")


def checked_targets(likelihood: ScalarLikelihood, y: Tensor) -> Tensor:
    """Targets ``[N]`` in the form that the likelihood takes, after a trial of log p(y|f) on them.

    Raises:
        DataError: a target is outside the support, or not finite.
        InputError: log p(y|f) is not one number for each example, or not differentiable in f.
    """
    if likelihood.targets is not None:
        outputs = y.new_zeros(y.shape).unsqueeze(-1)
        y = likelihood.targets.prepare_targets(y, outputs).squeeze(-1)
    if not bool(torch.isfinite(y).all()):
        raise DataError("the targets contain NaN or inf; drop or mend those examples")
    contract = (
        f"likelihood {likelihood.name!r} must be a function (y [N], f [K, N]) -> log p(y|f), "
        "differentiable in f"
    )
    with torch.enable_grad():
        f = y.new_zeros(2, len(y)).requires_grad_()
        values = answer(contract, f.shape, likelihood.log_prob, y, f)
    if not values.requires_grad:
        raise InputError(contract)
    return y


def expected_log_prob(likelihood: ScalarLikelihood, f: DiagonalGaussian, y: Tensor) -> Tensor:
    """E_q[log p(y_i|f_i)] of each example, ``[N]``, in nats; differentiable in q.

    >>> f = DiagonalGaussian(torch.zeros(1), torch.ones(1))
    >>> expected_log_prob(scalar_likelihood("poisson"), f, torch.ones(1))
    tensor([-1.6487])
    """
    if likelihood.expected is not None:
        return likelihood.expected(y, f.mean, 1 / f.precision)
    return expected(f, lambda nodes: likelihood.log_prob(y, nodes))


def expected_mean(likelihood: ScalarLikelihood, f: DiagonalGaussian) -> Tensor:
    """E_q[E[y_i|f_i]], ``[N]``.

    Raises:
        InputError: the likelihood has no mean.

    >>> f = DiagonalGaussian(torch.ones(1), torch.ones(1))
    >>> expected_mean(scalar_likelihood("probit"), f)
    tensor([0.7602])
    """
    if likelihood.mean is None:
        raise InputError("the likelihood has no mean: give ScalarLikelihood(name, log_prob, mean)")
    return expected(f, likelihood.mean)


def log_predictive(likelihood: ScalarLikelihood, f: DiagonalGaussian, y: Tensor) -> Tensor:
    """log ∫ p(y|f) q(f) df of each example, ``[N]``, in nats; safe where p underflows.

    >>> f = DiagonalGaussian(torch.zeros(1), torch.ones(1))
    >>> log_predictive(scalar_likelihood("bernoulli"), f, torch.ones(1)).exp()
    tensor([0.5000])
    """
    if likelihood.predictive is not None:
        return likelihood.predictive(y, f.mean, 1 / f.precision)
    return log_expected(f, lambda points: likelihood.log_prob(y, points))
