"""δ found in the trained weights and the data, where nobody knows it.

Of the objective F(θ) = L(θ) + (δ/2)‖θ − θ₀‖², L = Σ_i ℓ_i, with d = θ̂ − θ₀, g = ∇L(θ̂) and the
curvature H = Σ_i J_iᵀ Λ_i J_i ≈ U diag(λ) Uᵀ:

    stationarity   dᵀ (H + δ)⁻¹ (g + δ d) = 0      F's Newton step from θ̂ leaves d's length alone
    evidence       δ ‖d‖² = Σ_k λ_k / (λ_k + δ)    MacKay's fixed point

The first is exact where θ̂ is the minimum of F, g = −δ d, whatever the curvature. Elsewhere
(minibatches, early stopping) (H + δ)⁻¹ takes the gradient that is left in stiff directions, which
is noise, for what it is worth: the plain projection −⟨g, d⟩/‖d‖², its limit of large δ, may be
negative. Where no δ solves it, as after training without any penalty, the evidence decides.

Sources: MacKay, "A practical Bayesian framework for backpropagation networks", 1992 (evidence).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import PosteriorError
from blr_analysis.posterior.structures.contract import Spectral, Tree

LEAST = 1e-7  # of the largest curvature: a smaller prior is lost in rounding
HALVINGS = 60


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
    curved = _flat(form.values, form.values).clamp_min(0)
    d = _flat(form.forward(gap), form.values)
    size, top = float(d.square().sum()), float(curved.max())
    if not (size > 0 and top > 0):
        raise PosteriorError(
            "the weights are the initial ones, or the data have no curvature: prior_precision "
            "cannot be found there; give it"
        )

    def excess(delta: float) -> float:
        return delta * size - float((curved / (curved + delta)).sum())

    evidence = _crossing(excess, low=0.0, high=len(curved) / size)
    if gradient is None:
        return evidence, {"rule": "evidence", "stationarity": None, "evidence": evidence}
    g = _flat(form.forward(gradient), form.values)

    def left(delta: float) -> float:
        return float((d * (g + delta * d) / (curved + delta)).sum())

    high = max(top, evidence, abs(float(g @ d)) / size)
    while left(high) <= 0:
        high *= 2
    low = high
    while left(low) > 0 and low > LEAST * top:
        low /= 2
    stationary = _crossing(left, low=low, high=2 * low) if left(low) <= 0 else None
    delta = evidence if stationary is None else stationary
    slope, pull = (float((x.square() / (curved + delta)).sum()) for x in (g, d))
    across = float((g * d / (curved + delta)).sum())
    return delta, {
        "rule": "evidence" if stationary is None else "stationarity",
        "stationarity": stationary,
        "evidence": evidence,
        "apart": None if stationary is None else max(stationary / evidence, evidence / stationary),
        "explained": across**2 / (slope * pull) if across < 0 else 0.0,
    }


def _flat(tree: Tree, order: Tree) -> Tensor:
    return torch.cat([tree[k].double().flatten() for k in order])


def _crossing(f: Callable[[float], float], low: float, high: float) -> float:
    """Where f rises through 0 between these."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < 0 else (low, middle)
    return high
