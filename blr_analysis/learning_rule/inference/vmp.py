"""Variational message passing for a Bayesian mixture of Gaussians (Khan & Rue, section 5.3).

    π ~ Dirichlet,   (m_k, Λ_k) ~ Normal–Wishart,   z_i ~ π,   y_i | z_i = k ~ N(m_k, Λ_k⁻¹)

The mean field q(π) Π_k q(m_k, Λ_k) Π_i q(z_i) moves node by node, each with one step of the rule
at ρ = 1 (Winn & Bishop, 2005). As in EM (K&R 5.2), but θ is averaged over where EM looks at its
mean: a node's message to its neighbours is the expectation of its statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from blr_analysis.checks import at_least, instance
from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural, add
from blr_analysis.learning_rule.families.dirichlet import Dirichlet
from blr_analysis.learning_rule.families.gamma import NormalWishart
from blr_analysis.learning_rule.families.special import LOG_2PI
from blr_analysis.learning_rule.inference.conjugate import bayes, wide
from blr_analysis.learning_rule.inference.factors import gaussian
from blr_analysis.learning_rule.inference.fitted import CHUNK, Fitted, Sites, until_flat
from blr_analysis.learning_rule.inference.mixture_model import (
    assign,
    check_data,
    first_responsibilities,
    paired,
    pooled,
    shared,
)

MeanField = dict[str, ExponentialFamily]
FACTOR = gaussian()


@dataclass(frozen=True, eq=False)
class BayesianGaussianMixture:
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

    def fit(
        self,
        data: Tensor,
        *,
        start: Tensor | None = None,
        max_iter: int = 1000,
        tol: float = 1e-6,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> FittedMeanField:
        """Pass messages until the lower bound rests; in double precision.

        It holds the second moments of all examples, N·D² numbers, counted from 0: centre data
        whose mean is thousands of standard deviations away from it.

        Args:
            data: ``[N, D]``.
            start: responsibilities ``[N, K]``, or None to start from K examples that lie apart
                (k-means++).
            max_iter: the most iterations; a warning, :class:`NotConverged`, says if they are
                too few.
            tol: stop when the lower bound per example changes by no more than this.
            generator: for the start.
            progress: whether to show a bar; None shows it on a terminal after a second.

        Returns:
            The mean field of the global nodes, ``q["weights"]`` (Dirichlet) and
            ``q["components"]`` (Normal–Wishart, K copies), its sites, and the ELBO after each
            iteration (z, then π and the components).

        Raises:
            DataError: data that are not finite, misshapen, or fewer than K.
            InputError: a start that does not fit, or whose components are not apart; settings
                out of range.
        """
        n_components = len(self.weights.concentration)
        data = FACTOR.check(check_data(data, n_components), wide(self.component))
        prior, statistics = self._prior(data), FACTOR.site(data)
        weights = first_responsibilities(data, n_components, start, generator)
        q = _updated(prior, _sites(weights, statistics, pooled))
        scores = _expected_scores(q, statistics)

        def step(t: int) -> float:
            nonlocal q, weights, scores
            weights = assign(torch.zeros(n_components).to(data), scores).probs
            q = _updated(prior, _sites(weights, statistics, pooled))
            scores = _expected_scores(q, statistics)
            local = (weights * scores).sum() - torch.xlogy(weights, weights).sum()
            divergence = sum(node.kl(prior[name]).sum() for name, node in q.items())
            return float(local - divergence)

        run = until_flat(step, "ELBO", len(data), max_iter=max_iter, tol=tol, progress=progress)

        def site_of(chosen: Tensor) -> Sites:
            at = chosen.to(data.device)
            return _sites(weights[at], {k: v[at] for k, v in statistics.items()}, shared)

        return FittedMeanField(
            q=q,
            **run,
            prior=prior,
            n_data=len(data),
            site_of=site_of,
            predictive=log_predictive,
            data=data,
            step=partial(_step, prior),
        )

    def _prior(self, like: Tensor) -> MeanField:
        copies = len(self.weights.concentration)
        naturals = {
            "weights": self.weights.natural,
            "components": {
                k: v.expand(copies, *v.shape) for k, v in self.component.natural.items()
            },
        }
        moved = {n: {k: v.to(like) for k, v in part.items()} for n, part in naturals.items()}
        return {
            "weights": self.weights.with_natural(moved["weights"]),
            "components": self.component.with_natural(moved["components"]),
        }


@dataclass(frozen=True, eq=False, repr=False)
class FittedMeanField(Fitted[MeanField]):
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
        data = _checked(self.q, data)
        parts = [_expected_scores(self.q, FACTOR.site(part)) for part in data.split(CHUNK)]
        return torch.softmax(torch.cat(parts), 1)


def log_predictive(q: MeanField, data: Tensor) -> Tensor:
    """log Σ_k E[π_k] p_k(y_j), a mixture of Student's t, ``[M]``; M copies go with one each.

    Raises:
        DataError: data that are misshapen or not finite.
    """
    data = _checked(q, data)
    if q["components"].natural["square"].ndim == 1:
        return torch.cat([_log_mixture(q, part) for part in data.split(CHUNK)])
    return _log_mixture(q, data)


def _log_mixture(q: MeanField, data: Tensor) -> Tensor:
    nodes, weights = q["components"], q["weights"]
    assert isinstance(weights, Dirichlet)
    site = {k: v.unsqueeze(1) for k, v in FACTOR.site(data).items()}
    after = nodes.with_natural(add(nodes.natural, site))
    gain = after.log_partition() - nodes.log_partition() + FACTOR.constant(data).unsqueeze(1)
    return torch.logsumexp(weights.mean.log() + gain, -1)


def _expected_scores(q: MeanField, statistics: Natural) -> Tensor:
    """E_q[log π_k + log p(y_i | m_k, Λ_k)], ``[N, K]``: the message to z_i."""
    size = statistics["shift"].shape[1]
    scores = paired(statistics, q["components"].expectation)
    return scores + q["weights"].expectation["log"] - 0.5 * size * LOG_2PI


def _sites(weights: Tensor, statistics: Natural, combine: Any) -> dict[str, Natural]:
    counts = combine(weights, {"log": torch.ones_like(weights[:, 0])})
    return {"weights": counts, "components": combine(weights, statistics)}


def _step(prior: MeanField, q: MeanField, data: Tensor, kept: Tensor) -> MeanField:
    statistics = FACTOR.site(data[kept])
    weights = torch.softmax(_expected_scores(q, statistics), 1)
    return _updated(prior, _sites(weights, statistics, pooled))


def _updated(prior: MeanField, sites: dict[str, Natural]) -> MeanField:
    return {name: bayes(node, sites[name]) for name, node in prior.items()}


def _checked(q: MeanField, data: Any) -> Tensor:
    nodes = q["components"]
    assert isinstance(nodes, NormalWishart)
    return FACTOR.check(check_data(data, 1), nodes)
