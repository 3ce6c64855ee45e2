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
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import Natural, add, scale

HALF_NORMAL = math.sqrt(2 / math.pi)  # E|w|
GRID, REACH = 2001, 14.0  # points, and standard deviations on either side of the mean


class NotSkewNormal(InputError):
    """Numbers that are no parameters of a skew normal."""


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
            raise NotSkewNormal(
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

    def with_natural(self, natural: Natural) -> SkewNormal:
        """The member with these λ, as families have it."""
        return self.from_natural(natural)

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

    def expect(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        """E_q[f(θ)] on the grid; differentiable in the parameters through q's density."""
        grid, spacing = self.grid()
        return (self.log_prob(grid).exp() * f(grid)).sum() * spacing.exp()

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
