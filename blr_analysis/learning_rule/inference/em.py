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

What an example tells θ are its expected statistics (y z̃ᵀ, z̃ z̃ᵀ, y∘y).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import at_least, one_of, positive_int, share, tolerance
from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.base import Natural, add, scale, subtract
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian, FullGaussian
from blr_analysis.learning_rule.families.mixture import GaussianMixture
from blr_analysis.learning_rule.inference.fitted import CHUNK, Fitted, Sites, minibatch, until_flat
from blr_analysis.learning_rule.inference.mixture_model import (
    assign,
    check_apart,
    check_data,
    first_responsibilities,
    paired,
    pooled,
    shared,
)

Components = FullGaussian | DiagonalGaussian
COLLAPSED = "a component has collapsed: raise floor, or take fewer components or covariance='diag'"


class Collapsed(UserWarning):
    """A component of a mixture whose density is that of the floor, not of the data."""


@dataclass(frozen=True)
class GaussianMixtureEM:
    """A mixture of Gaussians whose parameters EM finds.

    Attributes:
        n_components: K, two or more.
        covariance: ``"full"``, ``"diag"`` or ``"spherical"``.
        floor: added to every variance in each M-step, in squared units of the data. With 0 every
            iteration raises the likelihood, without bound where a component collapses onto a
            point (an error); above 0 it may fall in the last digits, and a component whose
            variance is little more than the floor is told of by a warning, :class:`Collapsed`.

    Raises:
        InputError: another covariance, fewer than two components, or a negative floor.

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
        if tolerance("floor", self.floor) == math.inf:
            raise InputError("floor must be finite")

    def fit(
        self,
        data: Tensor,
        *,
        start: Tensor | GaussianMixture | None = None,
        rho: float | Callable[[int], float] = 1.0,
        batch: int | None = None,
        max_iter: int = 500,
        tol: float = 1e-6,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> FittedMixture:
        """Alternate E- and M-steps until the log-likelihood rests; in double precision.

        With full covariances it holds the second moments of all examples, N·D² numbers.

        Args:
            data: ``[N, D]``.
            start: responsibilities ``[N, K]``, or a mixture, or None to start from K examples
                that lie apart (k-means++).
            rho: ρ in (0, 1], or t → ρ_t from t = 1. Below 1 over all examples is generalised EM,
                which goes less far and also raises the likelihood.
            batch: B examples at each step, drawn with ``generator``, online EM: ``max_iter``
                steps, with ρ_t = t^(−0.6) for example; None: all of them.
            max_iter: the most iterations; a warning, :class:`NotConverged`, says if they are
                too few.
            tol: stop when the log-likelihood per example changes by no more than this.
            generator: for the start.
            progress: whether to show a bar; None shows it on a terminal after a second.

        Returns:
            The mixture (its ``q`` is the model at the point where the delta method looks) and
            log p(y|θ) at each E-step, before the M-step that follows; of minibatches N/B times
            theirs, and ``converged`` is False. Sites are then those of a last E-step of all.

        Raises:
            DataError: data that are not finite, misshapen, or fewer than K; a component onto
                which no example, or only one point, falls.
            InputError: a start that does not fit, or whose components are not apart; settings
                out of range.
        """
        data = check_data(data, self.n_components)
        origin = data.mean(0)
        statistics = self._unit(data).statistics(data - origin)
        mixture = self._first(data, statistics, start, generator)
        n, totals, weights = len(data), _totals(mixture, len(data)), torch.empty(0)

        def expected(chosen: Tensor) -> tuple[Tensor, Natural, Tensor]:
            """r ``[B, K]``, N/B times its sites' sum, and log p(y | θ) ``[B]``."""
            part = {k: v[chosen] for k, v in statistics.items()}
            natural, at_zero = mixture.components.natural, mixture.components.log_partition()
            scores = paired(part, natural) - at_zero
            log_weights = mixture.weights.log()
            weights = assign(log_weights, scores).probs
            told = scale(_site(weights, part, pooled), n / len(chosen))
            return weights, told, torch.logsumexp(scores + log_weights, 1)

        def step(t: int) -> float:
            nonlocal mixture, totals, weights
            chosen = minibatch(n, batch, generator).to(data.device)
            weights, told, log_p = expected(chosen)
            size = share("rho", rho(t + 1) if callable(rho) else rho)
            totals = told if size == 1 else add(scale(totals, 1 - size), scale(told, size))
            mixture = self.maximise(totals)
            return n / len(chosen) * float(log_p.sum())

        noisy, named = batch is not None, "log-likelihood"
        run = until_flat(step, named, n, max_iter=max_iter, tol=tol, noisy=noisy, progress=progress)
        if noisy:
            weights, _, _ = expected(torch.arange(n, device=data.device))

        def site_of(chosen: Tensor) -> Natural:
            at = chosen.to(data.device)
            return _site(weights[at], {k: v[at] for k, v in statistics.items()}, shared)

        totals = _site(weights, statistics, pooled)
        _warn_of_collapse(mixture, totals["count"], self.floor)
        return FittedMixture(
            q=_shifted(mixture, origin),
            **run,
            n_data=len(data),
            site_of=site_of,
            predictive=log_density,
            data=data,
            step=partial(self._step, origin),
            model=self,
            origin=origin,
            totals=totals,
        )

    def _step(
        self, origin: Tensor, q: GaussianMixture, data: Tensor, kept: Tensor
    ) -> GaussianMixture:
        """E- and M-step."""
        y = data[kept.to(data.device)]
        statistics = self._unit(y).statistics(y - origin)
        told = _site(q.marginal.responsibilities(y), statistics, pooled)
        return _shifted(self.maximise(told), origin)

    def maximise(self, totals: Natural) -> GaussianMixture:
        """The M-step, from Σ_i (r_ik, r_ik T(y_i)); leading dimensions are copies.

        Raises:
            DataError: a component that no example, or only one point, falls onto.
        """
        counts = totals["count"]
        if not bool((counts > 0).all()):
            raise DataError("a component has no examples left: start elsewhere, or with fewer")
        average = {
            k: v / counts.reshape(*counts.shape, *[1] * (v.ndim - counts.ndim))
            for k, v in totals.items()
            if k != "count"
        }
        mean, square = average["linear"], average["square"]
        self._check_spread(mean, square)
        if self.covariance == "full":
            square = square + self.floor * torch.eye(mean.shape[-1]).to(mean)
        elif self.covariance == "diag":
            square = square + self.floor
        else:
            pooled_variance = (square - mean.square()).mean(-1, keepdim=True)
            square = mean.square() + pooled_variance + self.floor
        try:
            components = self._unit(mean).with_expectation({"linear": mean, "square": square})
        except InputError as error:
            raise DataError(COLLAPSED) from error
        return GaussianMixture(counts / counts.sum(-1, keepdim=True), components)

    def _check_spread(self, mean: Tensor, square: Tensor) -> None:
        """Without a floor, a variance of rounding errors must not pass for one."""
        second = square.diagonal(dim1=-2, dim2=-1) if self.covariance == "full" else square
        rounding = 16 * torch.finfo(mean.dtype).eps * second
        if not self.floor and bool((second - mean.square() <= rounding).any()):
            raise DataError(COLLAPSED)

    def _unit(self, like: Tensor) -> Components:
        ones = torch.ones(like.shape[-1]).to(like)
        if self.covariance == "full":
            return FullGaussian(0 * ones, torch.diag(ones))
        return DiagonalGaussian(0 * ones, ones)

    def _first(
        self, data: Tensor, statistics: Natural, start: Any, generator: torch.Generator | None
    ) -> GaussianMixture:
        if not isinstance(start, GaussianMixture):
            weights = first_responsibilities(data, self.n_components, start, generator)
            return self.maximise(_site(weights, statistics, pooled))
        kind, shape = type(self._unit(data)), (self.n_components, data.shape[1])
        if type(start.components) is not kind or start.components.mean.shape != shape:
            raise InputError(
                f"start must be a mixture of {kind.__name__} with means {list(shape)}, got "
                f"{type(start.components).__name__} with {list(start.components.mean.shape)}"
            )
        mean, precision = start.components.mean.to(data), start.components.precision.to(data)
        check_apart(torch.cat([mean, precision.flatten(1)], 1))
        return GaussianMixture(start.weights.to(data), kind(mean - data.mean(0), precision))


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FittedMixture(Fitted[GaussianMixture]):
    """A mixture found by EM; its sites are expected statistics, counted from ``origin``.

    Taking examples out is an M-step without them, their neighbours' responsibilities held; a
    component that rests on them alone is a :class:`DataError`.

    Attributes:
        model: the model that was fitted.
        origin: the mean of the data ``[D]``, from which statistics are counted.
        totals: Σ_i (r_ik, r_ik T(y_i)), what the last M-step was told.

    Example:
        >>> data = torch.tensor([[-5.0], [-4.0], [-3.0], [2.0], [4.0]])
        >>> fitted = GaussianMixtureEM(2).fit(data, generator=torch.Generator().manual_seed(0))
        >>> fitted.without([2]).components.mean.flatten().sort().values
        tensor([-4.5000,  3.0000], dtype=torch.float64)
        >>> fitted.log_predictive(torch.tensor([[3.0]]))
        tensor([-1.8352], dtype=torch.float64)
    """

    model: GaussianMixtureEM
    origin: Tensor
    totals: Natural

    def responsibilities(self, data: Tensor) -> Tensor:
        """r_k(y_j) = p(z = k | y_j) of M examples, ``[M, K]``.

        Raises:
            DataError: data that are misshapen or not finite.
        """
        parts = check_data(data, 1, self.q.components.mean.shape[-1]).split(CHUNK)
        return torch.cat([self.q.marginal.responsibilities(part) for part in parts])

    def _less(self, sites: Sites) -> GaussianMixture:
        left = subtract(self.totals, sites)  # type: ignore[arg-type]
        try:
            return _shifted(self.model.maximise(left), self.origin)
        except DataError as error:
            raise DataError(f"a component rests on these examples alone: {error}") from error


def log_density(q: GaussianMixture, data: Tensor) -> Tensor:
    """log Σ_k π_k N(y_j | m_k, S_k⁻¹) of M examples, ``[M]``; M copies go with one each.

    Raises:
        DataError: data that are misshapen or not finite.
    """
    data = check_data(data, 1, q.components.mean.shape[-1])
    if q.weights.ndim > 1:
        return q.marginal.log_prob(data)
    return torch.cat([q.marginal.log_prob(part) for part in data.split(CHUNK)])


def _warn_of_collapse(mixture: GaussianMixture, counts: Tensor, floor: float) -> None:
    """Warn of components whose smallest variance is hardly more than the floor."""
    precision = mixture.components.precision
    full = isinstance(mixture.components, FullGaussian)
    largest = torch.linalg.eigvalsh(precision)[:, -1] if full else precision.amax(1)
    flat = ((1 / largest <= 2 * floor) & (floor > 0)).nonzero().flatten().tolist()
    if flat:
        held = ", ".join(f"component {k} with {float(counts[k]):.3g} examples" for k in flat)
        warnings.warn(
            f"{held}: no variance but floor={floor:g} is left in some direction; take fewer "
            "components, scale the data, leave out columns that do not vary, or set floor",
            Collapsed,
            stacklevel=3,
        )


def _site(weights: Tensor, statistics: Natural, combine: Any) -> Natural:
    ones = {"count": torch.ones_like(weights[:, 0])}
    return combine(weights, {**ones, **statistics})


def _totals(mixture: GaussianMixture, n: int) -> Natural:
    """What n examples of the mixture itself would tell: n (π_k, π_k E_k[T])."""
    counts = n * mixture.weights
    expected = mixture.components.expectation.items()
    return {
        "count": counts,
        **{k: counts.reshape(-1, *[1] * (v.ndim - 1)) * v for k, v in expected},
    }


def _shifted(mixture: GaussianMixture, origin: Tensor) -> GaussianMixture:
    components = mixture.components
    moved = type(components)(components.mean + origin, components.precision)
    return GaussianMixture(mixture.weights, moved)


Theta = tuple[Tensor, Tensor, Tensor]
"""W, m counted from the data's mean, and the diagonal of Ψ."""
ROUNDING = 1e-10  # of a column's variance: less noise than that is none


@dataclass(frozen=True)
class FactorAnalysis:
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

    def fit(
        self,
        data: Tensor,
        *,
        max_iter: int = 2000,
        tol: float = 1e-9,
        progress: bool | None = None,
    ) -> FittedFactors:
        """EM from the leading principal directions; in double precision.

        Args:
            data: ``[N, D]``, D above the number of factors.
            max_iter: iterations at most.
            tol: stop when the log-likelihood per example changes by no more than this.
            progress: whether to show a bar.

        Returns:
            The Gaussian of y (``q``), W, Ψ, and log p(y) at each E-step.

        Raises:
            DataError: data that are misshapen or not finite, too few columns or examples, or
                a column that the factors explain wholly (no noise is left).
        """
        data = check_data(data, 2)
        if data.shape[1] <= self.n_factors:
            raise DataError(f"{self.n_factors} factors need more columns, got {data.shape[1]}")
        origin = data.mean(0)
        y = data - origin
        variance = y.square().mean(0)
        values, vectors = torch.linalg.eigh(y.mT @ y / len(y))
        w = vectors[:, -self.n_factors :] * (values[-self.n_factors :] / 2).clamp(min=0).sqrt()
        theta = (w, torch.zeros_like(origin), (variance - w.square().sum(1)).clamp(min=1e-3))

        def step(t: int) -> float:
            nonlocal theta
            value = float(_density(theta).log_prob(y).sum())
            theta = self.maximise(_total(theta, y), variance)
            return value

        run = until_flat(
            step, "log-likelihood", len(y), max_iter=max_iter, tol=tol, progress=progress
        )

        def site_of(chosen: Tensor) -> Sites:
            return _statistics(theta, y[chosen.to(y.device)])

        w, mean, psi = theta
        return FittedFactors(
            q=_density((w, mean + origin, psi)),
            **run,
            n_data=len(y),
            site_of=site_of,
            predictive=lambda q, new: q.log_prob(check_data(new, 1, len(origin))),
            data=data,
            model=self,
            loadings=w,
            noise=psi,
            origin=origin,
            totals=_total(theta, y),
        )

    def maximise(self, totals: Natural, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The M-step: W, m, Ψ from summed statistics; leading dimensions are copies.

        Raises:
            DataError: a column without noise, beside its ``variance``.
        """
        zz, yz = totals["zz"], totals["yz"]
        joint = torch.linalg.solve(zz, yz.mT).mT
        psi = (totals["yy"] - (joint * yz).sum(-1)) / zz[..., -1, -1:]
        if self.noise == "spherical":
            psi = psi.mean(-1, keepdim=True).expand_as(psi)
        if bool((psi <= ROUNDING * variance).any()):
            raise DataError("the factors explain a column wholly: leave it out")
        return joint[..., :-1], joint[..., -1], psi


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FittedFactors(Fitted[FullGaussian]):
    """A factor model; ``q`` is the Gaussian of y. Taking examples out is an M-step without them.

    Attributes:
        model: what was fitted.
        loadings: W ``[D, factors]``, up to a rotation.
        noise: the diagonal of Ψ ``[D]``.
        origin: from where statistics are counted ``[D]``.
        totals: Σ_i of the sites.
    """

    model: FactorAnalysis
    loadings: Tensor
    noise: Tensor
    origin: Tensor
    totals: Natural

    def factors(self, data: Tensor) -> Tensor:
        """E[z | y] of M examples, ``[M, factors]``.

        Raises:
            DataError: data that are misshapen or not finite.
        """
        y = check_data(data, 1, len(self.origin))
        return _posterior((self.loadings, self.q.mean, self.noise), y)[0]

    def refitted(
        self, remove: Any = (), *, add: Any = None, steps: int = 1
    ) -> Iterator[FullGaussian]:
        """An M-step without what is taken out, then steps of EM; see :meth:`Fitted.refitted`."""
        chosen = self._chosen(remove)
        data, kept = self._changed(remove, add)
        y = check_data(data, 1, len(self.origin))[kept.to(data.device)] - self.origin
        theta = (self.loadings, self.q.mean - self.origin, self.noise)
        if len(chosen):
            theta = self._without(self._told(chosen))
        yield self._shown(theta)
        for _ in range(steps):
            theta = self.model.maximise(_total(theta, y), self.noise)
            yield self._shown(theta)

    def _without(self, sites: Sites) -> Theta:
        return self.model.maximise(subtract(self.totals, sites), self.noise)  # type: ignore[arg-type]

    def _shown(self, theta: Theta) -> FullGaussian:
        w, mean, psi = theta
        return _density((w, mean + self.origin, psi))

    def _less(self, sites: Sites) -> FullGaussian:
        return self._shown(self._without(sites))


def _posterior(theta: Theta, y: Tensor) -> tuple[Tensor, Tensor]:
    """Means ``[M, K]`` and the covariance ``[K, K]`` of q(z_i)."""
    w, mean, psi = theta
    weighted = w / psi.unsqueeze(-1)
    inverse = torch.eye(w.shape[1]).to(w) + w.mT @ weighted
    covariance = torch.linalg.inv(inverse)
    return (y - mean) @ weighted @ covariance, covariance


def _hidden(theta: Theta, y: Tensor) -> tuple[Tensor, Tensor]:
    """E[z̃] of every example, and the covariance of z̃, which is that of all."""
    z, covariance = _posterior(theta, y)
    joined = torch.cat([z, torch.ones_like(z[:, :1])], 1)
    return joined, torch.nn.functional.pad(covariance, (0, 1, 0, 1))


def _statistics(theta: Theta, y: Tensor) -> Natural:
    """(y z̃ᵀ, z̃ z̃ᵀ, y∘y) of every example, expected."""
    joined, square = _hidden(theta, y)
    return {
        "yz": y.unsqueeze(2) * joined.unsqueeze(1),
        "zz": joined.unsqueeze(2) * joined.unsqueeze(1) + square,
        "yy": y.square(),
    }


def _total(theta: Theta, y: Tensor) -> Natural:
    """Their sums."""
    joined, square = _hidden(theta, y)
    return {
        "yz": y.mT @ joined,
        "zz": joined.mT @ joined + len(y) * square,
        "yy": y.square().sum(0),
    }


def _density(theta: Theta) -> FullGaussian:
    """N(m, W Wᵀ + Ψ)."""
    w, mean, psi = theta
    try:
        return FullGaussian(mean, torch.linalg.inv(w @ w.mT + torch.diag_embed(psi)))
    except (InputError, RuntimeError) as error:
        raise DataError(f"the covariance is singular: scale the data ({error})") from error
