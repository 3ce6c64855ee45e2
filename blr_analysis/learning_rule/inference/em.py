"""Expectation maximisation: q(z) q(θ) with the delta method on θ (Khan & Rue, section 5.2).

Coordinate-wise steps of the rule at ρ = 1 for the loss −log p(y, z | θ):

    E-step   λ_i = λ̃_1(y_i, θ) + λ_0(θ)                 a step for q(z_i), at the mean of q(θ)
    M-step   θ = ∇A*( E_q[T(y, z)] )                     where the step for q(θ) comes to rest

The M-step is the Legendre map of the component's family, `with_expectation`; what an example
tells it, its site, are its expected statistics (r_ik, r_ik T(y_i)). Steps of ρ < 1 for q(θ), over
all examples or B of them, are generalised and online EM:

    T̄ ← (1 − ρ) T̄ + ρ N/B Σ_i E_q[T(y_i, z_i)],     θ = ∇A*(T̄)

*Factor analysis and probabilistic PCA* (Rubin & Thayer, 1982): hidden numbers for hidden classes,

    y = m + W z + e,     z ~ N(0, I),     e ~ N(0, Ψ)

with Ψ diagonal, or σ² I (probabilistic PCA; Tipping & Bishop, 1999), and θ = (W, m, Ψ):

    E-step   q(z_i) = N(G Wᵀ Ψ⁻¹ (y_i − m), G),   G⁻¹ = I + Wᵀ Ψ⁻¹ W      conjugate Bayes
    M-step   [W, m] = E[y z̃ᵀ] E[z̃ z̃ᵀ]⁻¹,   Ψ = diag(E[y yᵀ] − [W, m] E[z̃ yᵀ]),     z̃ = (z, 1)

What an example tells θ are its expected statistics (y z̃ᵀ, z̃ z̃ᵀ, y∘y). Taking examples out is, for
both, an M-step without what they tell; all is in double precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from blr_analysis.checks import at_least, one_of, positive_int, positive_number, share
from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.base import Natural, add, scale, subtract
from blr_analysis.learning_rule.families.drawing import device_of
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian, FullGaussian
from blr_analysis.learning_rule.families.mixture import GaussianMixture
from blr_analysis.learning_rule.inference.conjugate import real
from blr_analysis.learning_rule.inference.fitted import (
    Fitted,
    Model,
    Sites,
    minibatch,
    rows,
    until_flat,
)


def paired(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Tensor:
    """⟨left_i, right_k⟩ of N examples and K components, ``[N, K]``."""
    return sum(
        (left[key].reshape(len(left[key]), -1) @ right[key].reshape(len(right[key]), -1).mT)
        for key in left
    )  # type: ignore[return-value]


def pooled(weights: Tensor, statistics: Mapping[str, Tensor]) -> Natural:
    """Σ_i r_ik T(y_i), for each component: ``[K, …]`` from weights ``[N, K]``."""
    return {key: torch.tensordot(weights.mT, value, 1) for key, value in statistics.items()}


def check_data(data: Any, fewest: int = 1, columns: int | None = None) -> Tensor:
    """The data ``[N, D]`` in double precision, or what is wrong with them.

    Args:
        data: what was given.
        fewest: examples that there must be.
        columns: D, where it is known.

    Raises:
        DataError: data that are misshapen, not finite or too few.
    """
    like = torch.empty((), dtype=torch.float64, device=getattr(data, "device", None))
    data = real("data", data, like, 2)
    if len(data) < fewest:
        raise DataError(f"{fewest} components need as many examples, got {len(data)}")
    if columns is not None and data.shape[1] != columns:
        raise DataError(f"data must be [N, {columns}], as fitted, got {tuple(data.shape)}")
    return data.detach()


def first_responsibilities(
    data: Tensor, n_components: int, start: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    """Where to begin: r ``[N, K]`` as given, or each example to the nearest of K seeds.

    The seeds are examples: the first uniformly, each further one with a probability in
    proportion to its squared distance from those before it (Arthur & Vassilvitskii, 2007).

    Raises:
        InputError: responsibilities of another shape, negative, not summing to 1, or the same for
            two components.
    """
    if start is None:
        return _seeded(data, n_components, generator)
    shape = (len(data), n_components)
    if not isinstance(start, Tensor) or start.shape != shape:
        raise InputError(f"start must be responsibilities {[*shape]}")
    start = start.to(data)
    if not bool((start >= 0).all()) or not torch.allclose(start.sum(1), start.new_tensor(1.0)):
        raise InputError("each example's responsibilities must be 0 or more and sum to 1")
    if len(torch.unique(start.mT, dim=0)) < n_components:  # they would stay together for ever
        raise InputError("two components of start are the same: move one a little")
    return start.detach()


def _seeded(data: Tensor, n_components: int, generator: torch.Generator | None) -> Tensor:
    device = device_of(data, generator)
    spread = data.std(0)
    scaled = ((data - data.mean(0)) / torch.where(spread > 0, spread, 1.0)).to(device)
    chosen = torch.randint(len(data), (1,), generator=generator, device=device)
    gaps = torch.cdist(scaled, scaled[chosen])
    for _ in range(n_components - 1):
        weights = gaps.amin(1).square() + 1e-300  # all alike: any of them
        chosen = torch.multinomial(weights, 1, generator=generator)
        gaps = torch.cat([gaps, torch.cdist(scaled, scaled[chosen])], 1)
    return one_hot(gaps.argmin(1), n_components).to(data)


class FittedEM(Fitted[Any]):
    """Parameters that an M-step finds from the sum of the sites, expected statistics."""

    @cached_property
    def totals(self) -> Natural:
        """Σ_i of the sites."""
        return self._told(torch.arange(self.n_data))

    def _less(self, sites: Sites) -> Any:
        try:
            return self.model.maximise(subtract(self.totals, sites))  # type: ignore[arg-type]
        except DataError as error:
            raise DataError(f"a component rests on these examples alone: {error}") from error


@dataclass(frozen=True)
class GaussianMixtureEM(Model):
    """A mixture of Gaussians whose parameters EM finds.

    Attributes:
        n_components: K, two or more.
        covariance: ``"full"``, ``"diag"`` or ``"spherical"``.
        floor: above 0, added to every variance in each M-step, in squared units of the data. A
            component whose variance is little more has collapsed: take fewer, or scale the data.

    Raises:
        InputError: another covariance, fewer than two components, or no positive floor.

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
        """Alternate E- and M-steps until the log-likelihood rests.

        With full covariances it holds the second moments of all examples, N·D² numbers, counted
        from 0: centre data whose mean is many standard deviations away from it.

        Args:
            data: ``[N, D]``.
            start: responsibilities ``[N, K]``, or a mixture, or None to start from K examples
                that lie apart (k-means++).
            rho: ρ in (0, 1], or t → ρ_t from t = 1. Below 1 over all examples is generalised EM,
                which goes less far and also raises the likelihood.
            batch: B examples at each step, drawn with ``generator``, online EM: ``max_iter``
                steps, with ρ_t = t^(−0.6) for example; None: all of them.
            generator: for the start, and minibatches.
            stopping: ``max_iter``, ``tol`` (of the log-likelihood per example) and ``progress``
                (whether to show a bar; None: on a terminal after a second).

        Returns:
            The mixture (its ``q`` is the model at the point where the delta method looks) and
            log p(y|θ) at each E-step, before the M-step that follows; of minibatches N/B times
            theirs, and ``converged`` is False.

        Raises:
            DataError: data that are not finite, misshapen, or fewer than K; a component onto
                which no example, or only one point, falls.
            InputError: a start that does not fit, or whose components are not apart; settings
                out of range.
        """
        data = check_data(data, self.n_components)
        statistics = self._statistics(data)
        n = len(data)
        q = self._first(data, statistics, start, generator)
        totals = scale({"count": q.weights, **q.expectation}, n)  # of n examples of the mixture

        def step(t: int) -> float:
            nonlocal q, totals
            chosen = minibatch(n, batch, generator)
            factor = n / len(chosen)
            size = share("rho", rho(t + 1) if callable(rho) else rho)
            part = rows(statistics, chosen)
            scores = paired(part, q.components.natural) - q.components.log_partition()
            joint = q.weights.log() + scores
            told = _told(joint.softmax(1), part)
            totals = add(scale(totals, 1 - size), scale(told, size * factor))
            q = self.maximise(totals)
            return factor * float(joint.logsumexp(1).sum())

        run = until_flat(step, "log-likelihood", n, noisy=batch is not None, **stopping)
        return FittedMixture(q=q, **run, model=self, data=data)

    def check(self, data: Any) -> Tensor:
        return check_data(data)

    def sites(self, q: GaussianMixture, data: Tensor) -> Natural:
        weights = q.marginal.responsibilities(data)
        told = {"count": torch.ones_like(data[:, 0]), **self._statistics(data)}
        return {k: torch.einsum("nk,n...->nk...", weights, v) for k, v in told.items()}

    def step(self, q: GaussianMixture, data: Tensor) -> GaussianMixture:
        """E- and M-step."""
        return self.maximise(_told(q.marginal.responsibilities(data), self._statistics(data)))

    def log_predictive(self, q: GaussianMixture, data: Tensor) -> Tensor:
        """log Σ_k π_k N(y_j | m_k, S_k⁻¹)."""
        return q.marginal.log_prob(data)

    def maximise(self, totals: Natural) -> GaussianMixture:
        """The M-step, from Σ_i (r_ik, r_ik T(y_i)); leading dimensions are copies.

        Raises:
            DataError: a component that no example falls onto.
        """
        counts = totals["count"]
        if not bool((counts > 0).all()):
            raise DataError("a component has no examples left: start elsewhere, or with fewer")
        mean = totals["linear"] / counts.unsqueeze(-1)
        if self.covariance == "full":
            second = totals["square"] / counts[..., None, None]
            spread = second - mean.unsqueeze(-1) * mean.unsqueeze(-2)
            spread = spread + self.floor * torch.eye(mean.shape[-1]).to(mean)
            parts = FullGaussian(mean, torch.linalg.inv(0.5 * (spread + spread.mT)))
        else:
            variance = totals["square"] / counts.unsqueeze(-1) - mean.square()
            if self.covariance == "spherical":
                variance = variance.mean(-1, keepdim=True).expand_as(mean)
            parts = DiagonalGaussian(mean, 1 / (variance.clamp(min=0) + self.floor))
        return GaussianMixture(counts / counts.sum(-1, keepdim=True), parts)

    def _statistics(self, y: Tensor) -> Natural:
        """T(y_i) of the components' family."""
        full = self.covariance == "full"
        return {"linear": y, "square": y.unsqueeze(-1) * y.unsqueeze(-2) if full else y.square()}

    def _first(
        self, data: Tensor, statistics: Natural, start: Any, generator: torch.Generator | None
    ) -> GaussianMixture:
        if isinstance(start, GaussianMixture):
            return start
        weights = first_responsibilities(data, self.n_components, start, generator)
        return self.maximise(_told(weights, statistics))


class FittedMixture(FittedEM):
    """A mixture found by EM; its sites are expected statistics (r_ik, r_ik T(y_i)).

    Taking examples out is an M-step without them, their neighbours' responsibilities held; a
    component that rests on them alone is a :class:`DataError`.

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
            DataError: data that are misshapen or not finite.
        """
        data = check_data(data, 1, self.q.components.mean.shape[-1])
        return self.q.marginal.responsibilities(data)


def _told(weights: Tensor, statistics: Natural) -> Natural:
    """Σ_i (r_ik, r_ik T(y_i))."""
    return {"count": weights.sum(0), **pooled(weights, statistics)}


@dataclass(frozen=True, eq=False)
class Factors:
    """y = m + W z + e; a Gaussian whose covariance is W Wᵀ + Ψ. Leading dimensions are copies.

    Attributes:
        loadings: W ``[D, factors]``, up to a rotation.
        mean: m ``[D]``.
        noise: the diagonal of Ψ ``[D]``.
    """

    loadings: Tensor
    mean: Tensor
    noise: Tensor

    @property
    def marginal(self) -> FullGaussian:
        """N(m, W Wᵀ + Ψ)."""
        covariance = self.loadings @ self.loadings.mT + torch.diag_embed(self.noise)
        return FullGaussian(self.mean, torch.linalg.inv(covariance))

    def hidden(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """E[z_i] of every example, and the covariance of z, which is that of all."""
        weighted = self.loadings / self.noise.unsqueeze(-1)
        inverse = torch.eye(weighted.shape[1]).to(y) + self.loadings.mT @ weighted
        covariance = torch.linalg.inv(inverse)
        return (y - self.mean) @ weighted @ covariance, covariance


@dataclass(frozen=True)
class FactorAnalysis(Model):
    """Maximum likelihood of a Gaussian whose covariance is W Wᵀ + Ψ.

    Attributes:
        n_factors: columns of W.
        noise: ``"diagonal"``, Ψ of factor analysis, or ``"spherical"``, σ² I of probabilistic PCA.

    Raises:
        InputError: no positive number of factors, or another noise.

    Example:
        >>> x = torch.tensor([[-2.0, -2.1], [-1.0, -0.8], [1.0, 1.2], [2.0, 1.7]])
        >>> fitted = FactorAnalysis(1, noise="spherical").fit(x, progress=False)
        >>> fitted.loadings.abs().round(decimals=2)
        tensor([[1.5700],
                [1.5200]], dtype=torch.float64)
    """

    n_factors: int
    noise: str = "diagonal"

    def __post_init__(self) -> None:
        positive_int("n_factors", self.n_factors)
        one_of("noise", self.noise, ("diagonal", "spherical"))

    def fit(self, data: Tensor, **stopping: Any) -> FittedFactors:
        """EM from the leading principal directions.

        Args:
            data: ``[N, D]``, D above the number of factors.
            stopping: as of :meth:`GaussianMixtureEM.fit`.

        Returns:
            W, m and Ψ (``q``), and log p(y) at each E-step.

        Raises:
            DataError: data that are misshapen or not finite, too few columns or examples, or
                a column that the factors explain wholly (no noise is left).
        """
        data = check_data(data, 2)
        if data.shape[1] <= self.n_factors:
            raise DataError(f"{self.n_factors} factors need more columns, got {data.shape[1]}")
        variance = data.var(0, correction=0)
        mean = data.mean(0)
        values, vectors = torch.linalg.eigh(torch.cov(data.mT, correction=0))
        w = vectors[:, -self.n_factors :] * (values[-self.n_factors :] / 2).clamp(min=0).sqrt()
        q = Factors(w, mean, (variance - w.square().sum(1)).clamp(min=1e-3))

        def step(t: int) -> float:
            nonlocal q
            value = float(q.marginal.log_prob(data).sum())
            q = self.step(q, data)
            if bool((q.noise <= 1e-10 * variance).any()):  # but rounding
                raise DataError("the factors explain a column wholly: leave it out")
            return value

        run = until_flat(step, "log-likelihood", len(data), **stopping)
        return FittedFactors(q=q, **run, model=self, data=data)

    def check(self, data: Any) -> Tensor:
        return check_data(data)

    def sites(self, q: Factors, data: Tensor) -> Natural:
        return _statistics(q, data, "ni,nj->nij")

    def step(self, q: Factors, data: Tensor) -> Factors:
        """E- and M-step."""
        return self.maximise(_statistics(q, data, "ni,nj->ij"))

    def log_predictive(self, q: Factors, data: Tensor) -> Tensor:
        """log N(y | m, W Wᵀ + Ψ)."""
        return q.marginal.log_prob(data)

    def maximise(self, totals: Natural) -> Factors:
        """The M-step: W, m, Ψ from summed statistics; leading dimensions are copies."""
        zz = totals["zz"]
        yz = totals["yz"]
        joint = torch.linalg.solve(zz, yz.mT).mT
        noise = (totals["yy"] - (joint * yz).sum(-1)) / zz[..., -1, -1:]
        if self.noise == "spherical":
            noise = noise.mean(-1, keepdim=True).expand_as(noise)
        return Factors(joint[..., :-1], joint[..., -1], noise)


class FittedFactors(FittedEM):
    """A factor model; it answers as :class:`Factors` do."""

    def factors(self, data: Tensor) -> Tensor:
        """E[z | y] of M examples, ``[M, factors]``.

        Raises:
            DataError: data that are misshapen or not finite.
        """
        return self.q.hidden(check_data(data, 1, len(self.q.mean)))[0]


def _statistics(q: Factors, y: Tensor, pattern: str) -> Natural:
    """(y z̃ᵀ, z̃ z̃ᵀ, y∘y), expected: of every example, or by the pattern their sums."""
    z, covariance = q.hidden(y)
    joined = torch.cat([z, torch.ones_like(z[:, :1])], 1)
    each = pattern.endswith("nij")
    square = torch.nn.functional.pad(covariance, (0, 1, 0, 1)) * (1 if each else len(y))
    return {
        "yz": torch.einsum(pattern, y, joined),
        "zz": torch.einsum(pattern, joined, joined) + square,
        "yy": y.square() if each else y.square().sum(0),
    }
