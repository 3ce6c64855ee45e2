"""Likelihoods of one latent number for each example, as data: log p(y|f), and E[y|f].

The rule asks a likelihood for nothing but log p(y|f): its derivatives are those of an expectation
(:mod:`blr_analysis.learning_rule.inference.cvi`), which closed forms or quadrature and autograd
provide. The quadrature is as accurate where a Gaussian is wide as where it is narrow:

    E_q[g(f)] = ∫ g(m + √v z) φ(z) dz ≈ h Σ_k g(m + √v z_k) φ(z_k),      z_k = k h

The trapezoidal rule on the whole line converges geometrically for analytic g (Trefethen & Weideman,
SIAM Review 2014), so that the number of nodes is doubled until two results agree. The nodes of
Gauss–Hermite quadrature, √v apart, miss what happens between them where v is large; here they
begin no farther apart than 1 in f. The line ends where the integrand has fallen by e³⁰.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian
from blr_analysis.learning_rule.inference.fitted import answer
from blr_analysis.likelihoods import Bernoulli, Gaussian, Likelihood, Poisson

MOST = 2**16
BLOCK = 2**18
SPAN, WIDER, WIDENINGS, DROP = 9.0, 1.5, 14, 30.0
Function = Callable[[Tensor], Tensor]
"""Places ``[K, N]`` → as many values, element by element."""


class Inaccurate(UserWarning):
    """An integral that the most nodes do not settle."""


def expected(f: DiagonalGaussian, function: Function) -> Tensor:
    """E_q[function(f_i)] of each number, ``[N]``, to 1e-9 (1e-5 in single precision).

    Derivatives in the mean and the precision of ``f`` are those of the sum, and as accurate.

    Args:
        f: N Gaussian numbers.
        function: places ``[K, N]`` → values ``[K, N]``, element by element.

    Warns:
        Inaccurate: the result still changes at the most nodes that are taken, about 2¹⁶.

    >>> expected(DiagonalGaussian(torch.zeros(2), torch.tensor([1.0, 0.01])), torch.square)
    tensor([  1., 100.])
    """
    with torch.no_grad():
        reach = _reach(f, lambda z: function(_places(f, z)).abs().log1p())

        def sums(nodes: Tensor) -> Tensor:
            z = _across(nodes, reach)
            terms = function(_places(f, z)) * _density(z)
            return torch.stack([terms.sum(0), terms.abs().sum(0)])

        def finish(total: Tensor, intervals: int) -> Tensor:
            return total * (2 * reach / intervals)

        def gap(before: Tensor, now: Tensor) -> Tensor:
            return (now[0] - before[0]).abs() / (1 + now[1])

        integrals, intervals = _settled(f, reach, sums, torch.add, finish, gap)
    if not (torch.is_grad_enabled() and (f.mean.requires_grad or f.precision.requires_grad)):
        return integrals[0]

    def share(nodes: Tensor) -> Tensor:
        z = _across(nodes, reach)
        return (function(_places(f, z)) * _density(z)).sum(0)

    nodes = torch.linspace(-1, 1, intervals + 1, dtype=torch.float64)
    blocks = _blocks(nodes.to(f.mean), f)
    if len(blocks) == 1:
        return share(blocks[0]) * (2 * reach / intervals)
    shares = [checkpoint(share, b, use_reentrant=False, preserve_rng_state=False) for b in blocks]
    return sum(shares[1:], start=shares[0]) * (2 * reach / intervals)


def log_expected(f: DiagonalGaussian, log_function: Function) -> Tensor:
    """log E_q[exp(log_function(f_i))] of each number, ``[N]``; safe where the integral underflows.

    Accurate to 1e-9 (1e-5 in single precision) relative to 1 + |the logarithm|, also where the
    integrand's mass lies far from q's.

    Args:
        f: N Gaussian numbers.
        log_function: places ``[K, N]`` → logarithms ``[K, N]``, element by element.

    Warns:
        Inaccurate: the result still changes at the most nodes that are taken, about 2¹⁶.

    >>> log_expected(DiagonalGaussian(torch.zeros(1), torch.ones(1)), lambda t: 2 * t)
    tensor([2.])
    """
    with torch.no_grad():
        reach = _reach(f, lambda z: log_function(_places(f, z)))

        def sums(nodes: Tensor) -> Tensor:
            z = _across(nodes, reach)
            return (log_function(_places(f, z)) - 0.5 * z.square()).logsumexp(0)

        def finish(total: Tensor, intervals: int) -> Tensor:
            return total + (2 * reach / intervals).log() - 0.5 * math.log(2 * math.pi)

        def gap(before: Tensor, now: Tensor) -> Tensor:
            return (now - before).abs() / (1 + now.abs())

        return _settled(f, reach, sums, torch.logaddexp, finish, gap)[0]


def _places(f: DiagonalGaussian, z: Tensor) -> Tensor:
    return f.mean + z * f.precision.rsqrt()


def _across(nodes: Tensor, reach: Tensor) -> Tensor:
    """z ``[K, N]`` at nodes ``[K]`` of [−1, 1]."""
    return nodes.view(-1, *[1] * reach.ndim) * reach


def _density(z: Tensor) -> Tensor:
    return (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)


def _blocks(nodes: Tensor, f: DiagonalGaussian) -> tuple[Tensor, ...]:
    """So few nodes at once that memory stays bounded."""
    return nodes.split(max(1, BLOCK // max(1, f.mean.numel())))


def _reach(f: DiagonalGaussian, log_size: Function) -> Tensor:
    """How far z must go to either side: until log_size(z) − z²/2 has fallen by DROP."""
    nodes = torch.linspace(-1, 1, 33).to(f.mean)
    reach = torch.full_like(f.mean, SPAN)
    for _ in range(WIDENINGS):
        z = _across(nodes, reach)
        heights = log_size(z) - 0.5 * z.square()
        ends, most = torch.maximum(heights[0], heights[-1]), heights.amax(0)
        short = (ends > most - DROP) & most.isfinite()
        if not bool(short.any()):
            break
        reach = torch.where(short, WIDER * reach, reach)
    return reach


def _settled(
    f: DiagonalGaussian,
    reach: Tensor,
    sums: Callable[[Tensor], Tensor],
    join: Callable[[Tensor, Tensor], Tensor],
    finish: Callable[[Tensor, int], Tensor],
    gap: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, int]:
    """The sum at so many intervals that it agrees with that at half as many, and their number."""

    def whole(nodes: Tensor) -> Tensor:
        first, *rest = (sums(part) for part in _blocks(nodes.to(f.mean), f))
        for part in rest:
            first = join(first, part)
        return first

    tolerance = max(1e-9, 64 * torch.finfo(f.mean.dtype).eps)
    std = f.precision.rsqrt()
    wanted = math.ceil(float((2 * reach * std.clamp_min(2)).amax())) if f.mean.numel() else 1
    intervals = min(wanted, MOST // 2)
    total = whole(torch.linspace(-1, 1, intervals + 1, dtype=torch.float64))
    integrals = finish(total, intervals)
    while True:
        middles = (2 * torch.arange(intervals, dtype=torch.float64) + 1) / intervals - 1
        total, intervals = join(total, whole(middles)), 2 * intervals
        before, integrals = integrals, finish(total, intervals)
        gaps = gap(before, integrals)
        worst = float(gaps[gaps.isfinite()].amax()) if bool(gaps.isfinite().any()) else 0.0
        if worst <= tolerance:
            return integrals, intervals
        if 2 * intervals > MOST:
            break
    if worst > 100 * tolerance:
        warnings.warn(
            f"integrals over f are uncertain by {worst:.0e} of their size at {intervals + 1} "
            "nodes, the most that are taken, for standard deviations of f up to "
            f"{float(std.amax()):.0e}: "
            "scale the inputs, take a narrower prior, or a likelihood without steps",
            Inaccurate,
            stacklevel=3,
        )
    return integrals, intervals


@dataclass(frozen=True)
class ClosedForms:
    """Integrals over f ~ N(m, v) that need no quadrature; None where there is no form.

    Attributes:
        log_prob: (y, m, v) → E[log p(y|f)].
        mean: (m, v) → E[E[y|f]].
        predictive: (y, m, v) → log E[p(y|f)].
    """

    log_prob: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    mean: Callable[[Tensor, Tensor], Tensor] | None = None
    predictive: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class ScalarLikelihood:
    """p(y_i | f_i) with one number f_i for each example.

    Attributes:
        name: for messages.
        log_prob: (y ``[N]``, f ``[N]`` or ``[K, N]``) → log p(y|f), element by element and
            broadcast, in nats; differentiable.
        mean: f → E[y|f], the probability of y = 1 for labels; None where nobody asks for it.
        targets: the likelihood of the package whose targets these are, for checks; None: any.
        closed: what is known in closed form; all else is by quadrature.

    Example:
        >>> logistic = scalar_likelihood("bernoulli")
        >>> logistic.log_prob(torch.tensor([1.0]), torch.tensor([0.0]))
        tensor([-0.6931])
    """

    name: str
    log_prob: Callable[[Tensor, Tensor], Tensor]
    mean: Callable[[Tensor], Tensor] | None = None
    targets: Likelihood | None = None
    closed: ClosedForms = ClosedForms()


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

    return ScalarLikelihood(likelihood.name, log_prob, mean, likelihood, _closed(likelihood))


def _closed(likelihood: Likelihood) -> ClosedForms:
    if isinstance(likelihood, Poisson):
        return ClosedForms(
            lambda y, m, v: y * m - (m + 0.5 * v).exp() - torch.lgamma(y + 1),
            lambda m, v: (m + 0.5 * v).exp(),
        )
    if isinstance(likelihood, Gaussian):
        given = likelihood.variance
        noise = given[0] if isinstance(given, tuple) else given  # f is one number
        return ClosedForms(
            lambda y, m, v: _log_normal(y - m, torch.full_like(v, noise)) - 0.5 * v / noise,
            lambda m, v: m,
            lambda y, m, v: _log_normal(y - m, v + noise),
        )
    return ClosedForms()


def _log_normal(gap: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * (gap.square() / variance + (2 * math.pi * variance).log())


PROBIT = ScalarLikelihood(
    "probit",
    lambda y, f: torch.special.log_ndtr((2 * y - 1) * f),
    torch.special.ndtr,
    Bernoulli(),
    ClosedForms(
        mean=lambda m, v: torch.special.ndtr(m * (1 + v).rsqrt()),
        predictive=lambda y, m, v: torch.special.log_ndtr((2 * y - 1) * m * (1 + v).rsqrt()),
    ),
)
NAMED = {known.name: from_package(known) for known in (Bernoulli(), Poisson(), Gaussian())}
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
        f"likelihood must be one of {', '.join(map(repr, NAMED))}, or (y, f) -> log p(y|f), got "
        f"{likelihood!r}"
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
        values = _values(likelihood, y, f.requires_grad_())[0, ~odd]
        swapped = torch.where(odd, y.max() + y.min() - y, y)
        again = _values(likelihood, swapped, other.requires_grad_())[0, ~odd]
    close = torch.finfo(y.dtype).eps ** 0.5
    if not torch.allclose(values, again, rtol=close, atol=close, equal_nan=True):
        raise InputError(
            f"likelihood {likelihood.name!r} mixes examples: it must work element by element"
        )


def _values(likelihood: ScalarLikelihood, y: Tensor, f: Tensor) -> Tensor:
    wanted = f"likelihood {likelihood.name!r} must be a function (y [N], f [K, N]) -> log p(y|f)"
    values = answer(wanted, f.shape, likelihood.log_prob, y, f)
    if not values.requires_grad:
        raise InputError(f"{wanted} that torch can differentiate in f")
    return values


def expected_log_prob(likelihood: ScalarLikelihood, f: DiagonalGaussian, y: Tensor) -> Tensor:
    """E_q[log p(y_i|f_i)] of each example, ``[N]``, in nats; differentiable in q.

    >>> f = DiagonalGaussian(torch.zeros(1), torch.ones(1))
    >>> expected_log_prob(scalar_likelihood("poisson"), f, torch.ones(1))
    tensor([-1.6487])
    """
    if likelihood.closed.log_prob is not None:
        return likelihood.closed.log_prob(y, f.mean, 1 / f.precision)
    return expected(f, lambda places: likelihood.log_prob(y, places))


def expected_mean(likelihood: ScalarLikelihood, f: DiagonalGaussian) -> Tensor:
    """E_q[E[y_i|f_i]], ``[N]``.

    Raises:
        InputError: a likelihood without a mean, or whose mean does not work element by element.

    >>> f = DiagonalGaussian(torch.ones(1), torch.ones(1))
    >>> expected_mean(scalar_likelihood("probit"), f)
    tensor([0.7602])
    """
    if likelihood.closed.mean is not None:
        return likelihood.closed.mean(f.mean, 1 / f.precision)
    if (mean := likelihood.mean) is None:
        raise InputError("the likelihood has no mean: give ScalarLikelihood(name, log_prob, mean)")
    wanted = f"the mean of likelihood {likelihood.name!r} must be a function f [K, M] -> E[y|f]"
    return expected(f, lambda places: answer(wanted, places.shape, mean, places))


def log_predictive(likelihood: ScalarLikelihood, f: DiagonalGaussian, y: Tensor) -> Tensor:
    """log ∫ p(y|f) q(f) df of each example, ``[N]``, in nats; safe where p underflows.

    >>> f = DiagonalGaussian(torch.zeros(1), torch.ones(1))
    >>> log_predictive(scalar_likelihood("bernoulli"), f, torch.ones(1)).exp()
    tensor([0.5000])
    """
    if likelihood.closed.predictive is not None:
        return likelihood.closed.predictive(y, f.mean, 1 / f.precision)
    return log_expected(f, lambda places: likelihood.log_prob(y, places))
