"""How far an output moves when its own example is left out: first order, cavity, bounded cavity.

With Λ_i = L Lᵀ and Lᵀ V_i L = Q diag(λ) Qᵀ the cavity moves the output by

    V_i e_i + V_i L Q diag(g(λ)) Qᵀ Lᵀ V_i e_i,    g(λ) = 1 / (1 − λ)

which has a pole at a leverage λ of 1. The exact precision never gets there: it contains the
example's own share. A structure that overstates V_i does, and near the pole the estimate says
more about that error than about the example. Beyond a bound b (0.999 for structures that hold the
exact curvature, in float64 1 − 1e-6 for a fit of all of it, 0.9 for the others) the row is
therefore "bounded": g(λ) = b² / (λ² (1 − b)), so that what the cavity adds to the first order, in
units of e, stays what it is at b. The move is continuous and grows with λ, is never more than
1/(1 − b) times the first order, and comes close to it for λ ≫ 1, where V_i can only be read as
the variance without the example.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunk
from blr_analysis.errors import ModelError
from blr_analysis.likelihoods import Likelihood
from blr_analysis.posterior.posterior import Posterior

EXPLAINED = 0.5  # of Σ tr(Λ_i V_i), from which on a low-rank sketch hardly overstates V_i
HIGHEST_LEVERAGE = 0.999  # that their cavity is taken at: the exact one is below 1
FITTED_LEVERAGE = 1 - 1e-6  # the same for a fit of the whole Gauss–Newton matrix in float64
OVERSTATED = 0.9  # the same for structures whose V_i may be overstated
EXACT = 1e-6  # of tr(ΛV), that a sketch of all of it may leave out
HIGH = 0.5  # a leverage from which on first order is off by a third and more
CORRECTION_NAMES = ("first_order", "cavity", "bounded", "descent")


def bears_cavity(q: Posterior) -> bool:
    """Whether V_i is not overstated: the exact curvature, or a sketch that holds most of it."""
    if q.structure == "lowrank":
        return float(q.record.get("explained", 1.0)) >= EXPLAINED
    return q.structure == "full"


def taken(q: Posterior, correction: str) -> str:
    """ "cavity" or "first_order": what is asked for, or what the posterior bears."""
    if correction != "auto":
        return correction
    return "cavity" if q.at_minimum and bears_cavity(q) else "first_order"


def bound_of(q: Posterior) -> float:
    """The leverage up to which this posterior's cavity is taken."""
    explained = 1.0 if q.structure == "full" else float(q.record.get("explained", 0.0))
    fitted = q.source == "laplace" and q.record.get("kind") == "ggn"
    if explained >= 1 - EXACT and fitted:
        double = next(iter(q.mean.values())).dtype == torch.float64
        return FITTED_LEVERAGE if double else HIGHEST_LEVERAGE
    whole = bears_cavity(q) and q.record.get("kind") != "hessian"  # that may hold less than Λ_i
    return HIGHEST_LEVERAGE if whole else OVERSTATED


def left_out_by(
    word: str, f: Tensor, y: Tensor, e: Tensor, v: Tensor, likelihood: Likelihood, bound: float
) -> tuple[Tensor, Tensor, Tensor]:
    """f_i^{\\i} − f_i ``[B, C]``, the leverage ``[B]``, and the place in
    CORRECTION_NAMES of what was used."""
    levers = leverage(v, f, y, likelihood)
    move = torch.bmm(v, e.unsqueeze(-1))
    if word == "first_order":
        used = torch.zeros_like(levers, dtype=torch.long)
        return move.squeeze(-1), levers, used
    cavity = levers < bound
    if bool(cavity.any()):
        eye = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
        shrunk = likelihood.hessian_times(f, y, v.transpose(0, 1)).transpose(0, 1)  # V_i Λ_i
        system = torch.where(cavity[:, None, None], eye - shrunk, eye)
        move = torch.linalg.solve(system, move)
    if not bool(cavity.all()):
        over = ~cavity
        root = likelihood.hessian_root(f, y)[over]
        move[over] = bounded(e[over], v[over], root, bound)
    return move.squeeze(-1), levers, 2 - cavity.long()


def bounded(e: Tensor, v: Tensor, root: Tensor, bound: float) -> Tensor:
    """f_i^{\\i} − f_i the cavity's growth stopped at a leverage of ``bound``; ``[B, C, 1]``."""
    inner = root.mT @ v @ root
    values, turn = torch.linalg.eigh((inner + inner.mT) / 2)
    stopped = bound**2 / (values.clamp_min(bound).square() * (1 - bound))
    growth = torch.where(values < bound, 1 / (1 - values.clamp_max(bound)), stopped)
    first = torch.bmm(v, e.unsqueeze(-1))
    turned = root @ turn
    further = v @ (turned @ (growth.unsqueeze(-1) * (turned.mT @ first)))
    return first + further


def leverage(v: Tensor, f: Tensor, y: Tensor, likelihood: Likelihood) -> Tensor:
    """The largest eigenvalue of V_i Λ_i, ``[N]``, from all those of Lᵀ V_i L with Λ_i = L Lᵀ."""
    root = likelihood.hessian_root(f, y)
    inner = root.mT @ v @ root
    if inner.shape[-1] == 1:
        return inner.flatten()
    inner = (inner + inner.mT) / 2
    return torch.cat([torch.linalg.eigvalsh(part)[:, -1] for part in inner.split(4096)])


def prediction_variances(q: Posterior, chunk: Chunk) -> Iterator[tuple[slice, Tensor]]:
    """V_i = J_i Σ J_iᵀ of a chunk, some examples at a time: which of them, and ``[n, C, C]``."""
    for rows, terms in chunk.parts():
        v = q.form.gram(terms)
        check_finite(v)
        yield rows, v


def self_influence(q: Posterior, chunk: Chunk, error: Tensor, *, last: bool = False) -> Tensor:
    """g_iᵀ Σ g_i of a chunk, ``[B]``, from its e_i: one backward pass."""
    influence = q.form.gram(chunk.terms(error.unsqueeze(1), last=last)).flatten()
    check_finite(influence)
    return influence


def check_finite(values: Tensor, what: str = "prediction variance") -> None:
    """Raise :class:`ModelError` where these overflowed."""
    if bool(torch.isfinite(values.sum())):
        return
    if not bool(torch.isfinite(values).all()):
        raise ModelError(
            f"the {what} overflows {str(values.dtype).removeprefix('torch.')}; raise "
            "prior_precision or use float64"
        )
