"""Expectation maximisation: q(z) q(θ) with the delta method on θ (Khan & Rue, section 5.2).

Coordinate-wise steps of the rule at ρ = 1 for the loss −log p(y, z | θ):

    E-step   λ_i = λ̃_1(y_i, θ) + λ_0(θ)                 a step for q(z_i), at the mean of q(θ)
    M-step   θ = ∇A*( E_q[T(y, z)] )                     where the step for q(θ) comes to rest

The M-step is the Legendre map of the component's family, `with_expectation`; what an example
tells it, its site, are its expected statistics (r_ik, r_ik T(y_i)). Steps of ρ < 1 for q(θ), over
all examples or B of them, are generalised and online EM:

    T̄ ← (1 − ρ) T̄ + ρ N/B Σ_i E_q[T(y_i, z_i)],     θ = ∇A*(T̄)
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
from blr_analysis.learning_rule.inference.fitted import CHUNK, Fitted, Sites, until_flat
from blr_analysis.learning_rule.inference.mixture_model import (
    assign,
    check_apart,
    check_data,
    first_responsibilities,
    paired,
    pooled,
    shared,
)
from blr_analysis.progress import track

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
        positive_int("max_iter", max_iter)
        tolerance("tol", tol)
        data = check_data(data, self.n_components)
        origin = data.mean(0)
        statistics = self._unit(data).statistics(data - origin)
        mixture = self._first(data, statistics, start, generator)
        n, everyone = len(data), torch.arange(len(data), device=data.device)
        if batch is not None and positive_int("batch", batch) > n:
            raise InputError(f"batch is {batch} of {n} examples")
        totals = _totals(mixture, n)

        def expected(chosen: Tensor) -> tuple[Tensor, Natural, Tensor]:
            """r ``[B, K]``, N/B times its sites' sum, and log p(y | θ) ``[B]``."""
            part = {k: v[chosen] for k, v in statistics.items()}
            natural, at_zero = mixture.components.natural, mixture.components.log_partition()
            scores = paired(part, natural) - at_zero
            log_weights = mixture.weights.log()
            weights = assign(log_weights, scores).probs
            told = scale(_site(weights, part, pooled), n / len(chosen))
            return weights, told, torch.logsumexp(scores + log_weights, 1)

        def steps() -> Iterator[float]:
            nonlocal mixture, totals, weights
            for t in track(range(max_iter), label="EM", show=progress):
                chosen = everyone
                if batch is not None:
                    chosen = torch.randperm(n, generator=generator)[:batch].to(data.device)
                weights, told, log_p = expected(chosen)
                size = share("rho", rho(t + 1) if callable(rho) else rho)
                totals = told if size == 1 else add(scale(totals, 1 - size), scale(told, size))
                mixture = self.maximise(totals)
                yield n / len(chosen) * float(log_p.sum())

        weights = torch.empty(0)
        if batch is None:
            history, converged = until_flat(steps(), tol=tol * n, what="the log-likelihood")
        else:
            history, converged = list(steps()), False
            weights, totals, _ = expected(everyone)

        def site_of(chosen: Tensor) -> Natural:
            at = chosen.to(data.device)
            return _site(weights[at], {k: v[at] for k, v in statistics.items()}, shared)

        totals = _site(weights, statistics, pooled)
        _warn_of_collapse(mixture, totals["count"], self.floor)
        return FittedMixture(
            q=_shifted(mixture, origin),
            history=history,
            objective="log-likelihood",
            n_data=len(data),
            site_of=site_of,
            predictive=log_density,
            data=data,
            converged=converged,
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
