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
from blr_analysis.errors import BLRError, DataError, InputError
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian
from blr_analysis.likelihoods import Bernoulli, Gaussian, Likelihood, Poisson

NODES, MOST_NODES = 64, 370


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


def check_elementwise(likelihood: ScalarLikelihood, y: Tensor) -> None:
    """Raise unless log p(y|f) is a number of its own for each example, differentiable in f.

    Every other example, and a whole row of f, get other numbers: the rest may not change.

    Args:
        likelihood: the likelihood to try.
        y: targets ``[N]``.

    Raises:
        InputError: it cannot be called so, gives another shape or mixes examples.

    Example:
        >>> check_elementwise(scalar_likelihood(lambda y, f: -((y - f) ** 2)), torch.ones(3))
        >>> check_elementwise(scalar_likelihood(lambda y, f: -((f - f.mean()) ** 2)), torch.ones(3))
        Traceback (most recent call last):
        ...
        blr_analysis.errors.InputError: likelihood '<lambda>' mixes examples: ...
    """
    odd = torch.arange(len(y), device=y.device) % 2 == 1
    f = y.new_tensor([0.1, 0.7]).unsqueeze(1).expand(2, len(y)).clone()
    other = torch.stack([f[0] + odd, f[1] + 1])
    with torch.enable_grad():
        found = _values(likelihood, y, f.requires_grad_())[0, ~odd]
        again = _values(
            likelihood, torch.where(odd, y.max() + y.min() - y, y), other.requires_grad_()
        )[0, ~odd]
    close = torch.finfo(y.dtype).eps ** 0.5
    if not torch.allclose(found, again, rtol=close, atol=close, equal_nan=True):
        raise InputError(
            f"likelihood {likelihood.name!r} mixes examples: log p of one changes with y or f of "
            "others; it must work element by element"
        )


def _values(likelihood: ScalarLikelihood, y: Tensor, f: Tensor) -> Tensor:
    wanted = (
        f"likelihood {likelihood.name!r} must be a function (y [N], f [K, N]) -> log p(y|f) [K, N]"
    )
    try:
        values = likelihood.log_prob(y, f)
    except BLRError:
        raise
    except Exception as error:
        raise InputError(f"{wanted}; it raised {type(error).__name__}: {error}") from error
    if not isinstance(values, Tensor) or values.shape != f.shape:
        found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InputError(f"{wanted}; for f of shape {tuple(f.shape)} it gave {found}")
    if not values.requires_grad:
        raise InputError(
            f"{wanted} by torch operations that can be differentiated in f; its values do not "
            "depend on f, or were taken out of torch"
        )
    return values


def nodes_of(f: DiagonalGaussian, nodes: int = NODES) -> tuple[Tensor, Tensor]:
    """Places ``[K, N]`` and logarithms of weights ``[K, 1]`` of Gauss–Hermite quadrature.

    Raises:
        InputError: no node, or more than 370, whose weights overflow.
    """
    if positive_int("nodes", nodes) > MOST_NODES:
        raise InputError(f"quadrature takes at most {MOST_NODES} nodes, got {nodes}")
    z, weights = hermegauss(nodes)
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
