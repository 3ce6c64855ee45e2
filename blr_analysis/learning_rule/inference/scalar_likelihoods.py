"""Likelihoods of one latent number for each example, as data: log p(y|f), and E[y|f].

The rule asks a likelihood for nothing but log p(y|f): its derivatives are those of an expectation
(:mod:`blr_analysis.learning_rule.inference.cvi`), which quadrature and autograd provide.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

from blr_analysis.checks import positive_int
from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian
from blr_analysis.likelihoods import Bernoulli, Gaussian, Likelihood, Poisson

NODES = 64


@dataclass(frozen=True)
class ScalarLikelihood:
    """p(y_i | f_i) with one number f_i for each example.

    Attributes:
        name: for messages.
        log_prob: (y ``[N]``, f ``[N]`` or ``[K, N]``) → log p(y|f), element by element and
            broadcast, in nats; differentiable.
        mean: f → E[y|f], the probability of y = 1 for labels; None where nobody asks for it.
        targets: the likelihood of the package whose targets these are, for checks; None: any.

    Example:
        >>> logistic = scalar_likelihood("bernoulli")
        >>> logistic.log_prob(torch.tensor([1.0]), torch.tensor([0.0]))
        tensor([-0.6931])
    """

    name: str
    log_prob: Callable[[Tensor, Tensor], Tensor]
    mean: Callable[[Tensor], Tensor] | None = None
    targets: Likelihood | None = None


def from_package(likelihood: Likelihood) -> ScalarLikelihood:
    """A likelihood of :mod:`blr_analysis.likelihoods` with one output."""

    def log_prob(y: Tensor, f: Tensor) -> Tensor:
        return -likelihood.nll(f.unsqueeze(-1), y.expand_as(f).unsqueeze(-1))

    def mean(f: Tensor) -> Tensor:
        return likelihood.mean(f.unsqueeze(-1)).squeeze(-1)

    return ScalarLikelihood(likelihood.name, log_prob, mean, likelihood)


PROBIT = ScalarLikelihood(
    "probit",
    lambda y, f: torch.special.log_ndtr((2 * y - 1) * f),
    torch.special.ndtr,
    Bernoulli(),
)
NAMED = {found.name: from_package(found) for found in (Bernoulli(), Poisson(), Gaussian())}
NAMED["probit"] = PROBIT


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
    raise InputError(
        f"likelihood must be one of {', '.join(map(repr, NAMED))}, one of these objects, or a "
        f"function (y, f) -> log p(y|f) of one number for each example, got {likelihood!r}"
    )


def checked_targets(likelihood: ScalarLikelihood, y: Tensor) -> Tensor:
    """Targets ``[N]`` as the likelihood takes them.

    Raises:
        DataError: targets outside the support, or not finite.
    """
    if likelihood.targets is not None:
        return likelihood.targets.prepare_targets(y, y.new_zeros(y.shape).unsqueeze(-1)).squeeze(-1)
    if not bool(torch.isfinite(y).all()):
        raise DataError("the targets contain NaN or inf; drop or mend those examples")
    return y


def nodes_of(f: DiagonalGaussian, nodes: int = NODES) -> tuple[Tensor, Tensor]:
    """Places ``[K, N]`` and logarithms of weights ``[K, 1]`` of Gauss–Hermite quadrature."""
    z, weights = hermegauss(positive_int("nodes", nodes))
    places = f.mean + torch.as_tensor(z).to(f.mean).unsqueeze(-1) * f.precision.rsqrt()
    logs = torch.as_tensor(weights).log() - 0.5 * math.log(2 * math.pi)
    return places, logs.to(f.mean).unsqueeze(-1)


def expected(
    f: DiagonalGaussian, function: Callable[[Tensor], Tensor], nodes: int = NODES
) -> Tensor:
    """E_q[function(f_i)] of each number, ``[N]``, all nodes of the quadrature at once.

    >>> expected(DiagonalGaussian(torch.zeros(2), torch.ones(2)), torch.square)
    tensor([1.0000, 1.0000])
    """
    places, logs = nodes_of(f, nodes)
    return (logs.exp() * function(places)).sum(0)


def log_predictive(
    likelihood: ScalarLikelihood, f: DiagonalGaussian, y: Tensor, nodes: int = NODES
) -> Tensor:
    """log ∫ p(y|f) q(f) df by Gauss–Hermite quadrature, ``[N]``; safe where p underflows.

    With 64 nodes the probability of a label or a count is right to 1e-5 where f's standard
    deviation is at most 2, and to 3e-4 (labels) or 3e-3 (counts) at 5.

    >>> f = DiagonalGaussian(torch.zeros(1), torch.ones(1))
    >>> log_predictive(scalar_likelihood("bernoulli"), f, torch.ones(1)).exp()
    tensor([0.5000])
    """
    places, logs = nodes_of(f, nodes)
    return (likelihood.log_prob(y, places) + logs).logsumexp(0)
