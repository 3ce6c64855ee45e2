"""A mixture of exponential families: the skew normal, for posteriors of one number that lean.

    q(θ) = ∫ N(θ | m + |w| a, 1/s) N(w | 0, 1) dw

is a Gaussian whose mean is moved along a by a half-normal w: not an exponential family, but one
given w, in the statistics (θ, |w| θ, θ²). With λ = (s m, s a, −s/2) and μ the expectations of these
statistics under the joint of w and θ, natural gradients are again derivatives in μ, and the rule
reads (Lin, Khan & Schmidt, 2019; Khan & Rue, sections 3.2 and 5.4)

    λ ← λ − ρ ∇_μ E_q[ ℓ̄(θ) + log q(θ) ]

with the entropy of the mixture itself in the place of −λ. Expectations are sums over a fine grid,
whose error falls faster than any power of its spacing for smooth, decaying functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.checks import positive_int
from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import Natural, add, scale
from blr_analysis.learning_rule.inference.fitted import Fitted, until_flat
from blr_analysis.learning_rule.rule import check_rho
from blr_analysis.progress import track

HALF_NORMAL = math.sqrt(2 / math.pi)  # E|w|
GRID, REACH = 2001, 14.0  # points, and standard deviations on either side of the mean


@dataclass(frozen=True, eq=False)
class SkewNormal:
    """θ = m + |w| a + ε/√s with standard normal w and ε.

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
            raise InputError(
                "a skew normal has three finite numbers, the last of them (the precision) "
                "positive: take a smaller learning rate, or another start"
            )

    @property
    def natural(self) -> Natural:
        """λ of (θ, |w| θ, θ²), given w."""
        s = self.precision
        return {"linear": s * self.location, "lean": s * self.lean, "square": -0.5 * s}

    @property
    def expectation(self) -> Natural:
        """μ = E[(θ, |w| θ, θ²)]."""
        m, a, c = self.location, self.lean, HALF_NORMAL
        square = m.square() + 2 * c * m * a + a.square() + 1 / self.precision
        return {"linear": m + c * a, "lean": c * m + a, "square": square}

    @classmethod
    def from_natural(cls, natural: Natural) -> SkewNormal:
        """The inverse of :attr:`natural`."""
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

    def expect(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        """E_q[f(θ)] on the grid; differentiable in the parameters through q's density."""
        reach = REACH * self.variance.detach().sqrt()
        steps = torch.linspace(-1, 1, GRID, dtype=reach.dtype, device=reach.device)
        grid = self.mean.detach() + reach * steps
        return (self.log_prob(grid).exp() * f(grid)).sum() * reach * 2 / (GRID - 1)

    def elbo(self, log_joint: Callable[[Tensor], Tensor]) -> Tensor:
        """E_q[log p(y, θ) − log q(θ)], in nats."""
        return self.expect(lambda theta: log_joint(theta) - self.log_prob(theta))


def skew_step(q: SkewNormal, log_joint: Callable[[Tensor], Tensor], rho: float) -> SkewNormal:
    """λ ← λ + ρ ∇_μ E_q[log p(y, θ) − log q(θ)] (Lin et al., 2019)."""
    expectation = {k: v.detach().requires_grad_() for k, v in q.expectation.items()}
    with torch.enable_grad():
        elbo = SkewNormal.from_expectation(expectation).elbo(log_joint)
        found = torch.autograd.grad(elbo, list(expectation.values()))
    gradient = dict(zip(expectation, found, strict=True))
    return SkewNormal.from_natural(add(q.natural, scale(gradient, rho)))


def fit_skew_normal(
    log_joint: Callable[[Tensor], Tensor],
    start: SkewNormal,
    *,
    rho: float = 0.5,
    tol: float = 1e-10,
    max_iter: int = 2000,
    progress: bool | None = None,
) -> Fitted:
    """The skew normal nearest to the posterior of one number, by the rule for mixtures.

    The best Gaussian is a stationary point here as well (at a = 0 the derivatives in a and in m
    are in proportion), so the start must lean, to either side.

    Args:
        log_joint: θ ``[K]`` → log p(y, θ) ``[K]``, up to a constant; twice differentiable.
        start: where to begin; a ≠ 0, with the sign of the skewness.
        rho: ρ in (0, 1].
        tol: stop when the ELBO changes by at most this many nats.
        max_iter: at most this many steps.
        progress: True shows a bar, False does not, None on a terminal when it takes long.

    Returns:
        The posterior, with the ELBO after each step. A mixture has no sites.

    Raises:
        InputError: a start that does not lean, or a step that leaves the family.

    Example:
        A rate with one event observed, on the log scale, under a wide prior.

        >>> def log_joint(theta): return theta - theta.exp() - theta.square() / 20
        >>> start = SkewNormal(*torch.tensor([0.0, -1.0, 1.0], dtype=torch.float64))
        >>> fit_skew_normal(log_joint, start, rho=1.0, tol=1e-6).q.mean
        tensor(-0.428...)
    """
    check_rho(rho)
    positive_int("max_iter", max_iter)
    if not isinstance(start, SkewNormal) or float(start.lean) == 0:
        raise InputError("start must be a SkewNormal with lean ≠ 0: a Gaussian would stay one")
    q = start

    def elbos() -> Iterator[float]:
        nonlocal q
        for _ in track(range(max_iter), label="skew normal", show=progress):
            q = skew_step(q, log_joint, rho)
            yield float(q.elbo(log_joint))

    history, converged = until_flat(elbos(), tol=tol, what="the ELBO")
    return Fitted(q=q, history=history, objective="ELBO", converged=converged)  # type: ignore[type-var]
