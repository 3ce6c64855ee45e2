"""A Gaussian θ whose examples depend on one number each, f_i = φ_iᵀθ + e_i.

The site of an example is a Gaussian message to f_i: two natural parameters, (a_i, −½ b_i). In the
family of q(θ) it has rank one, (a_i φ_i, −½ b_i φ_i φ_iᵀ), so that no tensor of the posterior's
size is stored for an example. Everything is computed in double precision.
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
from blr_analysis.learning_rule.inference.fitted import Model
from blr_analysis.learning_rule.inference.scalar_likelihoods import (
    ScalarLikelihood,
    checked_targets,
    expected_log_prob,
    log_predictive,
)

Q = TypeVar("Q", FullGaussian, DiagonalGaussian)
NO_EXAMPLES = torch.zeros(0)
Features = Callable[[Tensor], tuple[Tensor, Tensor]]
"""x ``[M, D]`` → the rows φ(x) ``[M, P]``, and Var(e) ``[M]``, which θ does not explain."""


@dataclass(frozen=True, eq=False)
class Problem(Model, Generic[Q]):
    """A Gaussian prior, and examples that depend on θ through one number, f_i = φ_iᵀθ + e_i.

    Attributes:
        prior: p(θ), over P numbers.
        likelihood: log p(y_i|f_i).
        features: inputs → their rows of the design, and Var(e_i).
        design: Φ ``[N, P]``, whose rows are φ_i.
        residual: Var(e_i) ``[N]``; 0 where θ explains all of f_i.
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
        """Factors of the step size, one for each part of θ that moves by itself; here all of θ."""
        return [1.0]

    def total(self, sites: Natural) -> Natural:
        """Σ_i λ̃_i in the family of q(θ)."""
        return summed(self.design, sites)

    def posterior(self, sites: Natural) -> Q:
        """λ_prior + Σ_i λ̃_i as a distribution."""
        return self.prior.with_natural(add(self.prior.natural, self.total(sites)))

    def sites_at(self, theta: Tensor, of_f: Natural) -> Natural:
        """λ̃_i from the gradients with respect to f_i, at a q whose mean is ``theta``.

        Args:
            theta: the mean of q ``[P]``.
            of_f: ∇_μ E_q[log p(y_i|f_i)], with μ the expectations (f_i, f_i²), ``[N]`` each.
        """
        return of_f

    def fresh_sites(self, q: Q) -> tuple[Natural, Tensor]:
        """λ̃_i = ∇_μ E_q[log p(y_i|f_i)] at q, and the expectations themselves ``[N]``."""
        marginals = latent(q, self.design, self.residual)
        of_f, expectations = expectation_gradients(marginals, self.targets, self.likelihood)
        return self.sites_at(q.mean, of_f), expectations

    def check(self, data: Any) -> tuple[Tensor, Tensor]:
        x, y = pairs(data, self.prior.mean)
        return x, checked_targets(self.likelihood, y)

    def log_predictive(self, q: Q, data: Any) -> Tensor:
        """log ∫ p(y_i|f_i) q(f_i) df_i of M examples, in nats ``[M]``."""
        x, y = data
        design, residual = self.features(x)
        return log_predictive(self.likelihood, latent(q, design, residual), y)

    def step(self, q: Q, data: Any) -> Q:
        """The rule at ρ = 1: λ_prior + Σ_i ∇_μ E_q[log p(y_i|f_i)] over these examples."""
        problem = self.on(data)
        sites, _ = problem.fresh_sites(q)
        return problem.posterior(sites)

    def on(self, data: Any) -> Self:
        """The same prior and likelihood with other examples, (x, y)."""
        x, y = data
        design, residual = self.features(x)
        return replace(self, design=design, residual=residual, targets=y)

    def of(self, chosen: Tensor) -> Self:
        """The same prior and likelihood with these of its examples ``[M]``."""
        return replace(
            self,
            design=self.design[chosen],
            residual=self.residual[chosen],
            targets=self.targets[chosen],
        )


def latent(q: Any, design: Tensor, residual: Tensor | float = 0.0) -> DiagonalGaussian:
    """The marginals of f_i = φ_iᵀθ + e_i, Var(e_i) = ``residual``, under q: N Gaussian numbers.

    Where ``q`` holds N distributions, the i-th goes with row i of the design ``[N, P]``. A row
    φ_i = 0 makes f_i = 0 without uncertainty; its variance is set to the machine precision.
    """
    if isinstance(q, DiagonalGaussian):
        variance = (design.square() / q.precision).sum(-1)
    else:
        factor = torch.linalg.cholesky(q.precision)
        is_one_distribution = q.mean.ndim == 1
        columns = design.mT if is_one_distribution else design.unsqueeze(-1)
        roots = torch.linalg.solve_triangular(factor, columns, upper=False)
        variance = roots.square().sum(-2).reshape(len(design))
    mean = (design * q.mean).sum(-1)
    variance = (variance + residual).clamp(min=torch.finfo(design.dtype).eps)
    return DiagonalGaussian(mean, 1 / variance)


def summed(design: Tensor, sites: Natural) -> Natural:
    """Σ_i λ̃_i in the family of q(θ), from the messages to the f_i, ``[N]`` each."""
    weighted_design = sites["square"].unsqueeze(-1) * design
    return {"linear": design.mT @ sites["linear"], "square": design.mT @ weighted_design}


def expectation_gradients(
    marginals: DiagonalGaussian, targets: Tensor, likelihood: ScalarLikelihood
) -> tuple[Natural, Tensor]:
    """∇_μ E_q[log p(y_i|f_i)], and the expectations themselves, ``[N]`` each.

    Autograd differentiates the expectation as it is computed, so that a fixed point of the rule is
    a stationary point of the computed ELBO. The derivative with respect to the variance is half
    the expected second derivative (Price's theorem).
    """
    mean = marginals.mean.detach().requires_grad_()
    variance = (1 / marginals.precision).detach().requires_grad_()
    with torch.enable_grad():
        f = DiagonalGaussian(mean, 1 / variance)
        expectations = expected_log_prob(likelihood, f, targets)
        by_mean, by_variance = torch.autograd.grad(expectations.sum(), (mean, variance))
    return marginals.pull_back(by_mean, 2 * by_variance), expectations.detach()
