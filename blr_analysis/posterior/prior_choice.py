"""Finds the prior's precision δ in the trained weights and the data, where nobody gave it.

The objective is F(θ) = L(θ) + (δ/2)‖θ − θ₀‖² with L = Σ_i ℓ_i. With d = θ̂ − θ₀, g = ∇L(θ̂) and the
curvature H = Σ_i J_iᵀ Λ_i J_i ≈ U diag(λ) Uᵀ there are two rules:

    stationarity   dᵀ (H + δ)⁻¹ (g + δ d) = 0      F's Newton step from θ̂ leaves d's length alone
    evidence       δ ‖d‖² = Σ_k λ_k / (λ_k + δ)    MacKay's fixed point

Stationarity is exact where θ̂ is the minimum of F, g = −δ d, whatever the curvature. Minibatches and
early stopping end elsewhere, with a gradient that is noise in stiff directions, and (H + δ)⁻¹ makes
little of those directions. The plain projection −⟨g, d⟩/‖d‖², its limit for large δ, would weigh
all directions alike, and may be negative.

The evidence decides in two cases: no δ is stationary, as after a training without any penalty; or
the stationary δ is a hundred times below the evidence's and explains little of the gradient, as
before any training.

Source: MacKay, "A practical Bayesian framework for backpropagation networks", 1992 (evidence).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import PosteriorError
from blr_analysis.posterior.prior import Prior
from blr_analysis.posterior.structures.contract import Spectral, Tree

UNSURE = "by the weights and the curvature alone; fit_laplace(task) asks the data's gradient too"
LEAST = 1e-7  # of the largest curvature: a smaller prior is lost in rounding
HALVINGS = 60  # of the interval that holds δ: more than float64 can tell apart
BINS = 2**16  # of the logarithm of the curvature
OCTAVES = 60  # below the largest curvature, which the bins cover
TINY = 1e-300  # in place of a largest curvature of 0
ENOUGH_EXPLAINED = 0.5  # of the gradient by the prior's pull: less is far off a minimum
FAR_BELOW = 100  # times below the evidence's: so far off a minimum a stationary δ is chance
NUMBERS_AT_ONCE = 2**23  # directions that are sorted into bins together


def chosen_prior(form: Spectral, gap: Tree, gradient: Tree | None) -> tuple[float, dict[str, Any]]:
    """δ, and what the posterior's record says of the choice.

    Args:
        form: H, the curvature of the data, without a prior in it.
        gap: d = θ̂ − θ₀.
        gradient: g, of the data alone; None where it is unknown, so that the evidence decides.

    Returns:
        δ, and a dict of ``rule`` ("stationarity" or "evidence"); the δ of each rule, by its name
        (None where no δ is stationary); ``apart``, the ratio of the two; and ``explained``, the
        share of gᵀ(H + δ)⁻¹g that the prior's pull cancels, which is 1 at a minimum.

    Raises:
        PosteriorError: θ̂ = θ₀, or H is 0.

    Example:
        >>> from blr_analysis.posterior.structures import Diagonal
        >>> H = Diagonal({"w": torch.tensor([4.0, 1.0])})
        >>> d = {"w": torch.tensor([1.0, 2.0])}
        >>> delta, choice = chosen_prior(H, d, {"w": -3.0 * d["w"]})
        >>> round(delta, 4), choice["rule"]
        (3.0, 'stationarity')
    """
    directions = _directions(form, gap, gradient)
    if not float(directions.curvature.max()) > 0:
        raise PosteriorError("the curvature is 0 in every direction; give prior_precision")
    if not float(directions.dd.sum()) > 0:
        raise PosteriorError("the weights are the initial ones; give prior_precision")
    evidence = _by_evidence(directions)
    if gradient is None:
        return evidence, {"rule": "evidence", "stationarity": None, "evidence": evidence}
    stationary = _by_stationarity(directions, evidence)
    record: dict[str, Any] = {
        "rule": "evidence",
        "stationarity": stationary,
        "evidence": evidence,
        "apart": None,
    }
    delta = evidence
    if stationary is not None:
        record["apart"] = max(stationary / evidence, evidence / stationary)
        is_far_below = FAR_BELOW * stationary <= evidence
        if not is_far_below or directions.explained(stationary) > ENOUGH_EXPLAINED:
            record["rule"] = "stationarity"
            delta = stationary
    record["explained"] = directions.explained(delta)
    return delta, record


@dataclass(frozen=True)
class Directions:
    """Groups of eigenvectors of H that have nearly the same λ; ``[K]`` each, in float64.

    d and g are taken along the eigenvectors, Uᵀ d and Uᵀ g.

    Attributes:
        curvature: the mean λ of each group.
        count: the number of eigenvectors in each group.
        dd, dg, gg: sums of d², d g and g² over each group.
    """

    curvature: Tensor
    count: Tensor
    dd: Tensor
    dg: Tensor
    gg: Tensor

    def explained(self, delta: float) -> float:
        """The share of gᵀ(H + δ)⁻¹g that the prior's pull cancels."""
        damped = self.curvature + delta
        d_and_g = float((self.dg / damped).sum())  # dᵀ(H + δ)⁻¹g
        if d_and_g >= 0:  # the gradient does not pull against the prior
            return 0.0
        length_of_g = float((self.gg / damped).sum())
        length_of_d = float((self.dd / damped).sum())
        return d_and_g**2 / (length_of_g * length_of_d)


def _by_evidence(directions: Directions) -> float:
    """The δ of MacKay's fixed point."""
    curvature = directions.curvature
    square_length = float(directions.dd.sum())  # ‖d‖²
    n_parameters = float(directions.count.sum())

    def excess(delta: float) -> float:
        effective_parameters = directions.count * curvature / (curvature + delta)
        return delta * square_length - float(effective_parameters.sum())

    return _crossing(excess, low=0.0, high=n_parameters / square_length)


def _by_stationarity(directions: Directions, evidence: float) -> float | None:
    """The largest δ with dᵀ (H + δ)⁻¹ (g + δ d) = 0; None where there is none."""
    curvature = directions.curvature
    largest_curvature = float(curvature.max())

    def pull(delta: float) -> float:
        return float(((directions.dg + delta * directions.dd) / (curvature + delta)).sum())

    projection = abs(float(directions.dg.sum())) / float(directions.dd.sum())
    high = max(largest_curvature, evidence, projection)
    while pull(high) <= 0:
        high *= 2
    low = high
    while pull(low) > 0 and low > LEAST * largest_curvature:
        low /= 2
    if pull(low) > 0:
        return None
    return _crossing(pull, low=low, high=2 * low)


def by_evidence(
    form: Spectral, mean: Mapping[str, Tensor], initial: Mapping[str, Tensor] | None
) -> tuple[float, dict[str, Any]]:
    """δ by the evidence alone, where the gradient of all the data is unknown, and its record.

    Args:
        form: H, the curvature of the data, without a prior in it.
        mean: θ̂ by parameter name.
        initial: θ₀; None: 0.
    """
    gap = Prior({}).around(initial, mean).gap(mean)
    delta, choice = chosen_prior(form, gap, None)
    return delta, {"prior_choice": {"delta": delta, **choice, "unsure": UNSURE}}


def in_words(choice: Mapping[str, Any]) -> str:
    """A choice of δ in words, such as "3.2 by evidence"; of several δ the largest."""
    delta = choice["delta"]
    largest = max(delta.values()) if isinstance(delta, Mapping) else delta
    return f"{largest:.3g} by {choice['rule']}"


def _directions(form: Spectral, gap: Tree, gradient: Tree | None) -> Directions:
    """The eigenvectors of H in groups of nearly the same λ, each a bin on a logarithmic scale.

    Args:
        gradient: None: 0.
    """
    d = form.forward(gap)
    if gradient is None:
        g = {key: values.new_zeros(()) for key, values in form.values.items()}
    else:
        g = form.forward(gradient)
    largest_curvature = max(float(values.max()) for values in form.values.values())
    sums = torch.zeros(5, BINS, dtype=torch.float64)
    for key, values in form.values.items():
        pieces = zip(
            _pieces(values, values), _pieces(d[key], values), _pieces(g[key], values), strict=True
        )
        for curvature_piece, d_piece, g_piece in pieces:
            curvature = curvature_piece.double().clamp_min(0)
            sums += _binned(curvature, d_piece.double(), g_piece.double(), largest_curvature)
    is_filled = sums[1] > 0
    curvature_sums, count, dd, dg, gg = sums[:, is_filled]
    return Directions(curvature_sums / count, count, dd, dg, gg)


def _pieces(x: Tensor, like: Tensor) -> tuple[Tensor, ...]:
    """The numbers of x, expanded to the shape of ``like``, in pieces of limited size."""
    return x.expand_as(like).flatten().split(NUMBERS_AT_ONCE)


def _binned(curvature: Tensor, d: Tensor, g: Tensor, largest_curvature: float) -> Tensor:
    """Sums of λ, 1, d², d g and g² over the directions of each bin, ``[5, BINS]``."""
    share = (curvature / max(largest_curvature, TINY)).clamp_min(2.0**-OCTAVES)
    height = share.log2() / OCTAVES + 1  # 0 for the smallest curvature, 1 for the largest
    bins = (height * (BINS - 1)).round().long()
    quantities = (curvature, torch.ones_like(d), d * d, d * g, g * g)
    return torch.stack([torch.bincount(bins, x, BINS).cpu() for x in quantities])


def _crossing(f: Callable[[float], float], low: float, high: float) -> float:
    """The point between ``low`` and ``high`` at which f rises through 0."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if f(middle) < 0:
            low = middle
        else:
            high = middle
    return high
