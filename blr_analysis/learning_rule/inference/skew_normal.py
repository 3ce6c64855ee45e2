"""A mixture of exponential families: the skew normal, for posteriors of one number that lean.

    q(θ) = ∫ N(θ | m + |w| a, 1/s) N(w | 0, 1) dw

is a Gaussian whose mean is moved along a by a half-normal w: not an exponential family, but one
given w, in the statistics (θ, |w| θ, θ²). With λ = (s m, s a, −s/2) and μ the expectations of these
statistics under the joint of w and θ, natural gradients are again derivatives in μ, and the rule
reads (Lin, Khan & Schmidt, 2019; Khan & Rue, sections 3.2 and 5.4)

    λ ← λ − ρ ∇_μ E_q[ ℓ̄(θ) + log q(θ) ]

with the entropy of the mixture itself in the place of −λ. Expectations are sums over a fine grid,
whose error falls faster than any power of its spacing for smooth, decaying functions.

At a fixed point of the rule λ is a sum with one term for each example, λ̃_i = ∇_μ E_q[log p(y_i|θ)],
and one for prior and entropy, so that λ − λ̃_i is the first step, at ρ = 1, of fitting again without
that example.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from blr_analysis.checks import share
from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import Natural, add, scale
from blr_analysis.learning_rule.inference.fitted import (
    ONE_STEP,
    Fitted,
    Model,
    answer,
    count,
    rows,
    until_flat,
)

LogLikelihood = Callable[[Any, Tensor], Tensor]
"""(data of M examples, θ ``[G]``) → log p(y_i|θ) ``[M, G]``."""
HALF_NORMAL = math.sqrt(2 / math.pi)  # E|w|
GRID, REACH = 2001, 14.0  # points, and standard deviations on either side of the mean


@dataclass(frozen=True, eq=False)
class SkewNormal:
    """θ = m + ``|w|`` a + ε/√s with standard normal w and ε.

    Attributes:
        location: m, a number.
        lean: a; the sign is that of the skewness, 0 gives a Gaussian.
        precision: s > 0.

    Raises:
        InputError: parameters that are not finite, or a precision that is not positive.

    Example:
        >>> q = SkewNormal(*torch.tensor([0.0, 3.0, 1.0], dtype=torch.float64))
        >>> q.mean, q.variance
        (tensor(2.3937...), tensor(4.2704...))
    """

    location: Tensor
    lean: Tensor
    precision: Tensor

    def __post_init__(self) -> None:
        numbers = (self.location, self.lean, self.precision)
        fine = all(n.ndim == 0 and bool(torch.isfinite(n)) for n in numbers)
        if not fine or not bool(self.precision > 0):
            raise InputError("no skew normal of positive precision: fit again, or lower rho")

    @property
    def natural(self) -> Natural:
        """λ of (θ, ``|w|`` θ, θ²), given w."""
        s = self.precision
        return {"linear": s * self.location, "lean": s * self.lean, "square": -0.5 * s}

    @property
    def expectation(self) -> Natural:
        """μ = E[(θ, ``|w|`` θ, θ²)]."""
        m, a, c = self.location, self.lean, HALF_NORMAL
        square = m.square() + 2 * c * m * a + a.square() + 1 / self.precision
        return {"linear": m + c * a, "lean": c * m + a, "square": square}

    @classmethod
    def with_natural(cls, natural: Natural) -> SkewNormal:
        """The member with these λ: the inverse of :attr:`natural`."""
        s = -2 * natural["square"]
        return cls(natural["linear"] / s, natural["lean"] / s, s)

    @classmethod
    def from_expectation(cls, expectation: Natural) -> SkewNormal:
        """The inverse of :attr:`expectation`."""
        c, linear, lean = HALF_NORMAL, expectation["linear"], expectation["lean"]
        m, a = (linear - c * lean) / (1 - c * c), (lean - c * linear) / (1 - c * c)
        spread = expectation["square"] - m.square() - 2 * c * m * a - a.square()
        return cls(m, a, 1 / spread)

    @property
    def mean(self) -> Tensor:
        """E_q[θ]."""
        return self.location + HALF_NORMAL * self.lean

    @property
    def variance(self) -> Tensor:
        """Var_q[θ]."""
        return 1 / self.precision + (1 - HALF_NORMAL**2) * self.lean.square()

    def log_prob(self, theta: Tensor) -> Tensor:
        """log q(θ), in nats."""
        width = (1 / self.precision + self.lean.square()).sqrt()
        z = (theta - self.location) / width
        side = torch.special.log_ndtr(self.lean * self.precision.sqrt() * z)
        return math.log(2) + side - 0.5 * z.square() - width.log() - 0.5 * math.log(2 * math.pi)

    def grid(self) -> tuple[Tensor, Tensor]:
        """Places of the sums over θ, and the logarithm of their spacing."""
        reach = REACH * self.variance.detach().sqrt()
        steps = torch.linspace(-1, 1, GRID, dtype=reach.dtype, device=reach.device)
        return self.mean.detach() + reach * steps, (reach * 2 / (GRID - 1)).log()

    def elbo(self, log_joint: Callable[[Tensor], Tensor]) -> Tensor:
        """E_q[log p(y, θ) − log q(θ)] on the grid, in nats; differentiable in the parameters."""
        grid, spacing = self.grid()
        logs = self.log_prob(grid)
        return ((logs + spacing).exp() * (log_joint(grid) - logs)).sum()


def skew_step(q: SkewNormal, log_joint: Callable[[Tensor], Tensor], rho: float) -> SkewNormal:
    """λ ← λ + ρ ∇_μ E_q[log p(y, θ) − log q(θ)] (Lin et al., 2019)."""
    expectation = {k: v.detach().requires_grad_() for k, v in q.expectation.items()}
    with torch.enable_grad():
        elbo = SkewNormal.from_expectation(expectation).elbo(log_joint)
        slopes = torch.autograd.grad(elbo, list(expectation.values()))
    gradient = dict(zip(expectation, slopes, strict=True))
    return SkewNormal.with_natural(add(q.natural, scale(gradient, rho)))


@dataclass(frozen=True)
class LogJoint(Model):
    """log p(y, θ) of named examples and all the rest, and the rate of the rule's steps."""

    rest: Callable[[Tensor], Tensor]
    log_likelihood: LogLikelihood
    rho: float

    def told(self, data: Any, theta: Tensor) -> Tensor:
        """log p(y_i|θ) ``[M, G]``."""
        wanted = "log_likelihood must be a function (data, θ [G]) -> log p(y|θ) [M, G]"
        shape = torch.Size([count(data), len(theta)])
        return answer(wanted, shape, self.log_likelihood, data, theta)

    def __call__(self, theta: Tensor, data: Any) -> Tensor:
        return self.rest(theta) + (0.0 if data is None else self.told(data, theta).sum(0))

    def sites(self, q: SkewNormal, data: Any) -> Natural:
        """∇_μ E_q[log p(y_i|θ)] on q's grid, ``[M]`` each."""
        grid, spacing = q.grid()

        def weights(*mu: Tensor) -> Tensor:
            at = SkewNormal.from_expectation(dict(zip(q.expectation, mu, strict=True)))
            return (at.log_prob(grid) + spacing).exp()

        at = tuple(value.detach() for value in q.expectation.values())
        slopes = torch.autograd.functional.jacobian(
            weights, at, strategy="forward-mode", vectorize=True
        )
        values = self.told(data, grid)
        return {name: values @ slope for name, slope in zip(q.expectation, slopes, strict=True)}

    def log_predictive(self, q: SkewNormal, data: Any) -> Tensor:
        """log ∫ p(y_i|θ) q(θ) dθ on the grid."""
        grid, spacing = q.grid()
        return (self.told(data, grid) + q.log_prob(grid) + spacing).logsumexp(1)

    def step(self, q: SkewNormal, data: Any) -> SkewNormal:
        return skew_step(q, partial(self, data=data), self.rho)


class FittedSkewNormal(Fitted[SkewNormal]):  # type: ignore[type-var]
    """A skew normal; where it was fitted with ``log_likelihood`` and ``data``, with sites."""

    note: ClassVar[str] = ONE_STEP

    def left_out(self) -> Tensor:
        """log p(y_i | λ − λ̃_i) of every example, in nats ``[N]``; see :meth:`Fitted.left_out`.

        Raises:
            InputError: no skew normal is left without some example.
        """
        ones = torch.arange(max(1, self.n_data)).split(1)
        each = ((self._less(self._told(i)), rows(self.data, i)) for i in ones)
        return torch.cat([self.model.log_predictive(*pair) for pair in each])


def fit_skew_normal(
    log_joint: Callable[[Tensor], Tensor],
    start: SkewNormal,
    *,
    log_likelihood: LogLikelihood | None = None,
    data: Any = None,
    rho: float = 0.5,
    **stopping: Any,
) -> FittedSkewNormal:
    """The skew normal nearest to the posterior of one number, by the rule for mixtures.

    The best Gaussian is a stationary point here as well (at a = 0 the derivatives in a and in m
    are in proportion), so the start must lean, to either side.

    Args:
        log_joint: θ ``[G]`` → log p(y, θ) ``[G]``, up to a constant; twice differentiable. Of all
            that is not in ``data``: with them, the log prior.
        start: where to begin; a ≠ 0, with the sign of the skewness.
        log_likelihood: (data of M examples, θ ``[G]``) → log p(y_i|θ) ``[M, G]``, in nats, for
            posteriors from which examples can be taken out.
        data: N examples, a tensor ``[N, …]`` or a tuple of them, as ``log_likelihood`` takes them.
        rho: ρ in (0, 1].
        stopping: ``max_iter``, ``tol`` (of the ELBO, in nats) and ``progress`` (whether to show a
            bar; None: on a terminal after a second).

    Returns:
        The posterior, with the ELBO after each step, and sites where the examples are named.

    Raises:
        InputError: a start that does not lean, a step that leaves the family, one of
            ``log_likelihood`` and ``data`` without the other, or log-likelihoods of another shape.

    Example:
        Rates of two intervals, with one event and with three, on the log scale, under a wide prior.

        >>> def log_prior(theta): return -theta.square() / 20
        >>> def log_likelihood(y, theta): return y[:, None] * theta - theta.exp()
        >>> start = SkewNormal(*torch.tensor([0.0, -1.0, 1.0], dtype=torch.float64))
        >>> y = torch.tensor([1.0, 3.0], dtype=torch.float64)
        >>> fitted = fit_skew_normal(
        ...     log_prior, start, log_likelihood=log_likelihood, data=y, rho=1.0, tol=1e-6
        ... )
        >>> fitted.q.mean, fitted.without([0]).mean
        (tensor(0.5513, dtype=torch.float64), tensor(0.6878, dtype=torch.float64))
    """
    share("rho", rho)
    if not isinstance(start, SkewNormal) or float(start.lean) == 0:
        raise InputError("start must be a SkewNormal with lean ≠ 0: a Gaussian would stay one")
    if (log_likelihood is None) != (data is None):
        raise InputError("log_likelihood and data go together: give both")
    model, q = LogJoint(log_joint, log_likelihood, rho), start  # type: ignore[arg-type]
    data = None if data is None else model.check(data)

    def step(t: int) -> float:
        nonlocal q
        q = model.step(q, data)
        return float(q.elbo(partial(model, data=data)))

    run = until_flat(step, "ELBO", **stopping)
    return FittedSkewNormal(q=q, **run, model=model, data=data)
