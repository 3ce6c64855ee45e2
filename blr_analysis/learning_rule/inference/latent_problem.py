"""What examples tell a Gaussian θ of which they see one number each, f_i = φ_iᵀθ + e_i.

The site of an example is the natural parameters of a Gaussian message to f_i, a pair of numbers
(a_i, b_i). Its share of λ is of rank one: (a_i φ_i, −½ b_i φ_i φ_iᵀ). Nothing of the size of the
posterior is copied for an example. All is in double precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from blr_analysis.learning_rule.families.base import Natural, add
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian, FullGaussian
from blr_analysis.learning_rule.inference.conjugate import pairs
from blr_analysis.learning_rule.inference.fitted import Model, rows
from blr_analysis.learning_rule.inference.scalar_likelihoods import (
    ScalarLikelihood,
    checked_targets,
    expected_log_prob,
    log_predictive,
)

Q = TypeVar("Q", FullGaussian, DiagonalGaussian)
NO_EXAMPLES = torch.zeros(0)
Features = Callable[[Tensor], tuple[Tensor, Tensor]]
"""x ``[M, D]`` → the rows φ(x) ``[M, P]``, and the variance of f beyond θ's share, ``[M]``."""


@dataclass(frozen=True, eq=False)
class Problem(Model, Generic[Q]):
    """A Gaussian prior, and examples that see one number of θ each, f_i = φ_iᵀθ + e_i.

    Attributes:
        prior: p(θ), over P numbers.
        likelihood: log p(y_i|f_i).
        features: inputs → their rows of the design, and Var(e_i).
        design: Φ ``[N, P]``, whose rows are φ_i.
        residual: Var(e_i) ``[N]``, where θ does not explain f_i wholly.
        targets: y ``[N]``.
    """

    prior: Q
    likelihood: ScalarLikelihood
    features: Features
    design: Tensor = NO_EXAMPLES
    residual: Tensor = NO_EXAMPLES
    targets: Tensor = NO_EXAMPLES

    @property
    def nodes(self) -> Sequence[Any]:
        """What moves in turn: all of θ at once."""
        return [1.0]

    def total(self, sites: Natural) -> Natural:
        """Σ_i λ̃_i in the family of q(θ)."""
        return summed(self.design, sites)

    def posterior(self, sites: Natural) -> Q:
        """λ_prior + Σ_i λ̃_i as a distribution."""
        return self.prior.with_natural(add(self.prior.natural, self.total(sites)))

    def sites_at(self, theta: Tensor, of_f: Natural) -> Natural:
        """λ̃_i from ∇_μ E_q[log p(y_i|f_i)] of f_i, at a q whose mean is ``theta``."""
        return of_f

    def aims(self, q: Q) -> tuple[Natural, Tensor]:
        """∇_μ E_q[log p(y_i|f_i)], and the expectations themselves ``[N]``."""
        marginals = latent(q, self.design, self.residual)
        of_f, values = aims(marginals, self.targets, self.likelihood)
        return self.sites_at(q.mean, of_f), values

    def check(self, data: Any) -> tuple[Tensor, Tensor]:
        x, y = pairs(data, self.prior.mean)
        return x, checked_targets(self.likelihood, y)

    def log_predictive(self, q: Q, data: Any) -> Tensor:
        x, y = data
        return log_predictive(self.likelihood, latent(q, *self.features(x)), y)

    def step(self, q: Q, data: Any) -> Q:
        """λ_prior + Σ_i ∇_μ E_q[log p(y_i|f_i)] of these examples."""
        problem = self.on(data)
        sites, _ = problem.aims(q)
        return problem.posterior(sites)

    def on(self, data: Any) -> Self:
        """The same for other examples."""
        x, y = data
        design, residual = self.features(x)
        return replace(self, design=design, residual=residual, targets=y)

    def of(self, chosen: Tensor) -> Self:
        """The same for some of its examples."""
        design, residual, targets = rows((self.design, self.residual, self.targets), chosen)
        return replace(self, design=design, residual=residual, targets=targets)


def latent(q: Any, design: Tensor, residual: Tensor | float = 0.0) -> DiagonalGaussian:
    """The marginals of f_i = φ_iᵀθ + e_i, Var(e_i) = ``residual``, under q.

    With N copies in ``q``, each goes with its own row of the design ``[N, P]``; where f_i is 0 for
    sure (φ_i = 0) its variance is ε.
    """
    if isinstance(q, DiagonalGaussian):
        variance = (design.square() / q.precision).sum(-1)
    else:
        factor = torch.linalg.cholesky(q.precision)
        columns = design.mT if q.mean.ndim == 1 else design.unsqueeze(-1)
        roots = torch.linalg.solve_triangular(factor, columns, upper=False)
        variance = roots.square().sum(-2).reshape(len(design))
    variance = (variance + residual).clamp(min=torch.finfo(design.dtype).eps)
    return DiagonalGaussian((design * q.mean).sum(-1), 1 / variance)


def summed(design: Tensor, sites: Natural) -> Natural:
    """Σ_i λ̃_i in the family of q(θ), from the sites' pairs of numbers."""
    square = design.mT @ (sites["square"].unsqueeze(-1) * design)
    return {"linear": design.mT @ sites["linear"], "square": square}


def aims(
    marginals: DiagonalGaussian, targets: Tensor, likelihood: ScalarLikelihood
) -> tuple[Natural, Tensor]:
    """∇_μ E_q[log p(y_i|f_i)], and the expectations themselves, for each example.

    The derivatives in the mean and the variance are those of the expectation as it is computed
    (∂/∂v E = ½ E[∂²], Price), so that a fixed point of the rule is a stationary point of the ELBO
    to rounding.
    """
    mean = marginals.mean.detach().requires_grad_()
    variance = (1 / marginals.precision).detach().requires_grad_()
    with torch.enable_grad():
        values = expected_log_prob(likelihood, DiagonalGaussian(mean, 1 / variance), targets)
        slope, half_bend = torch.autograd.grad(values.sum(), (mean, variance))
    return marginals.pull_back(slope, 2 * half_bend), values.detach()
