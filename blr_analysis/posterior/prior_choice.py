"""δ found in the trained weights and the data, where nobody knows it.

Of the objective F(θ) = L(θ) + (δ/2)‖θ − θ₀‖², L = Σ_i ℓ_i, with d = θ̂ − θ₀, g = ∇L(θ̂) and the
curvature H = Σ_i J_iᵀ Λ_i J_i ≈ U diag(λ) Uᵀ:

    stationarity   dᵀ (H + δ)⁻¹ (g + δ d) = 0      F's Newton step from θ̂ leaves d's length alone
    evidence       δ ‖d‖² = Σ_k λ_k / (λ_k + δ)    MacKay's fixed point

The first is exact where θ̂ is the minimum of F, g = −δ d, whatever the curvature. Elsewhere
(minibatches, early stopping) (H + δ)⁻¹ takes the gradient that is left in stiff directions, which
is noise, for what it is worth: the plain projection −⟨g, d⟩/‖d‖², its limit of large δ, may be
negative. Where no δ solves it, as after training without any penalty, or one a hundred times below
the evidence's that explains little of the gradient, as before training, the evidence decides.

Sources: MacKay, "A practical Bayesian framework for backpropagation networks", 1992 (evidence).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import PosteriorError
from blr_analysis.posterior.prior import Prior
from blr_analysis.posterior.structures.contract import Spectral, Tree

UNSURE = "by the weights and the curvature alone; fit_laplace(task) asks the data's gradient too"
LEAST = 1e-7  # of the largest curvature: a smaller prior is lost in rounding
HALVINGS = 60
BINS, OCTAVES = 2**16, 60  # of the curvature, below the largest
TINY = 1e-300
EXPLAINED = 0.5  # of the gradient by the prior's pull: less is far off a minimum
FAR = 100  # times below the evidence's, so far off a minimum: a root that is chance
PIECE = 2**23  # numbers at a time


def chosen_prior(form: Spectral, gap: Tree, gradient: Tree | None) -> tuple[float, dict[str, Any]]:
    """δ for the data's curvature ``form`` (no prior in it), and what the record says of it.

    Args:
        gap: d = θ̂ − θ₀.
        gradient: g, of the data alone; None: unknown, so that the evidence decides.

    Returns:
        δ, and ``rule`` ("stationarity" or "evidence"), δ by each (``stationarity``, None where
        there is none, and ``evidence``), ``apart``, their ratio, and ``explained``, the share of
        gᵀ(H + δ)⁻¹g that the prior's pull cancels: 1 at a minimum.

    Raises:
        PosteriorError: θ̂ = θ₀, or data without curvature.

    Example:
        >>> from blr_analysis.posterior.structures import Diagonal
        >>> H, d = Diagonal({"w": torch.tensor([4.0, 1.0])}), {"w": torch.tensor([1.0, 2.0])}
        >>> delta, about = chosen_prior(H, d, {"w": -3.0 * d["w"]})
        >>> round(delta, 4), about["rule"]
        (3.0, 'stationarity')
    """
    curved, count, dd, dg, gg = _directions(form, gap, gradient)
    size, top = float(dd.sum()), float(curved.max())
    if not top > 0:
        raise PosteriorError("the curvature is 0 in every direction; give prior_precision")
    if not size > 0:
        raise PosteriorError("the weights are the initial ones; give prior_precision")

    def excess(delta: float) -> float:
        return delta * size - float((count * curved / (curved + delta)).sum())

    evidence = _crossing(excess, low=0.0, high=float(count.sum()) / size)
    if gradient is None:
        return evidence, {"rule": "evidence", "stationarity": None, "evidence": evidence}

    def left(delta: float) -> float:
        return float(((dg + delta * dd) / (curved + delta)).sum())

    high = max(top, evidence, abs(float(dg.sum())) / size)
    while left(high) <= 0:
        high *= 2
    low = high
    while left(low) > 0 and low > LEAST * top:
        low /= 2
    stationary = _crossing(left, low=low, high=2 * low) if left(low) <= 0 else None

    def explained(delta: float) -> float:
        slope, pull, across = (float((x / (curved + delta)).sum()) for x in (gg, dd, dg))
        return across**2 / (slope * pull) if across < 0 else 0.0

    rule, delta = "evidence", evidence
    if stationary is not None and (
        FAR * stationary > evidence or explained(stationary) > EXPLAINED
    ):
        rule, delta = "stationarity", stationary
    return delta, {
        "rule": rule,
        "stationarity": stationary,
        "evidence": evidence,
        "apart": None if stationary is None else max(stationary / evidence, evidence / stationary),
        "explained": explained(delta),
    }


def by_evidence(
    form: Spectral, mean: Mapping[str, Tensor], initial: Mapping[str, Tensor] | None
) -> tuple[float, dict[str, Any]]:
    """δ by the weights and the curvature alone, where no gradient of all the data is known, and
    what a record says of it."""
    delta, about = chosen_prior(form, Prior({}).around(initial, mean).gap(mean), None)
    return delta, {"prior_choice": {"delta": delta, **about, "unsure": UNSURE}}


def in_words(choice: Mapping[str, Any]) -> str:
    """δ (the largest, of several) and the rule that chose it."""
    delta = choice["delta"]
    return f"{max(delta.values()) if isinstance(delta, Mapping) else delta:.3g} by {choice['rule']}"


def _directions(form: Spectral, gap: Tree, gradient: Tree | None) -> Tensor:
    """λ of the directions, how many have it, and their sums of d², g d and g²: directions of nearly
    the same λ together, under its mean."""
    d = form.forward(gap)
    g = {k: torch.zeros(()) for k in d} if gradient is None else form.forward(gradient)
    top = max(float(s.max()) for s in form.values.values())
    sums = torch.zeros(5, BINS, dtype=torch.float64)
    for key, values in form.values.items():
        held = (t[key].expand_as(values).flatten().split(PIECE) for t in (form.values, d, g))
        for curved, x, y in zip(*held, strict=True):
            curved, x, y = curved.double().clamp_min(0), x.double(), y.double()
            octaves = (curved / max(top, TINY)).clamp_min(2.0**-OCTAVES).log2() / OCTAVES + 1
            place = (octaves * (BINS - 1)).round().long()
            for row, each in zip(
                sums, (curved, torch.ones_like(x), x * x, x * y, y * y), strict=True
            ):
                row += torch.bincount(place, each, BINS).cpu()
    sums = sums[:, sums[1] > 0]
    sums[0] /= sums[1]
    return sums


def _crossing(f: Callable[[float], float], low: float, high: float) -> float:
    """Where f rises through 0 between these."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < 0 else (low, middle)
    return high
