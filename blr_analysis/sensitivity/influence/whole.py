"""The posterior that influence is taken under: of a small model, more than it was asked with,
unless δ was named.

At the minimum of the objective, what a model becomes without an example is decided by the Hessian
itself. Off it (minibatches, a fixed number of epochs) retraining does not go to the minimum but
stops early, which damps its moves in directions of little curvature, where the evidence's δ leaves
them free. Gradient flow for a time T damps them as δ = 1/T does, and

    L(θ₀) − L(θ̂) = ∫₀ᵀ ‖dθ/dt‖² dt ≥ ‖θ̂ − θ₀‖² / T,    hence 1/T ≤ (L(θ₀) − L(θ̂)) / ‖θ̂ − θ₀‖²

That bound, L summed over the data, is the damping taken: under twice as much the penalty would
have cost as much as training gained. Only the whole curvature wants it: the eigenvalues of a
Kronecker one are means over large and small ones.

Retraining on other data draws another network as well. Those that the same training would have made
of other draws of its data are, to first order (the infinitesimal jackknife's bootstrap),

    θ_k = m − S⁻¹ Σ_i ξ_ki J_iᵀ e_i,    ξ_ki ~ N(0, 1)

and the mean of what each of a few says of classes is nearer to what networks retrained on other
parts of the data say, by rank correlations of 0.03 to 0.1 (``benchmarks/README.md``, "Field"). It
is no nearer to this network trained again without one example, and in regressions further: of these
the one network is taken.

Sources: Ali, Kolter & Tibshirani, "A continuous-time view of early stopping for least squares",
AISTATS 2019 (1/T); Bae et al., "Training data attribution via approximate unrolling", NeurIPS 2024;
Giordano et al., "A Swiss army infinitesimal jackknife", AISTATS 2019.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunking
from blr_analysis.backprop.loss import evaluated, loss_and_gradient
from blr_analysis.backprop.tree import add, dot
from blr_analysis.errors import BLRError, ModelError
from blr_analysis.likelihoods import Gaussian
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.laplace import fit_laplace
from blr_analysis.posterior.prior import Prior
from blr_analysis.posterior.stationarity import stationarity
from blr_analysis.posterior.structures import LowRank
from blr_analysis.sensitivity.corrections import EXACT, exact_structure, laplace_of
from blr_analysis.sensitivity.influence.averaged import Averaged
from blr_analysis.sensitivity.minimise import on_a_copy, write
from blr_analysis.task import Task

DRAWS = 4, 16  # networks, at least and at most; more where they cost little:
CHEAP = 1e10  # multiplications to build the curvature of all of them
HESSIAN = 6e9  # N·P²: up to here the exact Hessian takes seconds
NEARER = "at a minimum structure='full' with curvature='exact' is nearer to retraining"


def whole(
    task: Task, q: Posterior, chunking: Chunking, averaged: Averaged | None, *, drawn: bool
) -> tuple[list[Posterior], str]:
    """What to take instead of a posterior that :func:`blr_analysis.fit_laplace` made at the model's
    weights, and what to say of it; q, where seconds give no better.

    Args:
        averaged: the errors of training examples, where they are averaged.
        drawn: whether the mean over several networks may be taken.
    """
    if task.likelihood.is_sequence:
        return [q], ""
    structure, fitted = exact_structure(task), partial(_fitted, chunking, task=task)
    if not laplace_of(task, q):
        captured = q.record.get("source", "subset") not in ("laplace", "subset")
        crude = structure is not None and q.structure in ("diag", "kron") and captured
        return [q], f"of a {q.structure} posterior: fit_laplace(task) finds more" if crude else ""
    if stationarity(task, q).near:
        if structure is None:
            return [q], ""
        if q.record.get("prior_named"):
            return [q], NEARER if q.structure in ("diag", "kron") else ""
        taken, said = _at_minimum(q, structure, fitted)
        return [taken], said
    if "prior_choice" not in q.record:
        return [q], _short_of_rank(q)
    damping = early_stop(task, q)
    if damping is None or (structure is None and q.structure not in ("lowrank", "full")):
        return [q], _short_of_rank(q)
    said = f"of the whole curvature, damped by {damping:.3g} as early stopping does"
    prior = Prior({None: damping}, q.prior.mean)
    if structure is None:
        damped = q.at(prior)
        return [damped], "; ".join(filter(None, (said, _short_of_rank(damped))))
    taken = fitted(structure, prior)
    build = partial(fitted, structure, prior)
    if drawn and structure == "full":
        try:
            several = _drawn(task, taken, averaged, build)
            return several, f"{said}, mean of {len(several)} draws of the data"
        except (BLRError, RuntimeError) as error:  # no copy of it, or one breaks down there
            said += f"; of one network, those of other draws failed ({type(error).__name__})"
    if not isinstance(task.likelihood.kind, Gaussian):  # whose curvature is the same everywhere
        taken = fitted(structure, prior, expected=taken)
    return [taken], said


def _drawn(
    task: Task, q: Posterior, averaged: Averaged | None, fitted: Callable[..., Posterior]
) -> list[Posterior]:
    """Posteriors at θ_k."""
    errors = torch.cat(list(_errors(task, q, averaged)))
    generator, everyone = torch.Generator().manual_seed(0), torch.arange(task.n_data)
    rows, size = errors.numel(), sum(m.numel() for m in q.mean.values())
    count = min(DRAWS[1], max(DRAWS[0], int(CHEAP / (rows * size * min(rows, size)))))
    several, under = [], on_a_copy(task)
    for _ in range(count):
        weights = torch.randn(task.n_data, 1, generator=generator).to(errors)
        pull, _ = loss_and_gradient(task, q.mean, everyone, weights * errors)
        write(under, add(q.mean, -1.0, q.form.solve(pull)))
        several.append(fitted(task=under))
    return several


def _errors(task: Task, q: Posterior, averaged: Averaged | None) -> Iterator[Tensor]:
    """e_i, or ē_i, of all examples, some at a time."""
    for chosen in torch.arange(task.n_data).split(task.batch_size):
        with torch.no_grad(), task.evaluation():
            f, y = task.run(task.fetch(chosen), q.mean, chosen)
        last = averaged is None
        yield (
            task.likelihood.at(chosen).error(f, y) if last else averaged.errors(task, chosen, f, y)
        )


def early_stop(task: Task, q: Posterior) -> float | None:
    """(L(θ₀) − L(θ̂)) / ‖θ̂ − θ₀‖², θ₀ the prior's mean; None where training gained nothing, or
    the model breaks down at θ₀."""
    gap, start = q.prior.gap(q.mean), q.prior.start(q.mean)
    try:
        before, after = (evaluated(task, w, progress=False)[0] for w in (start, dict(q.mean)))
    except BLRError:
        return None
    gain = float(before.losses.double().sum() - after.losses.double().sum())
    return gain / dot(gap, gap) if gain > 0 and math.isfinite(gain) else None


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
    chunking: Chunking, structure: str, prior: Prior, *, task: Task, **options: Any
) -> Posterior:
    if structure == "lowrank":
        options |= {"tolerance": EXACT}
    options |= vars(chunking)
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
