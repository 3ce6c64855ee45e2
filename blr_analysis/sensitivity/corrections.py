"""How far an output moves when its own example is left out: first order, cavity, bounded cavity.

With Λ_i = L Lᵀ and Lᵀ V_i L = Q diag(λ) Qᵀ the cavity moves the output by

    V_i e_i + V_i L Q diag(g(λ)) Qᵀ Lᵀ V_i e_i,    g(λ) = 1 / (1 − λ)

which has a pole at a leverage λ of 1. With the exact precision λ is below 1, because the precision
contains the example's curvature. A structure that overstates V_i can reach the pole, and near it
the estimate depends more on that error than on the example. Beyond a bound b the correction is
therefore "bounded": g(λ) = b² / (λ² (1 − b)), so that the term that the cavity adds to the first
order, in units of e, stays at its value at b. The move is continuous and grows with λ. It is at
most 1/(1 − b) times the first order, and approaches it for λ ≫ 1, where V_i must be the variance
without the example. b is 0.999 for structures that hold the exact curvature (1 − 1e-6 for a fit of
all of it in float64), and 0.9 for the others.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunk
from blr_analysis.errors import ModelError
from blr_analysis.likelihoods import Likelihood
from blr_analysis.posterior.posterior import Posterior

EXPLAINED = 0.5  # share of Σ tr(Λ_i V_i); a sketch that explains more hardly overstates V_i
HIGHEST_LEVERAGE = 0.999  # b of structures that hold the exact curvature
FITTED_LEVERAGE = 1 - 1e-6  # b of a fit of the whole Gauss–Newton matrix in float64
OVERSTATED_LEVERAGE = 0.9  # b of structures that may overstate V_i
EXACT = 1e-6  # share of Σ tr(Λ_i V_i) that rounding may leave out of a sketch of all of it
HIGH = 0.5  # a leverage from which the first order is wrong by a third or more
EIGENVALUE_BATCH = 4096  # matrices that are diagonalised together
CORRECTION_NAMES = ("first_order", "cavity", "bounded", "descent")
FIRST_ORDER, CAVITY, BOUNDED, DESCENT = range(len(CORRECTION_NAMES))


def has_exact_variance(q: Posterior) -> bool:
    """Whether V_i is not overstated: q holds the exact curvature, or a sketch of most of it."""
    if q.structure == "lowrank":
        return float(q.record.get("explained", 1.0)) >= EXPLAINED
    return q.structure == "full"


def correction_for(q: Posterior, correction: str) -> str:
    """ "cavity" or "first_order"; "auto" chooses the one that suits the posterior."""
    if correction != "auto":
        return correction
    return "cavity" if q.at_minimum and has_exact_variance(q) else "first_order"


def highest_leverage(q: Posterior) -> float:
    """The bound b: the leverage up to which this posterior's cavity is taken."""
    curvature = q.record.get("kind")
    explained = 1.0 if q.structure == "full" else float(q.record.get("explained", 0.0))
    is_fit = q.source == "laplace" and curvature == "ggn"
    if is_fit and explained >= 1 - EXACT:
        is_double = next(iter(q.mean.values())).dtype == torch.float64
        return FITTED_LEVERAGE if is_double else HIGHEST_LEVERAGE
    may_lack_own_curvature = curvature == "hessian"
    if has_exact_variance(q) and not may_lack_own_curvature:
        return HIGHEST_LEVERAGE
    return OVERSTATED_LEVERAGE


def left_out_moves(
    correction: str,
    f: Tensor,
    y: Tensor,
    e: Tensor,
    v: Tensor,
    likelihood: Likelihood,
    bound: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """How far outputs move when their own example is left out.

    Args:
        correction: "first_order" or "cavity".
        f: outputs ``[B, C]``.
        y: targets.
        e: errors ``[B, C]``.
        v: prediction variances V_i ``[B, C, C]``.
        likelihood: gives Λ_i.
        bound: b; above this leverage a cavity is bounded.

    Returns:
        f_i^{\\i} − f_i ``[B, C]``, the leverages ``[B]``, and the corrections as places in
        CORRECTION_NAMES ``[B]``.
    """
    leverages = leverage(v, f, y, likelihood)
    move = torch.bmm(v, e.unsqueeze(-1))
    if correction == "first_order":
        corrections = torch.full_like(leverages, FIRST_ORDER, dtype=torch.long)
        return move.squeeze(-1), leverages, corrections
    is_cavity = leverages < bound
    if bool(is_cavity.any()):
        identity = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
        v_lambda = likelihood.hessian_times(f, y, v.transpose(0, 1)).transpose(0, 1)  # V_i Λ_i
        system = torch.where(is_cavity[:, None, None], identity - v_lambda, identity)
        move = torch.linalg.solve(system, move)
    if not bool(is_cavity.all()):
        is_bounded = ~is_cavity
        root = likelihood.hessian_root(f, y)[is_bounded]
        move[is_bounded] = bounded(e[is_bounded], v[is_bounded], root, bound)
    corrections = torch.where(is_cavity, CAVITY, BOUNDED)
    return move.squeeze(-1), leverages, corrections


def bounded(e: Tensor, v: Tensor, root: Tensor, bound: float) -> Tensor:
    """f_i^{\\i} − f_i with the bounded growth g(λ) above a leverage of ``bound``; ``[B, C, 1]``.

    ``root`` is L with Λ_i = L Lᵀ.
    """
    eigenvalues, axes = torch.linalg.eigh(_symmetric(root.mT @ v @ root))
    growth_of_cavity = 1 / (1 - eigenvalues.clamp_max(bound))
    bounded_growth = bound**2 / (eigenvalues.clamp_min(bound).square() * (1 - bound))
    growth = torch.where(eigenvalues < bound, growth_of_cavity, bounded_growth)
    first_order = torch.bmm(v, e.unsqueeze(-1))
    root_axes = root @ axes
    along_axes = growth.unsqueeze(-1) * (root_axes.mT @ first_order)
    return first_order + v @ (root_axes @ along_axes)


def leverage(v: Tensor, f: Tensor, y: Tensor, likelihood: Likelihood) -> Tensor:
    """The largest eigenvalue of V_i Λ_i ``[N]``: that of Lᵀ V_i L with Λ_i = L Lᵀ."""
    root = likelihood.hessian_root(f, y)
    v_in_root = root.mT @ v @ root
    if v_in_root.shape[-1] == 1:
        return v_in_root.flatten()
    largest = []
    for batch in _symmetric(v_in_root).split(EIGENVALUE_BATCH):
        largest.append(torch.linalg.eigvalsh(batch)[:, -1])
    return torch.cat(largest)


def _symmetric(matrix: Tensor) -> Tensor:
    """The symmetric part, which rounding took away."""
    return (matrix + matrix.mT) / 2


def prediction_variances(q: Posterior, chunk: Chunk) -> Iterator[tuple[slice, Tensor]]:
    """V_i = J_i Σ J_iᵀ of a chunk, a few examples at a time.

    Yields:
        The rows of the chunk that these examples are, and their V ``[n, C, C]``.
    """
    for rows, terms in chunk.parts():
        v = q.form.gram(terms)
        check_finite(v)
        yield rows, v


def self_influence(q: Posterior, chunk: Chunk, error: Tensor, *, last: bool = False) -> Tensor:
    """g_iᵀ Σ g_i of a chunk ``[B]``, from its errors e_i, by one backward pass.

    ``last`` says that the chunk's graph is not needed again.
    """
    terms = chunk.terms(error.unsqueeze(1), last=last)
    influence = q.form.gram(terms).flatten()
    check_finite(influence)
    return influence


def check_finite(values: Tensor, quantity: str = "prediction variance") -> None:
    """Raise :class:`ModelError` where these values overflowed."""
    if bool(torch.isfinite(values.sum())):
        return
    if not bool(torch.isfinite(values).all()):
        dtype = str(values.dtype).removeprefix("torch.")
        raise ModelError(f"the {quantity} overflows {dtype}; raise prior_precision or use float64")
