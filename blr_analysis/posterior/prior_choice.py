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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import PosteriorError
from blr_analysis.posterior.prior import Prior
from blr_analysis.posterior.structures.contract import Spectral, Tree

UNSURE = "by the weights and the curvature alone; fit_laplace(task) asks the data's gradient too"
LEAST = 1e-7  # of the largest curvature: a smaller prior is lost in rounding
HALVINGS = 60
BINS = 2**16  # of the curvature's logarithm
OCTAVES = 60  # below the largest curvature, which the bins cover
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
        is_far_below = FAR * stationary <= evidence
        if not is_far_below or directions.explained(stationary) > EXPLAINED:
            record["rule"] = "stationarity"
            delta = stationary
    record["explained"] = directions.explained(delta)
    return delta, record


@dataclass(frozen=True)
class Directions:
    """Directions U of the curvature, those of nearly the same λ together, ``[K]`` each, in float64.

    Attributes:
        curvature: λ, the mean of those together.
        count: how many they are.
        dd, dg, gg: their sums of d², d g and g².
    """

    curvature: Tensor
    count: Tensor
    dd: Tensor
    dg: Tensor
    gg: Tensor

    def explained(self, delta: float) -> float:
        """The share of gᵀ(H + δ)⁻¹g that the prior's pull cancels."""
        damped = self.curvature + delta
        across = float((self.dg / damped).sum())
        if across >= 0:
            return 0.0
        return across**2 / (float((self.gg / damped).sum()) * float((self.dd / damped).sum()))


def _by_evidence(directions: Directions) -> float:
    """The δ of MacKay's fixed point."""
    curvature = directions.curvature
    size = float(directions.dd.sum())

    def excess(delta: float) -> float:
        effective_parameters = directions.count * curvature / (curvature + delta)
        return delta * size - float(effective_parameters.sum())

    return _crossing(excess, low=0.0, high=float(directions.count.sum()) / size)


def _by_stationarity(directions: Directions, evidence: float) -> float | None:
    """The largest δ with dᵀ (H + δ)⁻¹ (g + δ d) = 0; None where there is none."""
    curvature = directions.curvature
    top = float(curvature.max())

    def pull(delta: float) -> float:
        return float(((directions.dg + delta * directions.dd) / (curvature + delta)).sum())

    projection = abs(float(directions.dg.sum())) / float(directions.dd.sum())
    high = max(top, evidence, projection)
    while pull(high) <= 0:
        high *= 2
    low = high
    while pull(low) > 0 and low > LEAST * top:
        low /= 2
    return _crossing(pull, low=low, high=2 * low) if pull(low) <= 0 else None


def by_evidence(
    form: Spectral, mean: Mapping[str, Tensor], initial: Mapping[str, Tensor] | None
) -> tuple[float, dict[str, Any]]:
    """δ by the weights and the curvature alone, where no gradient of all the data is known, and
    what a record says of it."""
    gap = Prior({}).around(initial, mean).gap(mean)
    delta, choice = chosen_prior(form, gap, None)
    return delta, {"prior_choice": {"delta": delta, **choice, "unsure": UNSURE}}


def in_words(choice: Mapping[str, Any]) -> str:
    """δ (the largest, of several) and the rule that chose it."""
    delta = choice["delta"]
    largest = max(delta.values()) if isinstance(delta, Mapping) else delta
    return f"{largest:.3g} by {choice['rule']}"


def _directions(form: Spectral, gap: Tree, gradient: Tree | None) -> Directions:
    """The directions of the curvature, sorted into bins of nearly the same λ.

    Args:
        gradient: None: 0.
    """
    d = form.forward(gap)
    if gradient is None:
        g = {key: values.new_zeros(()) for key, values in form.values.items()}
    else:
        g = form.forward(gradient)
    top = max(float(values.max()) for values in form.values.values())
    sums = torch.zeros(5, BINS, dtype=torch.float64)
    for key, values in form.values.items():
        pieces = zip(
            _pieces(values, values), _pieces(d[key], values), _pieces(g[key], values), strict=True
        )
        for piece, gap_piece, gradient_piece in pieces:
            curvature = piece.double().clamp_min(0)
            sums += _binned(curvature, gap_piece.double(), gradient_piece.double(), top)
    sums = sums[:, sums[1] > 0]
    curvatures, count, dd, dg, gg = sums
    return Directions(curvatures / count, count, dd, dg, gg)


def _pieces(x: Tensor, like: Tensor) -> tuple[Tensor, ...]:
    return x.expand_as(like).flatten().split(PIECE)


def _binned(curvature: Tensor, d: Tensor, g: Tensor, top: float) -> Tensor:
    """Sums of λ, 1, d², d g and g² over the directions of each bin, ``[5, BINS]``."""
    share = (curvature / max(top, TINY)).clamp_min(2.0**-OCTAVES)
    height = share.log2() / OCTAVES + 1  # 0 for the smallest curvature, 1 for the largest
    bins = (height * (BINS - 1)).round().long()
    quantities = (curvature, torch.ones_like(d), d * d, d * g, g * g)
    return torch.stack([torch.bincount(bins, x, BINS).cpu() for x in quantities])


def _crossing(f: Callable[[float], float], low: float, high: float) -> float:
    """Where f rises through 0 between these."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if f(middle) < 0:
            low = middle
        else:
            high = middle
    return high
