"""The Bayesian learning rule, once.

    λ ← (1 − ρ) λ − ρ ∇_μ E_q[ ℓ̄(θ) + log h(θ) ]            (Khan & Rue, Eq. 6)

minimises E_q[ℓ̄] − H(q) over the members q of an exponential family, by natural gradients: ∇_μ is
the natural gradient with respect to λ, and h the family's base measure. A loss that is a sum over
examples gives each of them a site, and at a fixed point the posterior is their sum:

    λ = λ_prior + Σ_i λ̃_i,      λ̃_i = −∇_μ E_q[ℓ_i]          (K&R 5, 54)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, Self, TypeVar

from torch import Tensor

from blr_analysis.checks import share
from blr_analysis.learning_rule.families.base import Natural, add, scale


class Member(Protocol):
    """A distribution with natural parameters: of an exponential family, or of a mixture of them."""

    @property
    def natural(self) -> Natural:
        """λ."""
        ...

    def with_natural(self, natural: Natural) -> Self:
        """The member of the same family with these λ."""
        ...

    def base_gradient(self) -> Natural:
        """∇_μ E_q[log h(θ)]."""
        ...


Q = TypeVar("Q", bound=Member)


def blr_step(q: Q, loss_gradient: Mapping[str, Tensor], rho: float) -> Q:
    """One step of the rule.

    Args:
        q: the present posterior.
        loss_gradient: ∇_μ E_q[ℓ̄], statistic by statistic; ℓ̄ includes −log prior. The rule adds
            the share of the base measure.
        rho: ρ in (0, 1]; 1 forgets what was there before.

    Returns:
        The member of the same family after the step.

    Raises:
        InputError: ρ outside of (0, 1], or λ leaves the family's domain.

    Example:
        One step at ρ = 1 is Bayes' rule where the loss is linear in μ: here two observations of
        unit precision, 1 and 3, under the prior N(0, 1).

        >>> import torch
        >>> from blr_analysis.learning_rule.families import DiagonalGaussian
        >>> q = DiagonalGaussian(torch.zeros(1), torch.ones(1))
        >>> mean = q.mean
        >>> gradient = q.pull_back(3 * mean - (1 + 3), torch.full((1,), 3.0))
        >>> blr_step(q, gradient, 1.0)
        DiagonalGaussian(mean=tensor([1.3333]), precision=tensor([3.]))
    """
    share("rho", rho)
    gradient = add(loss_gradient, q.base_gradient())
    return q.with_natural(add(scale(q.natural, 1 - rho), scale(gradient, -rho)))
