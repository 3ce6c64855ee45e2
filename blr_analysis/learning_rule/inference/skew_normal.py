"""The skew normal, for asymmetric posteriors of one number; a mixture of exponential families.

    q(θ) = ∫ N(θ | m + |w| a, 1/s) N(w | 0, 1) dw

The half-normal |w| moves the mean of a Gaussian along a. q is no exponential family, but given w it
is one, with the statistics (θ, |w| θ, θ²) and λ = (s m, s a, −s/2). Let μ be the expectations of
these statistics under the joint distribution of w and θ. Natural gradients are then derivatives
with respect to μ, and the rule is (Lin, Khan & Schmidt, 2019; Khan & Rue, sections 3.2 and 5.4)

    λ ← λ − ρ ∇_μ E_q[ ℓ̄(θ) + log q(θ) ]

with the gradient of the mixture's entropy in the place of −λ. Expectations are sums over a fine
grid; for smooth, decaying functions their error falls faster than any power of its spacing.

At a fixed point of the rule λ is a sum with one term for each example, λ̃_i = ∇_μ E_q[log p(y_i|θ)],
and one term for prior and entropy. λ − λ̃_i is the first step, at ρ = 1, of fitting again without
example i.
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
from blr_analysis.learning_rule.rule import blr_step

LogLikelihood = Callable[[Any, Tensor], Tensor]
"""(data of M examples, θ ``[G]``) → log p(y_i|θ) ``[M, G]``."""
HALF_NORMAL = math.sqrt(2 / math.pi)  # E|w|
GRID_POINTS = 2001
GRID_REACH = 14.0  # standard deviations on either side of the mean


@dataclass(frozen=True, eq=False)
class SkewNormal:
    """θ = m + ``|w|`` a + ε/√s with standard normal w and ε.

    Attributes:
        location: m, a number.
        lean: a; its sign is that of the skewness, and a = 0 gives a Gaussian.
        precision: s > 0.

    Raises:
        InputError: a parameter is not finite, or the precision is not positive.

    Example:
        >>> q = SkewNormal(*torch.tensor([0.0, 3.0, 1.0], dtype=torch.float64))
        >>> q.mean, q.variance
        (tensor(2.3937...), tensor(4.2704...))
    """

    location: Tensor
    lean: Tensor
    precision: Tensor

    def __post_init__(self) -> None:
        parameters = (self.location, self.lean, self.precision)
        are_numbers = all(p.ndim == 0 and bool(torch.isfinite(p)) for p in parameters)
        if not are_numbers or not bool(self.precision > 0):
            raise InputError("no skew normal of positive precision: fit again, or lower rho")

    @property
    def natural(self) -> Natural:
        """λ = (s m, s a, −s/2) of the statistics (θ, ``|w|`` θ, θ²)."""
        return {
            "linear": self.precision * self.location,
            "lean": self.precision * self.lean,
            "square": -0.5 * self.precision,
        }

    @property
    def expectation(self) -> Natural:
        """μ = E[(θ, ``|w|`` θ, θ²)]."""
        return {
            "linear": self.location + HALF_NORMAL * self.lean,
            "lean": HALF_NORMAL * self.location + self.lean,
            "square": _square_of_mean(self.location, self.lean) + 1 / self.precision,
        }

    @classmethod
    def with_natural(cls, natural: Natural) -> SkewNormal:
        """The member with these λ: the inverse of :attr:`natural`."""
        precision = -2 * natural["square"]
        return cls(natural["linear"] / precision, natural["lean"] / precision, precision)

    def base_gradient(self) -> Natural:
        """∇_μ E_q[log h] = 0: h is constant in θ."""
        return {name: torch.zeros_like(value) for name, value in self.natural.items()}

    @classmethod
    def from_expectation(cls, expectation: Natural) -> SkewNormal:
        """The inverse of :attr:`expectation`."""
        determinant = 1 - HALF_NORMAL**2
        location = (expectation["linear"] - HALF_NORMAL * expectation["lean"]) / determinant
        lean = (expectation["lean"] - HALF_NORMAL * expectation["linear"]) / determinant
        variance = expectation["square"] - _square_of_mean(location, lean)
        return cls(location, lean, 1 / variance)

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
        """The points of sums over θ ``[G]``, and the logarithm of their spacing."""
        reach = GRID_REACH * self.variance.detach().sqrt()
        steps = torch.linspace(-1, 1, GRID_POINTS, dtype=reach.dtype, device=reach.device)
        spacing = reach * 2 / (GRID_POINTS - 1)
        return self.mean.detach() + reach * steps, spacing.log()

    def elbo(self, log_joint: Callable[[Tensor], Tensor]) -> Tensor:
        """E_q[log p(y, θ) − log q(θ)] on the grid, in nats; differentiable in the parameters."""
        grid, spacing = self.grid()
        logs = self.log_prob(grid)
        return ((logs + spacing).exp() * (log_joint(grid) - logs)).sum()


def _square_of_mean(location: Tensor, lean: Tensor) -> Tensor:
    """E[(m + ``|w|`` a)²]."""
    return location.square() + 2 * HALF_NORMAL * location * lean + lean.square()


def skew_step(q: SkewNormal, log_joint: Callable[[Tensor], Tensor], rho: float) -> SkewNormal:
    """q after λ ← λ + ρ ∇_μ E_q[log p(y, θ) − log q(θ)] (Lin et al., 2019).

    The gradient contains the entropy of the mixture. :func:`blr_step` adds that of an exponential
    family, −λ, so that λ is added here to cancel it.
    """
    expectation = {name: mu.detach().requires_grad_() for name, mu in q.expectation.items()}
    with torch.enable_grad():
        elbo = SkewNormal.from_expectation(expectation).elbo(log_joint)
        derivatives = torch.autograd.grad(elbo, list(expectation.values()))
    gradient = dict(zip(expectation, derivatives, strict=True))
    loss_gradient = scale(add(gradient, q.natural), -1.0)
    return blr_step(q, loss_gradient, rho)


@dataclass(frozen=True)
class LogJoint(Model):
    """log p(y, θ): a sum over examples, and the logarithm of everything else.

    Attributes:
        rest: θ ``[G]`` → log p of everything but the examples ``[G]``.
        log_likelihood: (examples, θ) → log p(y_i|θ); unused where there are no examples.
        rho: ρ of the rule's steps.
    """

    rest: Callable[[Tensor], Tensor]
    log_likelihood: LogLikelihood
    rho: float

    def of_examples(self, data: Any, theta: Tensor) -> Tensor:
        """log p(y_i|θ) ``[M, G]``."""
        contract = "log_likelihood must be a function (data, θ [G]) -> log p(y|θ) [M, G]"
        shape = torch.Size([count(data), len(theta)])
        return answer(contract, shape, self.log_likelihood, data, theta)

    def __call__(self, theta: Tensor, data: Any) -> Tensor:
        """log p(y, θ) ``[G]``; without examples where ``data`` is None."""
        if data is None:
            return self.rest(theta)
        return self.rest(theta) + self.of_examples(data, theta).sum(0)

    def sites(self, q: SkewNormal, data: Any) -> Natural:
        """∇_μ E_q[log p(y_i|θ)] on q's grid, ``[M]`` each."""
        grid, log_spacing = q.grid()
        names = list(q.expectation)

        def weights(*mu: Tensor) -> Tensor:
            """q(θ) times the spacing, at the grid's points ``[G]``."""
            member = SkewNormal.from_expectation(dict(zip(names, mu, strict=True)))
            return (member.log_prob(grid) + log_spacing).exp()

        derivatives = torch.autograd.functional.jacobian(
            weights,
            tuple(mu.detach() for mu in q.expectation.values()),
            strategy="forward-mode",
            vectorize=True,
        )
        log_likelihoods = self.of_examples(data, grid)
        return {
            name: log_likelihoods @ derivative
            for name, derivative in zip(names, derivatives, strict=True)
        }

    def log_predictive(self, q: SkewNormal, data: Any) -> Tensor:
        """log ∫ p(y_i|θ) q(θ) dθ by a sum over the grid, in nats ``[M]``."""
        grid, log_spacing = q.grid()
        log_joint = self.of_examples(data, grid) + q.log_prob(grid)
        return (log_joint + log_spacing).logsumexp(1)

    def step(self, q: SkewNormal, data: Any) -> SkewNormal:
        return skew_step(q, partial(self, data=data), self.rho)


class FittedSkewNormal(Fitted[SkewNormal]):  # type: ignore[type-var]
    """A fitted skew normal; it has sites if it was fitted with ``log_likelihood`` and ``data``."""

    note: ClassVar[str] = ONE_STEP

    def left_out(self) -> Tensor:
        """log p(y_i | λ − λ̃_i) of every example, in nats ``[N]``; see :meth:`Fitted.left_out`.

        Raises:
            InputError: for some example, λ − λ̃_i is no skew normal.
        """
        log_probs = []
        for i in range(max(1, self.n_data)):  # without any example, _total raises
            example = torch.tensor([i])
            q_without = self._less(self._total(example))
            log_probs.append(self.model.log_predictive(q_without, rows(self.data, example)))
        return torch.cat(log_probs)


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

    The best Gaussian is a stationary point of the rule: at a = 0 the derivatives with respect to a
    and m are proportional. So the start must have a lean a ≠ 0.

    Args:
        log_joint: θ ``[G]`` → log p(y, θ) ``[G]``, up to a constant; twice differentiable. With
            ``data`` it is the log prior, without them it includes the likelihood.
        start: q before the first step, with a ≠ 0 of the sign of the skewness.
        log_likelihood: (M examples, θ ``[G]``) → log p(y_i|θ) ``[M, G]``, in nats. It makes a
            posterior from which examples can be removed.
        data: N examples, a tensor ``[N, …]`` or a tuple of them, as ``log_likelihood`` takes them.
        rho: ρ in (0, 1].
        stopping: ``max_iter``, ``tol`` (of the ELBO, in nats) and ``progress`` (whether to show a
            bar; None shows it on a terminal after a second).

    Returns:
        The posterior, with the ELBO after each step as ``history``, and with sites if there are
        ``data``.

    Raises:
        InputError: the start has no lean, a step leaves the family, only one of
            ``log_likelihood`` and ``data`` is there, or log-likelihoods have another shape.

    Example:
        The logarithm of a rate, from two intervals with one and with three events, and a wide
        prior:

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
    model = LogJoint(log_joint, log_likelihood, rho)  # type: ignore[arg-type]
    if data is not None:
        data = model.check(data)
    q = start

    def step(t: int) -> float:
        nonlocal q
        q = model.step(q, data)
        return float(q.elbo(partial(model, data=data)))

    run = until_flat(step, "ELBO", **stopping)
    return FittedSkewNormal(q=q, **run, model=model, data=data)
