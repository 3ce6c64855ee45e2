"""Expectation maximisation: q(z) q(θ) with the delta method on θ (Khan & Rue, section 5.2).

EM makes steps of the rule at ρ = 1 for the loss −log p(y, z | θ), one coordinate after the other:

    E-step   λ_i = λ̃_1(y_i, θ) + λ_0(θ)                 one step for q(z_i), at the mean of q(θ)
    M-step   θ = ∇A*( E_q[T(y, z)] )                     the fixed point of the step for q(θ)

The M-step is the Legendre map of the component's family, `with_expectation`. The site of an example
is its expected statistics (r_ik, r_ik T(y_i)). Steps of ρ < 1 for q(θ) are generalised EM where
they are made on all N examples, and online EM where they are made on B of them:

    T̄ ← (1 − ρ) T̄ + ρ N/B Σ_i E_q[T(y_i, z_i)],     θ = ∇A*(T̄)

To remove examples is an M-step without their sites. Everything is computed in double precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from blr_analysis.checks import at_least, one_of, positive_number
from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.base import Natural, add, scale, subtract
from blr_analysis.learning_rule.families.drawing import device_of
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian, FullGaussian
from blr_analysis.learning_rule.families.matrices import outer, symmetric
from blr_analysis.learning_rule.families.mixture import GaussianMixture
from blr_analysis.learning_rule.inference.conjugate import real
from blr_analysis.learning_rule.inference.fitted import (
    Fitted,
    Model,
    Sites,
    minibatch,
    rate_at,
    rows,
    until_flat,
)


def paired(of_examples: Mapping[str, Tensor], of_components: Mapping[str, Tensor]) -> Tensor:
    """The inner products of N examples with K components, summed over names, ``[N, K]``.

    For example ⟨T(y_i), λ_k⟩, from statistics ``[N, …]`` and natural parameters ``[K, …]``.
    """
    products = []
    for name, example_values in of_examples.items():
        component_values = of_components[name]
        example_rows = example_values.reshape(len(example_values), -1)
        component_rows = component_values.reshape(len(component_values), -1)
        products.append(example_rows @ component_rows.mT)
    return torch.stack(products).sum(0)


def pooled(weights: Tensor, statistics: Mapping[str, Tensor]) -> Natural:
    """Σ_i r_ik T(y_i), for each component: ``[K, …]`` from weights ``[N, K]``."""
    return {name: torch.tensordot(weights.mT, value, 1) for name, value in statistics.items()}


def check_data(data: Any, fewest: int = 1, columns: int | None = None) -> Tensor:
    """The data ``[N, D]`` in double precision.

    Args:
        data: the user's examples.
        fewest: the smallest number of examples.
        columns: D; None where any number of columns will do.

    Raises:
        DataError: data are misshapen, not finite or too few.
    """
    like = torch.empty((), dtype=torch.float64, device=getattr(data, "device", None))
    data = real("data", data, like, ndim=2)
    if len(data) < fewest:
        raise DataError(f"{fewest} components need as many examples, got {len(data)}")
    if columns is not None and data.shape[1] != columns:
        raise DataError(f"data must be [N, {columns}], as fitted, got {tuple(data.shape)}")
    return data.detach()


def first_responsibilities(
    data: Tensor, n_components: int, start: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    """The responsibilities r ``[N, K]`` that a fit starts from: the user's, or by k-means++.

    k-means++ draws K of the examples as seeds: the first uniformly, every further one with a
    probability in proportion to its squared distance from the nearest seed so far. Each example
    then belongs to its nearest seed (Arthur & Vassilvitskii, 2007).

    Raises:
        InputError: the user's responsibilities have another shape, are negative, do not sum to 1,
            or are the same for two components.
    """
    if start is None:
        return _seeded(data, n_components, generator)
    shape = (len(data), n_components)
    if not isinstance(start, Tensor) or start.shape != shape:
        raise InputError(f"start must be responsibilities {[*shape]}")
    start = start.to(data).detach()
    sums_to_one = torch.allclose(start.sum(1), start.new_tensor(1.0))
    if not (sums_to_one and bool((start >= 0).all())):
        raise InputError("each example's responsibilities must be 0 or more and sum to 1")
    n_different = len(torch.unique(start.mT, dim=0))
    if n_different < n_components:  # equal components would stay equal for ever
        raise InputError("two components of start are the same: move one a little")
    return start


def _seeded(data: Tensor, n_components: int, generator: torch.Generator | None) -> Tensor:
    """Responsibilities 0 and 1: each example belongs to the nearest of K seeds (k-means++)."""
    device = device_of(data, generator)
    spread = data.std(0)
    centred = data - data.mean(0)
    scaled = (centred / torch.where(spread > 0, spread, 1.0)).to(device)
    seed = torch.randint(len(data), (1,), generator=generator, device=device)
    distances = torch.cdist(scaled, scaled[seed])
    for _ in range(n_components - 1):
        weights = distances.amin(1).square() + 1e-300  # where all are 0, any example may be drawn
        seed = torch.multinomial(weights, 1, generator=generator)
        distances = torch.cat([distances, torch.cdist(scaled, scaled[seed])], 1)
    return one_hot(distances.argmin(1), n_components).to(data)


class FittedEM(Fitted[Any]):
    """Parameters that an M-step computes from the sum of the sites (expected statistics)."""

    @cached_property
    def totals(self) -> Natural:
        """Σ_i of the sites."""
        return self._total(torch.arange(self.n_data))

    def _less(self, sites: Sites) -> Any:
        try:
            return self.model.maximise(subtract(self.totals, sites))  # type: ignore[arg-type]
        except DataError as error:
            raise DataError(f"a component rests on these examples alone: {error}") from error


@dataclass(frozen=True)
class GaussianMixtureEM(Model):
    """A mixture of Gaussians whose parameters are found by EM.

    Attributes:
        n_components: K, two or more.
        covariance: ``"full"``, ``"diag"`` or ``"spherical"``.
        floor: a positive number that each M-step adds to every variance, in squared units of the
            data. A component whose variance is little above it has collapsed onto few examples:
            take fewer components, or scale the data.

    Raises:
        InputError: the covariance has another name, there are fewer than two components, or the
            floor is not positive.

    Example:
        >>> data = torch.tensor([[-5.0], [-4.0], [-3.0], [2.0], [4.0]])
        >>> fitted = GaussianMixtureEM(2).fit(data, generator=torch.Generator().manual_seed(0))
        >>> fitted.q.components.mean.flatten().sort().values
        tensor([-4.0000,  3.0000], dtype=torch.float64)
        >>> fitted.responsibilities(data).argmax(1).bincount().sort().values
        tensor([2, 3])
    """

    n_components: int
    covariance: str = "full"
    floor: float = 1e-6

    def __post_init__(self) -> None:
        one_of("covariance", self.covariance, ("full", "diag", "spherical"))
        at_least(2, "n_components", self.n_components)
        positive_number("floor", self.floor)

    def fit(
        self,
        data: Tensor,
        *,
        start: Tensor | GaussianMixture | None = None,
        rho: float | Callable[[int], float] = 1.0,
        batch: int | None = None,
        generator: torch.Generator | None = None,
        **stopping: Any,
    ) -> FittedMixture:
        """Alternate E- and M-steps until the log-likelihood stands still.

        With full covariances the second moments y yᵀ of all examples take N·D² numbers of memory.
        They are taken about 0: centre data whose mean is many standard deviations away from 0.

        Args:
            data: ``[N, D]``.
            start: responsibilities ``[N, K]``, or a mixture; None starts from K examples that lie
                apart (k-means++).
            rho: ρ in (0, 1], or t → ρ_t from t = 1. ρ < 1 over all examples is generalised EM,
                which makes shorter steps and also raises the likelihood.
            batch: B, the size of a minibatch; None takes all examples in each step. Minibatches
                are online EM: ``max_iter`` steps, with a falling ρ_t such as t^(−0.6).
            generator: draws the start and the minibatches.
            stopping: ``max_iter``, ``tol`` (of the log-likelihood per example) and ``progress``
                (whether to show a bar; None shows it on a terminal after a second).

        Returns:
            The mixture as ``q``, and log p(y|θ) at each E-step, before the M-step that follows,
            as ``history``. With minibatches ``history`` is N/B times the log-likelihood of the
            minibatch, and ``converged`` is False.

        Raises:
            DataError: data are not finite, misshapen, or fewer than K; or a component has no
                example, or only one point.
            InputError: the start has another shape or two equal components, or a setting is out
                of range.
        """
        data = check_data(data, fewest=self.n_components)
        n_data = len(data)
        statistics = self._statistics(data)
        q = self._first(data, statistics, start, generator)
        totals = scale({"count": q.weights, **q.expectation}, n_data)

        def step(t: int) -> float:
            nonlocal q, totals
            chosen = minibatch(n_data, batch, generator)
            factor = n_data / len(chosen)
            step_size = rate_at(rho, t + 1)
            batch_statistics = rows(statistics, chosen)
            log_joint = _log_joint(q, batch_statistics)
            log_likelihood = float(log_joint.logsumexp(1).sum())
            batch_totals = _expected(log_joint.softmax(1), batch_statistics)
            new_totals = scale(batch_totals, factor)
            totals = add(scale(totals, 1 - step_size), scale(new_totals, step_size))
            q = self.maximise(totals)
            return factor * log_likelihood

        run = until_flat(step, "log-likelihood", n_data, noisy=batch is not None, **stopping)
        return FittedMixture(q=q, **run, model=self, data=data)

    def check(self, data: Any) -> Tensor:
        return check_data(data)

    def sites(self, q: GaussianMixture, data: Tensor) -> Natural:
        """The expected statistics (r_ik, r_ik T(y_i)) of every example and component."""
        responsibilities = q.marginal.responsibilities(data)
        statistics = {"count": torch.ones_like(data[:, 0]), **self._statistics(data)}
        return {
            name: torch.einsum("nk,n...->nk...", responsibilities, value)
            for name, value in statistics.items()
        }

    def step(self, q: GaussianMixture, data: Tensor) -> GaussianMixture:
        """The mixture after one E-step and one M-step."""
        responsibilities = q.marginal.responsibilities(data)
        return self.maximise(_expected(responsibilities, self._statistics(data)))

    def log_predictive(self, q: GaussianMixture, data: Tensor) -> Tensor:
        """log Σ_k π_k N(y_j | m_k, S_k⁻¹) of M examples, in nats ``[M]``."""
        return q.marginal.log_prob(data)

    def maximise(self, totals: Natural) -> GaussianMixture:
        """The M-step: a mixture from Σ_i (r_ik, r_ik T(y_i)).

        Totals with leading dimensions give one mixture for each of their entries.

        Raises:
            DataError: a component has no example.
        """
        counts = totals["count"]
        if not bool((counts > 0).all()):
            raise DataError("a component has no examples left: start elsewhere, or with fewer")
        mean = totals["linear"] / counts.unsqueeze(-1)
        if self.covariance == "full":
            components = self._full(mean, totals["square"] / counts[..., None, None])
        else:
            components = self._diagonal(mean, totals["square"] / counts.unsqueeze(-1))
        return GaussianMixture(counts / counts.sum(-1, keepdim=True), components)

    def _full(self, mean: Tensor, second_moment: Tensor) -> FullGaussian:
        """Components of these means ``[…, K, D]`` and second moments ``[…, K, D, D]``."""
        covariance = symmetric(second_moment - outer(mean, mean))
        floor = self.floor * torch.eye(mean.shape[-1]).to(mean)
        return FullGaussian(mean, torch.linalg.inv(covariance + floor))

    def _diagonal(self, mean: Tensor, second_moment: Tensor) -> DiagonalGaussian:
        """Components of these means and second moments, ``[…, K, D]`` each."""
        variance = second_moment - mean.square()
        if self.covariance == "spherical":
            variance = variance.mean(-1, keepdim=True).expand_as(mean)
        return DiagonalGaussian(mean, 1 / (variance.clamp(min=0) + self.floor))

    def _statistics(self, y: Tensor) -> Natural:
        """T(y_i) of the components' family: y_i and y_i y_iᵀ, or of a diagonal its diagonal."""
        square = outer(y, y) if self.covariance == "full" else y.square()
        return {"linear": y, "square": square}

    def _first(
        self, data: Tensor, statistics: Natural, start: Any, generator: torch.Generator | None
    ) -> GaussianMixture:
        """The mixture before the first step."""
        if isinstance(start, GaussianMixture):
            return start
        responsibilities = first_responsibilities(data, self.n_components, start, generator)
        return self.maximise(_expected(responsibilities, statistics))


class FittedMixture(FittedEM):
    """A mixture found by EM; its sites are expected statistics (r_ik, r_ik T(y_i)).

    :meth:`without` is an M-step without these examples, at the other examples' present
    responsibilities. Where a component has no other example it raises a :class:`DataError`.

    Example:
        >>> data = torch.tensor([[-5.0], [-4.0], [-3.0], [2.0], [4.0]])
        >>> fitted = GaussianMixtureEM(2).fit(data, generator=torch.Generator().manual_seed(0))
        >>> fitted.without([2]).components.mean.flatten().sort().values
        tensor([-4.5000,  3.0000], dtype=torch.float64)
        >>> fitted.log_predictive(torch.tensor([[3.0]]))
        tensor([-1.8352], dtype=torch.float64)
    """

    def responsibilities(self, data: Tensor) -> Tensor:
        """r_k(y_j) = p(z = k | y_j) of M examples, ``[M, K]``.

        Raises:
            DataError: data are misshapen or not finite.
        """
        data = check_data(data, columns=self.q.components.mean.shape[-1])
        return self.q.marginal.responsibilities(data)


def _log_joint(q: GaussianMixture, statistics: Natural) -> Tensor:
    """log π_k + log N(y_i | m_k, S_k⁻¹) ``[N, K]``, from the examples' statistics."""
    log_densities = paired(statistics, q.components.natural) - q.components.log_partition()
    return q.weights.log() + log_densities


def _expected(responsibilities: Tensor, statistics: Natural) -> Natural:
    """Σ_i (r_ik, r_ik T(y_i)) of every component."""
    return {"count": responsibilities.sum(0), **pooled(responsibilities, statistics)}
