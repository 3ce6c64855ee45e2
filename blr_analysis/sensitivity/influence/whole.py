"""The posterior and the errors that influence is taken of, unless δ was named: of a small model
more curvature than it was asked with; of one whose training was stopped early, errors of its
whole training.

At the minimum of the objective, what a model becomes without an example is decided by the Hessian
itself. Off it (minibatches, a fixed number of epochs) retraining does not go to the minimum but
stops early, which damps its moves in directions of little curvature, where the evidence's δ leaves
them free. Gradient flow for a time T damps them as δ = 1/T does, and

    L(θ₀) − L(θ̂) = ∫₀ᵀ ‖dθ/dt‖² dt ≥ ‖θ̂ − θ₀‖² / T,    hence 1/T ≤ (L(θ₀) − L(θ̂)) / ‖θ̂ − θ₀‖²

That bound, L summed over the data, is the damping taken: under twice as much the penalty would
have cost as much as training gained. Only the whole curvature wants it: the eigenvalues of a
Kronecker one are means over large and small ones.

Where the curvature is so small that nothing was forgotten, an example's share in θ̂ is not its last
gradient but −∫ J_iᵀ e_i dt. Of classes, whose curvature falls as they are learned, the errors
are therefore averaged over the training's time. Let the outputs go straight from f⁰ at θ₀ to f:
flow along θ₀ + s (θ̂ − θ₀) has ds/dt ∝ −Σ_i (f_i − f⁰_i)·e_i(s), the slope of the loss, so that

    ē_i = ∫₀¹ e_i(s) dt/ds ds / ∫₀¹ dt/ds ds,    e_i(s) the error at f⁰_i + s (f_i − f⁰_i)

What was learned by heart has an error again, and at a minimum along the line ē is the error there.

Sources: Ali, Kolter & Tibshirani, "A continuous-time view of early stopping for least squares",
AISTATS 2019 (1/T); Bae et al., "Training data attribution via approximate unrolling", NeurIPS 2024
(gradients averaged over segments of training).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.tree import dot
from blr_analysis.errors import BLRError, ModelError
from blr_analysis.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.laplace import fit_laplace
from blr_analysis.posterior.prior import Prior
from blr_analysis.posterior.stationarity import stationarity
from blr_analysis.posterior.structures import LowRank
from blr_analysis.sensitivity.corrections import EXACT, exact_structure, laplace_of
from blr_analysis.task import Task

HESSIAN = 6e9  # N·P²: up to here the exact Hessian takes seconds
POINTS = 64  # of the line from the first outputs to the last
QUIET: dict[str, bool] = {"progress": False}
NEARER = "at a minimum structure='full' with curvature='exact' is nearer to retraining"


def whole(
    task: Task, q: Posterior, memory_budget: int | None
) -> tuple[Posterior, Tensor | None, str]:
    """The posterior to take instead of one that :func:`blr_analysis.fit_laplace` made at the
    model's weights, and the errors ``[N, C]`` instead of e_i, and what to say of it; q and None,
    where seconds give no better."""
    if task.likelihood.is_sequence:
        return q, None, ""
    structure, fitted = exact_structure(task), partial(_fitted, task, memory_budget)
    if not laplace_of(task, q):
        captured = q.record.get("source", "subset") not in ("laplace", "subset")
        crude = structure is not None and q.structure in ("diag", "kron") and captured
        return q, None, f"of a {q.structure} posterior: fit_laplace(task) finds more" * crude
    if stationarity(task, q).near:
        if structure is None:
            return q, None, ""
        if q.record.get("prior_named"):
            return q, None, NEARER if q.structure in ("diag", "kron") else ""
        taken, said = _at_minimum(q, structure, fitted)
        return taken, None, said
    if "prior_choice" not in q.record or (stopped := early_stop(task, q)) is None:
        return q, None, _short_of_rank(q)
    damping, errors = stopped
    notes = [] if errors is None else ["of errors averaged over training"]
    if structure is None and q.structure not in ("lowrank", "full"):
        return q, errors, "".join(notes)
    notes.insert(0, f"of the whole curvature, damped by {damping:.3g} as early stopping does")
    prior = Prior({None: damping}, q.prior.mean)
    taken = q.at(prior) if structure is None else fitted(structure, prior)
    if structure is None:
        notes.append(_short_of_rank(taken))
    elif not isinstance(task.likelihood.kind, Gaussian):  # whose curvature is the same everywhere
        taken = fitted(structure, prior, expected=taken)
    return taken, errors, "; ".join(filter(None, notes))


def early_stop(task: Task, q: Posterior) -> tuple[float, Tensor | None] | None:
    """(L(θ₀) − L(θ̂)) / ‖θ̂ − θ₀‖², θ₀ the prior's mean, and ē ``[N, C]`` of classes; None where
    training gained nothing, or the model breaks down at θ₀."""
    gap = q.prior.gap(q.mean)
    start = {n: m - gap[n] for n, m in q.mean.items()}
    batches = []
    try:
        with torch.no_grad(), task.evaluation():
            for chosen in torch.arange(task.n_data).split(task.batch_size):
                batch = task.fetch(chosen)
                (f0, y), (f, _) = (task.run(batch, w, chosen) for w in (start, q.mean))
                batches.append((task.likelihood.at(chosen), f0, f, y))
    except BLRError:
        return None
    gain = sum(
        float((one.nll(f0, y).double() - one.nll(f, y).double()).sum()) for one, f0, f, y in batches
    )
    if not (gain > 0 and math.isfinite(gain)):
        return None
    classes = isinstance(task.likelihood.kind, Categorical | Bernoulli)
    return gain / dot(gap, gap), _averaged(batches) if classes else None


def _averaged(batches: list[tuple[Likelihood, Tensor, Tensor, Tensor]]) -> Tensor:
    """ē, by the midpoint rule; behind a minimum along the line training does not go."""
    total, time = torch.zeros(()), 0.0
    targets = [(one, y) for one, _, _, y in batches]
    first = torch.cat([f0.double() for _, f0, _, _ in batches])
    gap = torch.cat([f.double() for _, _, f, _ in batches]) - first
    sizes = [len(y) for _, y in targets]
    for step in range(POINTS):
        outputs = first + (step + 0.5) / POINTS * gap
        rows = zip(targets, outputs.split(sizes), strict=True)
        errors = torch.cat([one.error(f, y) for (one, y), f in rows])
        speed = -float((errors * gap).sum())
        if speed <= 0:
            break
        total, time = total + errors / speed, time + 1 / speed
    return total / time


def _at_minimum(
    q: Posterior, structure: str, fitted: Callable[..., Posterior]
) -> tuple[Posterior, str]:
    """With the Hessian, where that takes seconds and is positive, else the Gauss–Newton matrix."""
    size = sum(m.numel() for m in q.mean.values())
    if structure == "full" and q.n_data * size**2 <= HESSIAN:
        with warnings.catch_warnings(), suppress(ModelError):  # a layer without one
            warnings.simplefilter("ignore")  # where it is not positive it is not taken
            hessian = fitted(structure, q.prior, curvature="exact")
            if not hessian.record["floored"]:
                return hessian, "of the exact Hessian"
    if q.structure == "full":
        return q, ""
    return fitted(structure, q.prior), "of the whole curvature"


def _fitted(
    task: Task, memory_budget: int | None, structure: str, prior: Prior, **options: Any
) -> Posterior:
    if structure == "lowrank":
        options |= {"tolerance": EXACT}
    options |= {"memory_budget": memory_budget} | QUIET
    return fit_laplace(task, structure=structure, prior_precision=prior, **options)


def _short_of_rank(q: Posterior) -> str:
    """What to do where a low rank leaves out directions that the prior does not hold."""
    if not isinstance(q.form, LowRank):
        return ""
    least = float(torch.linalg.eigvalsh(q.form.core)[0])
    delta = max(float(torch.as_tensor(d).max()) for d in q.prior.entries.values())
    if least <= delta:
        return ""
    return f"rank {len(q.form.core)} leaves out curvature above δ: give more, or structure='kron'"
