"""Non-conjugate variational message passing (Knowles & Minka, 2011; Khan & Rue, section 5.3).

Regression with a link, p(y_i | x_iᵀθ), and a factor of its own for every coefficient. A likelihood
that is not conjugate still sends each node a message in the node's own family, the gradient of
its expectation,

    λ̃_ij = ∇_μ_j E_q[log p(y_i | x_iᵀθ)],

and the nodes move in turn, each to the sum of its messages: the rule, coordinate by coordinate,
at ρ = 1, halved where that overshoots. With f_i = x_iᵀθ Gaussian under the mean field, an
expectation is over one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from blr_analysis.learning_rule.families.base import Natural, add, subtract
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian
from blr_analysis.learning_rule.inference.conjugate import wide
from blr_analysis.learning_rule.inference.cvi import (
    AnyLikelihood,
    LatentModel,
    Problem,
    check_prior,
    linear_features,
    look,
    posed,
    swept,
)
from blr_analysis.learning_rule.inference.fitted import Fitted
from blr_analysis.learning_rule.inference.scalar_likelihoods import scalar_likelihood


class MeanField(Problem[DiagonalGaussian]):
    """Sites λ̃_ij of every example and node, ``[N, P]`` each; the nodes move in turn."""

    @property
    def nodes(self) -> Sequence[Tensor]:
        return [*torch.eye(self.design.shape[1]).to(self.design)]

    def posterior(self, sites: Natural) -> DiagonalGaussian:
        told = {name: site.sum(0) for name, site in sites.items()}
        return self.prior.with_natural(add(self.prior.natural, told))

    def told(self, theta: Tensor, of_f: Natural) -> Natural:
        bend = 2 * of_f["square"]
        slope = of_f["linear"] + bend * (self.design @ theta)
        here = DiagonalGaussian(theta, torch.ones_like(theta))
        steep, bent = slope.unsqueeze(1) * self.design, bend.unsqueeze(1) * self.design.square()
        return here.pull_back(steep, bent)

    def step(self, q: DiagonalGaussian, data: Any) -> DiagonalGaussian:
        """A sweep through the nodes, each to the messages of these examples."""
        there, n = self.on(data), len(data[1])
        gap = subtract(q.natural, self.prior.natural)
        evenly = {name: (value / n).expand(n, -1) for name, value in gap.items()}
        return swept(there, look(there, evenly), 1.0).q


@dataclass(frozen=True)
class MeanFieldRegression(LatentModel):
    """p(y_i | x_iᵀθ) with a mean-field Gaussian posterior.

    Attributes:
        prior: p(θ), one Gaussian for each coefficient.
        likelihood: ``"bernoulli"`` (logistic regression, y in 0 and 1), ``"probit"``,
            ``"poisson"`` (log-rates), a likelihood object, or a function (y, f) → log p(y|f).

    Raises:
        InputError: a prior that is no DiagonalGaussian, or an unknown likelihood.

    Example:
        >>> prior = DiagonalGaussian(torch.zeros(2).double(), torch.ones(2).double())
        >>> x, y = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]), torch.tensor([1.0, 2.0, 7.0])
        >>> MeanFieldRegression(prior, "poisson").fit((x, y)).q.mean
        tensor([0.0418, 0.8411], dtype=torch.float64)
    """

    prior: DiagonalGaussian
    likelihood: AnyLikelihood = "poisson"
    kind: ClassVar[type[Fitted[Any]]] = Fitted

    def __post_init__(self) -> None:
        check_prior(self.prior, DiagonalGaussian)
        scalar_likelihood(self.likelihood)

    def problem(self, data: Any) -> tuple[Any, Problem[DiagonalGaussian]]:
        prior = wide(self.prior)
        features = linear_features(len(prior.mean), prior.mean)
        return posed(MeanField, prior, self.likelihood, features, data)
