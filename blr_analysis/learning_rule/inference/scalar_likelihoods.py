"""Likelihoods of one latent number for each example, as data: log p(y|f), and E[y|f].

The rule asks a likelihood for nothing but log p(y|f): its derivatives are those of an expectation
(:mod:`blr_analysis.learning_rule.inference.cvi`), which closed forms or Gauss–Hermite quadrature
and autograd provide:

    E_q[g(f)] ≈ Σ_k w_k g(m + √v z_k)

with nodes a third of √v apart where q has its mass: good for functions of f that bend no faster,
as log p(y|f) of the likelihoods here for √v up to 3. The density p(y|f) itself, of a large count
for example, may be far narrower than q, and far from its mean: its integral is over a grid of
√v / 50.
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

NODES = 100
REACH, GRID = 16.0, 1601
Function = Callable[[Tensor], Tensor]
"""Places ``[K, N]`` → as many values, element by element."""
Integral = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(y, m, v) → an integral over f ~ N(m, v), element by element."""


def expected(f: DiagonalGaussian, function: Function) -> Tensor:
    """E_q[function(f_i)] of each number, ``[N]``; differentiable in mean and precision of ``f``.

    >>> expected(DiagonalGaussian(torch.zeros(2), torch.tensor([1.0, 0.01])), torch.square)
    tensor([  1., 100.])
    """
    at, weights = places(f, "quadrature", NODES)
    return weights @ function(at)


def log_expected(f: DiagonalGaussian, log_function: Function) -> Tensor:
    """log E_q[exp(log_function(f_i))] of each number, ``[N]``; safe where the integral underflows.

    >>> log_expected(DiagonalGaussian(torch.zeros(1), torch.ones(1)), lambda t: 2 * t)
    tensor([2.])
    """
    z = torch.linspace(-REACH, REACH, GRID, dtype=torch.float64).to(f.mean).unsqueeze(1)
    parts = (
        (log_function(f.mean + part * f.precision.rsqrt()) - 0.5 * part.square()).logsumexp(0)
        for part in z.split(NODES)
    )
    return reduce(torch.logaddexp, parts) - (-0.5 * z.square()).logsumexp(0)


@dataclass(frozen=True)
class ScalarLikelihood:
    """p(y_i | f_i) with one number f_i for each example.

    Attributes:
        name: for messages.
        log_prob: (y ``[N]``, f ``[N]`` or ``[K, N]``) → log p(y|f), element by element and
            broadcast, in nats; differentiable.
        mean: f → E[y|f], the probability of y = 1 for labels; None where nobody asks for it.
        targets: the likelihood of the package whose targets these are, for checks; None: any.
        expected: E_q[log p(y|f)] in closed form; None: by quadrature.
        predictive: log E_q[p(y|f)] in closed form; None: by quadrature.

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


def from_package(likelihood: Likelihood) -> ScalarLikelihood:
    """A likelihood of :mod:`blr_analysis.likelihoods` with one output, its constant included."""
    if isinstance(likelihood, Poisson):
        likelihood = Poisson()
    elif isinstance(likelihood, Gaussian):
        likelihood = Gaussian(likelihood.variance)

    def log_prob(y: Tensor, f: Tensor) -> Tensor:
        return -likelihood.nll(f.unsqueeze(-1), y.expand_as(f).unsqueeze(-1))

    def mean(f: Tensor) -> Tensor:
        return likelihood.mean(f.unsqueeze(-1)).squeeze(-1)

    return ScalarLikelihood(likelihood.name, log_prob, mean, likelihood, *_closed(likelihood))


def _closed(likelihood: Likelihood) -> tuple[Integral | None, Integral | None]:
    """``expected`` and ``predictive``, where they are known."""
    if isinstance(likelihood, Poisson):
        return lambda y, m, v: y * m - (m + 0.5 * v).exp() - torch.lgamma(y + 1), None
    if isinstance(likelihood, Gaussian):
        given = likelihood.variance
        noise = given[0] if isinstance(given, tuple) else given  # f is one number
        return (
            lambda y, m, v: _log_normal(y - m, torch.full_like(v, noise)) - 0.5 * v / noise,
            lambda y, m, v: _log_normal(y - m, v + noise),
        )
    return None, None


def _log_normal(gap: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * (gap.square() / variance + (2 * math.pi * variance).log())


NAMED = {known.name: from_package(known) for known in (Bernoulli(), Poisson(), Gaussian())}
NAMED["probit"] = ScalarLikelihood(
    "probit",
    lambda y, f: torch.special.log_ndtr((2 * y - 1) * f),
    torch.special.ndtr,
    Bernoulli(),
    predictive=lambda y, m, v: torch.special.log_ndtr((2 * y - 1) * m * (1 + v).rsqrt()),
)


def scalar_likelihood(
    likelihood: str | Likelihood | ScalarLikelihood | Callable[[Tensor, Tensor], Tensor],
) -> ScalarLikelihood:
    """The likelihood of this name, of this object, or of a function log p(y|f).

    Raises:
        InputError: none of these, or a likelihood of many outputs.
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
    """Targets ``[N]`` as the likelihood takes them; its log p(y|f) is tried on them.

    Raises:
        DataError: targets outside the support, or not finite.
        InputError: log p(y|f) is no number for each example that torch can differentiate in f.
    """
    if likelihood.targets is not None:
        y = likelihood.targets.prepare_targets(y, y.new_zeros(y.shape).unsqueeze(-1)).squeeze(-1)
    if not bool(torch.isfinite(y).all()):
        raise DataError("the targets contain NaN or inf; drop or mend those examples")
    wanted = (
        f"likelihood {likelihood.name!r} must be a function (y [N], f [K, N]) -> log p(y|f), "
        "differentiable in f"
    )
    with torch.enable_grad():
        f = y.new_zeros(2, len(y)).requires_grad_()
        if not answer(wanted, f.shape, likelihood.log_prob, y, f).requires_grad:
            raise InputError(wanted)
    return y


def expected_log_prob(likelihood: ScalarLikelihood, f: DiagonalGaussian, y: Tensor) -> Tensor:
    """E_q[log p(y_i|f_i)] of each example, ``[N]``, in nats; differentiable in q.

    >>> f = DiagonalGaussian(torch.zeros(1), torch.ones(1))
    >>> expected_log_prob(scalar_likelihood("poisson"), f, torch.ones(1))
    tensor([-1.6487])
    """
    if likelihood.expected is not None:
        return likelihood.expected(y, f.mean, 1 / f.precision)
    return expected(f, lambda at: likelihood.log_prob(y, at))


def expected_mean(likelihood: ScalarLikelihood, f: DiagonalGaussian) -> Tensor:
    """E_q[E[y_i|f_i]], ``[N]``.

    Raises:
        InputError: a likelihood without a mean.

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
    return log_expected(f, lambda at: likelihood.log_prob(y, at))
