"""How far an output moves when its own example is left out: first order, cavity, bounded cavity.

With Λ_i = L Lᵀ and Lᵀ V_i L = Q diag(λ) Qᵀ the cavity moves the output by

    V_i e_i + V_i L Q diag(g(λ)) Qᵀ Lᵀ V_i e_i,    g(λ) = 1 / (1 − λ)

which has a pole at a leverage λ of 1. The exact precision never gets there: it contains the
example's own share. A structure that overstates V_i does, and near the pole the estimate says
more about that error than about the example. Beyond a bound b (0.999 for structures that hold the
exact curvature, 0.9 for the others) the row is therefore "bounded": g(λ) = b² / (λ² (1 − b)),
so that what the cavity adds to the first order, in units of e, stays what it is at b. The move is
continuous and grows with λ, is never more than 1/(1 − b) times the first order, and comes close
to it for λ ≫ 1, where V_i can only be read as the variance without the example.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunk
from blr_analysis.errors import ModelError
from blr_analysis.likelihoods import Likelihood
from blr_analysis.posterior.gaussian import Posterior

EXPLAINED = 0.5  # of Σ tr(Λ_i V_i), from which on a low-rank sketch hardly overstates V_i
HIGHEST_LEVERAGE = 0.999  # that their cavity is taken at: the exact one is below 1
OVERSTATED = 0.9  # the same for structures whose V_i may be overstated
WORDS = ("first_order", "cavity", "bounded", "descent")


def bears_cavity(q: Posterior) -> bool:
    """Whether V_i is not overstated: the exact curvature, or a sketch that holds most of it."""
    if q.structure == "lowrank":
        return float(q.record.get("explained", 1.0)) >= EXPLAINED
    return q.structure == "full"


def taken(q: Posterior, correction: str) -> str:
    """ "cavity" or "first_order": what is asked for, and what "auto" stands for."""
    if correction != "auto":
        return correction
    calibrated = q.record.get("calibration")
    if calibrated:
        return str(calibrated["correction"])
    return "cavity" if bears_cavity(q) else "first_order"


def bound_of(q: Posterior) -> float:
    """The leverage up to which this posterior's cavity is taken."""
    return HIGHEST_LEVERAGE if bears_cavity(q) else OVERSTATED


def left_out_by(
    word: str, f: Tensor, y: Tensor, v: Tensor, likelihood: Likelihood, bound: float
) -> tuple[Tensor, Tensor, Tensor]:
    """f_i^{\\i} ``[B, C]``, the leverage ``[B]``, and the place in WORDS of what was used."""
    e, root = likelihood.error(f, y), likelihood.hessian_root(f, y)
    levers = leverage(v, root)
    hessian = likelihood.hessian(f, y)
    if word == "first_order":
        none = torch.zeros_like(levers, dtype=torch.bool)
        return left_out(f, e, v, hessian, none), levers, none.long()
    cavity = levers < bound
    after = left_out(f, e, v, hessian, cavity)
    if not bool(cavity.all()):
        over = ~cavity
        after[over] = bounded(f[over], e[over], v[over], root[over], bound)
    return after, levers, 2 - cavity.long()


def left_out(f: Tensor, e: Tensor, v: Tensor, hessian: Tensor, cavity: Tensor) -> Tensor:
    """f_i^{\\i}: by the cavity where ``cavity`` is true, to first order elsewhere; ``[B, C]``."""
    move = torch.bmm(v, e.unsqueeze(-1))
    if bool(cavity.any()):
        eye = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
        system = torch.where(cavity[:, None, None], eye - v @ hessian, eye)
        move = torch.linalg.solve(system, move)
    return f + move.squeeze(-1)


def bounded(f: Tensor, e: Tensor, v: Tensor, root: Tensor, bound: float) -> Tensor:
    """f_i^{\\i} with the cavity's growth stopped at a leverage of ``bound``; ``[B, C]``."""
    inner = root.mT @ v @ root
    values, turn = torch.linalg.eigh((inner + inner.mT) / 2)
    stopped = bound**2 / (values.clamp_min(bound).square() * (1 - bound))
    growth = torch.where(values < bound, 1 / (1 - values.clamp_max(bound)), stopped)
    first = torch.bmm(v, e.unsqueeze(-1))
    turned = root @ turn
    further = v @ (turned @ (growth.unsqueeze(-1) * (turned.mT @ first)))
    return f + (first + further).squeeze(-1)


def leverage(variance: Tensor, hessian_root: Tensor) -> Tensor:
    """The largest eigenvalue of V_i Λ_i, from Lᵀ V_i L with Λ_i = L Lᵀ; ``[N]``."""
    inner = hessian_root.mT @ variance @ hessian_root
    if inner.shape[-1] == 1:
        return inner.flatten()
    inner = (inner + inner.mT) / 2
    return torch.cat([torch.linalg.eigvalsh(part)[:, -1] for part in inner.split(4096)])


def prediction_variance(q: Posterior, chunk: Chunk) -> Tensor:
    """V_i = J_i Σ J_iᵀ of a chunk, ``[B, C, C]``."""
    v = q.form.gram(chunk.jacobian_terms())
    check_finite(v)
    return v


def self_influence(q: Posterior, chunk: Chunk, error: Tensor) -> Tensor:
    """g_iᵀ Σ g_i of a chunk, ``[B]``, from its e_i: one backward pass."""
    influence = q.form.gram(chunk.terms(error.unsqueeze(1))).flatten()
    check_finite(influence)
    return influence


def check_finite(values: Tensor, what: str = "prediction variance") -> None:
    """Raise :class:`ModelError` where these overflowed."""
    if not bool(torch.isfinite(values).all()):
        raise ModelError(
            f"the {what} overflows {str(values.dtype).removeprefix('torch.')}; raise "
            "prior_precision or use float64"
        )
