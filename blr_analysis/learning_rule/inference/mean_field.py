"""Non-conjugate message passing: a factor of its own for every coefficient (K&R, section 5.3).

A likelihood that is not conjugate still sends each node a message in the node's own family,

    λ̃_ij = ∇_μ_j E_q[log p(y_i | x_iᵀθ)],

and the nodes move in turn, each to the sum of its messages (Knowles & Minka, 2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from blr_analysis.learning_rule.families.base import Natural, subtract
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian
from blr_analysis.learning_rule.inference.ascent import look, swept
from blr_analysis.learning_rule.inference.cvi import Regression
from blr_analysis.learning_rule.inference.fitted import Fitted
from blr_analysis.learning_rule.inference.latent_problem import Problem
from blr_analysis.learning_rule.inference.scalar_likelihoods import AnyLikelihood


class MeanField(Problem[DiagonalGaussian]):
    """A mean field: one node for each coefficient θ_j, and the nodes move in turn.

    The sites are λ̃_ij of every example i and node j, ``{"linear", "square"}``, ``[N, P]`` each.
    """

    @property
    def nodes(self) -> Sequence[Tensor]:
        """The P unit vectors: each selects the coefficient that moves."""
        n_coefficients = self.design.shape[1]
        return list(torch.eye(n_coefficients).to(self.design))

    def total(self, sites: Natural) -> Natural:
        """Σ_i λ̃_ij, natural parameters of a diagonal Gaussian, ``[P]`` each."""
        return {name: site.sum(0) for name, site in sites.items()}

    def sites_at(self, theta: Tensor, of_f: Natural) -> Natural:
        """λ̃_ij ``[N, P]`` by the chain rule, ∂f_i/∂θ_j = φ_ij, at a q whose mean is ``theta``."""
        second_derivative = 2 * of_f["square"]
        derivative = of_f["linear"] + second_derivative * (self.design @ theta)
        gradient = derivative.unsqueeze(1) * self.design
        hessian_diagonal = second_derivative.unsqueeze(1) * self.design.square()
        q = DiagonalGaussian(theta, torch.ones_like(theta))
        return q.pull_back(gradient, hessian_diagonal)

    def step(self, q: DiagonalGaussian, data: Any) -> DiagonalGaussian:
        """q after every node moved once, to the sum of its messages from these examples."""
        problem = self.on(data)
        n_data = len(problem.targets)
        likelihood_part = subtract(q.natural, self.prior.natural)
        equal_sites = {
            name: (value / n_data).expand(n_data, -1) for name, value in likelihood_part.items()
        }
        state = look(problem, equal_sites)
        return swept(problem, state, rho=1.0).q


@dataclass(frozen=True)
class MeanFieldRegression(Regression):
    """p(y_i | x_iᵀθ) with a mean-field Gaussian posterior.

    Attributes:
        prior: p(θ), one Gaussian for each coefficient.
        likelihood: ``"bernoulli"`` (logistic regression, y in 0 and 1), ``"probit"``,
            ``"poisson"`` (log-rates), a likelihood object, or a function (y, f) → log p(y|f).

    Raises:
        InputError: the prior is no DiagonalGaussian, or the likelihood is unknown.

    Example:
        >>> prior = DiagonalGaussian(torch.zeros(2).double(), torch.ones(2).double())
        >>> x, y = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]), torch.tensor([1.0, 2.0, 7.0])
        >>> MeanFieldRegression(prior, "poisson").fit((x, y)).q.mean
        tensor([0.0418, 0.8411], dtype=torch.float64)
    """

    prior: DiagonalGaussian
    likelihood: AnyLikelihood = "poisson"
    family: ClassVar[type] = DiagonalGaussian
    problems: ClassVar[type[Problem[Any]]] = MeanField
    kind: ClassVar[type[Fitted[Any]]] = Fitted
