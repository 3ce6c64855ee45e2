"""Variational message passing for a Bayesian mixture of Gaussians (Khan & Rue, section 5.3).

    π ~ Dirichlet,   (m_k, Λ_k) ~ Normal–Wishart,   z_i ~ π,   y_i | z_i = k ~ N(m_k, Λ_k⁻¹)

The mean field q(π) Π_k q(m_k, Λ_k) Π_i q(z_i) moves node by node, each with one step of the rule
at ρ = 1 (Winn & Bishop, 2005). As in EM (K&R 5.2), but θ is averaged over where EM looks at its
mean: a node's message to its neighbours is the expectation of its statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from blr_analysis.checks import at_least, instance
from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.base import Natural, add
from blr_analysis.learning_rule.families.dirichlet import Dirichlet
from blr_analysis.learning_rule.families.gamma import NormalWishart
from blr_analysis.learning_rule.inference.conjugate import bayes, wide
from blr_analysis.learning_rule.inference.factors import gaussian
from blr_analysis.learning_rule.inference.fitted import CHUNK, Fitted
from blr_analysis.learning_rule.inference.messages import Messages, Nodes
from blr_analysis.learning_rule.inference.mixture_model import (
    check_data,
    first_responsibilities,
    paired,
    pooled,
)

FACTOR = gaussian()


@dataclass(frozen=True, eq=False)
class BayesianGaussianMixture(Messages):
    """A mixture of Gaussians with priors on its weights and components.

    Attributes:
        weights: the prior of π, over K components.
        component: the prior of the mean and precision of each component.

    Raises:
        InputError: a prior of another family, or with copies.

    Example:
        >>> parts = torch.linspace(-6, -5, 10), torch.linspace(4, 6, 20)
        >>> data = torch.cat(parts).unsqueeze(1)
        >>> model = BayesianGaussianMixture.for_data(data, n_components=2)
        >>> fitted = model.fit(data, generator=torch.Generator().manual_seed(0))
        >>> fitted.q["weights"].concentration.sort().values
        tensor([10.5048, 20.4952], dtype=torch.float64)
    """

    weights: Dirichlet
    component: NormalWishart

    def __post_init__(self) -> None:
        instance("weights", self.weights, Dirichlet, "a Dirichlet distribution")
        instance("component", self.component, NormalWishart, "a Normal–Wishart distribution")
        if self.weights.concentration.ndim != 1 or self.component.mean.ndim != 1:
            raise InputError("the priors must be single distributions, without copies")

    @classmethod
    def for_data(cls, data: Tensor, n_components: int) -> Self:
        """Weak priors on the scale of the data: α = 1/K, m = ȳ, κ = 1, ν = D, V⁻¹ = cov(y).

        Raises:
            DataError: data that are misshapen or not finite, or whose covariance is singular.
            InputError: fewer than two components.
        """
        at_least(2, "n_components", n_components)
        data = check_data(data, n_components)
        size, one = data.shape[1], torch.ones(()).to(data)
        spread = torch.cov(data.mT, correction=min(1, len(data) - 1)).reshape(size, size)
        if int(torch.linalg.cholesky_ex(spread)[1]):
            raise DataError(
                f"the covariance of {len(data)} examples is singular: drop dependent columns"
            )
        prior = NormalWishart(data.mean(0), one, size * one, spread)
        return cls(Dirichlet(torch.full((n_components,), 1 / n_components).to(data)), prior)

    def fit(self, data: Tensor, *, start: Tensor | None = None, **settings: Any) -> FittedMeanField:  # type: ignore[override]
        """Pass messages until the lower bound rests; in double precision.

        It holds the second moments of all examples, N·D² numbers, counted from 0: centre data
        whose mean is thousands of standard deviations away from it.

        Args:
            data: ``[N, D]``.
            start: responsibilities ``[N, K]``, or None to start from K examples that lie apart
                (k-means++).
            settings: those of :meth:`MessagePassing.fit`.

        Returns:
            The mean field of the global nodes, ``q["weights"]`` (Dirichlet) and
            ``q["components"]`` (Normal–Wishart, K copies), its sites, and the ELBO after each
            iteration (z, then π and the components).

        Raises:
            DataError: data that are not finite, misshapen, or fewer than K.
            InputError: a start that does not fit, or whose components are not apart; settings
                out of range.
        """
        data = self.check(data)
        given = start, settings.get("generator")
        weights = first_responsibilities(data, len(self.weights.concentration), *given)
        told = {
            "weights": {"log": weights.sum(0)},
            "components": pooled(weights, FACTOR.site(data)),
        }
        begun = {name: bayes(prior, told[name]) for name, prior in self.nodes.items()}
        return super().fit(data, start=begun, **settings)  # type: ignore[return-value]

    @cached_property
    def nodes(self) -> Nodes:
        weights, one = wide(self.weights), wide(self.component)
        copies = len(weights.concentration)
        components = {k: v.expand(copies, *v.shape) for k, v in one.natural.items()}
        return {"weights": weights, "components": one.with_natural(components)}

    def check(self, data: Any) -> Tensor:
        return FACTOR.check(check_data(data), wide(self.component))

    def local(self, mu: Mapping[str, Natural], data: Tensor) -> Tensor:
        """log Σ_k exp E_q[log π_k + log p(y_i | m_k, Λ_k)]."""
        return self.scores(mu, data).logsumexp(1)

    def scores(self, mu: Mapping[str, Natural], data: Tensor) -> Tensor:
        """The message to z_i, ``[N, K]``."""
        told = paired(FACTOR.site(data), mu["components"]) + FACTOR.constant(data).unsqueeze(1)
        return told + mu["weights"]["log"]

    def log_predictive(self, q: Nodes, data: Tensor) -> Tensor:
        """log Σ_k E[π_k] p_k(y_j), a mixture of Student's t."""
        nodes, weights = q["components"], q["weights"].expected_point()
        site = {k: v.unsqueeze(1) for k, v in FACTOR.site(data).items()}
        gain = nodes.with_natural(add(nodes.natural, site)).log_partition() - nodes.log_partition()
        return torch.logsumexp(weights.log() + gain, -1) + FACTOR.constant(data)


class FittedMeanField(Fitted[Nodes]):
    """The global nodes of a mixture; taking examples out is one message-passing step.

    :meth:`without` subtracts what the examples told the global nodes; what the others told them
    stays as it was, although each of them would now be assigned a little differently.

    Example:
        >>> data = torch.cat([torch.linspace(-6, -5, 10), torch.linspace(4, 6, 20)]).unsqueeze(1)
        >>> model = BayesianGaussianMixture.for_data(data, n_components=2)
        >>> fitted = model.fit(data, generator=torch.Generator().manual_seed(0))
        >>> fitted.without(range(10))["weights"].concentration.sort().values
        tensor([ 0.5048, 20.4952], dtype=torch.float64)
        >>> fitted.responsibilities(torch.tensor([[-5.0]])).amax()
        tensor(1.0000, dtype=torch.float64)
    """

    def responsibilities(self, data: Tensor) -> Tensor:
        """E-step: q(z_j = k) of M examples under the fitted nodes, ``[M, K]``.

        Raises:
            DataError: data that are misshapen or not finite.
        """
        mu = {name: node.expectation for name, node in self.q.items()}
        parts = self.model.check(data).split(CHUNK)
        return torch.cat([self.model.scores(mu, part).softmax(1) for part in parts])


BayesianGaussianMixture.kind = FittedMeanField
