"""Single examples truly left out, one at a time: by exact solves, or by a few moves.

    exact     f_i + J_i (H − ∇²ℓ_i)⁻¹ J_iᵀ e_i,    H = Σ_j ∇²ℓ_j + diag(δ)

(or the Gauss–Newton form J_jᵀ Λ_j J_j for ∇²ℓ_j): the cavity with the curvature of all other
examples as it is, by matrix-free conjugate gradients. Several examples share a sweep.

Descended: nothing is linearised. For the handful of examples whose removal moves the model far,
the linearisation of the model and of all other losses around m is what an estimate gets wrong;
and they make up most of the total. Quasi-Newton moves from m that know the posterior
(:mod:`blr_analysis.sensitivity.minimise`) leave each out, and a real forward pass gives its
outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blr_analysis.backprop.engine import QUIET, Chunking, chunks, n_outputs
from blr_analysis.backprop.loss import loss_and_gradient
from blr_analysis.backprop.products import Curvature, linearised
from blr_analysis.backprop.tree import add
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.laplace import curvature_root
from blr_analysis.posterior.stationarity import drifts
from blr_analysis.posterior.structures import Full, Structure, Tree
from blr_analysis.progress import track
from blr_analysis.sensitivity.corrections import DENSE
from blr_analysis.sensitivity.curvature import Precision, cg
from blr_analysis.sensitivity.minimise import Descent, descend
from blr_analysis.sensitivity.objective import changed, whole
from blr_analysis.task import Task

HELD = 512 * 2**20  # bytes of vectors over the parameters, where the user names no bound
PASSES = 12  # over the data, for each example of a descent
UNTIL_REST = 40  # of one that is to come to rest
ENOUGH = 1e-4  # of the first decrement, in the whole curvature: the rest is 1e-3 of a rise
LITTLE = 1e-6  # the same in a posterior's precision, which may see some directions badly
ROUGH = 0.3  # of the first move's length: a descent that is that near has converged for a scale
VECTORS = 8  # of the size of the parameters, per example: what conjugate gradients hold
SAVED = 500  # gradients per example and parameter that a matrix for preconditioner may cost


@dataclass(frozen=True)
class Removals:
    """K examples, each left out; ``[K]``, on the CPU.

    Attributes:
        outputs: of each without it, ``[1, C]``, of a sequence ``[1, T, C]``.
        residual: of the conjugate gradients, in the preconditioner's norm, or what one more move
            of the descent would be; relative to the first.
        converged: whether the residual fell below the tolerance.
        indefinite: where it cannot be left out: the curvature without it was found not to be
            positive, or (of descents) m is so far from the minimum of its own objective that the
            moves would show the training that goes on. The outputs of those descents are at m.
        iterations: of conjugate gradients, summed over the groups that were solved together, or
            passes that each descent was allowed.
        passes: sweeps over the training data.
    """

    outputs: list[Tensor]
    residual: Tensor
    converged: Tensor
    indefinite: Tensor
    iterations: int
    passes: float


def exact_removals(
    task: Task,
    q: Posterior,
    indices: Tensor,
    *,
    kind: str,
    tolerance: float,
    max_iterations: int,
    chunking: Chunking,
) -> Removals:
    """Take each of these examples out in turn; the posterior preconditions the solves."""
    size = sum(m.numel() * m.element_size() for m in q.mean.values())
    together = max(1, (chunking.memory_budget or HELD) // (VECTORS * size))
    precision = Precision(task, q.mean, q.prior, kind=kind, memory_budget=chunking.memory_budget)
    if kind == "hessian":
        precision.curvature.check_symmetric()
    outputs: list[Tensor] = []
    solutions: list[tuple[Tensor, ...]] = []
    iterations = 0
    preconditioner = _whole_curvature(task, q, len(indices), chunking) or q.form
    groups = indices.split(together)
    for group in track(groups, total=len(groups), label="exact solves", show=chunking.progress):
        own = [Curvature(task, q.mean, indices=i.reshape(1), kind=kind) for i in group]

        def without(v: Tree, own: list[Curvature] = own) -> Tree:
            whole = precision.times(v)
            for k, each in enumerate(own):
                share = each.product({n: x[k] for n, x in v.items()}, progress=False)
                for name, x in whole.items():
                    x[k] -= share[name]
            return whole

        slopes = [loss_and_gradient(task, q.mean, i.reshape(1))[0] for i in group]
        solved = cg(
            without,
            {n: torch.stack([g[n] for g in slopes]) for n in q.mean},
            preconditioner=preconditioner,
            batch_dims=1,
            tolerance=tolerance,
            max_iterations=max_iterations,
            progress=chunking.progress,
        )
        iterations += solved.iterations
        outputs += _moved(task, q, group, solved.x)
        parts = (solved.residual, solved.converged, solved.indefinite)
        solutions.append(tuple(t.cpu() for t in parts))
    residual, converged, indefinite = (torch.cat(p) for p in zip(*solutions, strict=True))
    passes = precision.curvature.passes
    return Removals(outputs, residual, converged, indefinite, iterations, passes)


def descended_removals(
    task: Task, q: Posterior, indices: Tensor, *, passes: int = PASSES, progress: bool | None = None
) -> Removals:
    """Take each of these examples out by at most so many passes over the others."""
    outputs, drifting = [], torch.zeros(len(indices), dtype=torch.bool)
    left, spent = torch.ones(len(indices), dtype=torch.float64), 1.0
    preconditioner: Structure | None = None
    enough = ENOUGH
    start = whole(task, q.prior).at(dict(q.mean))
    for k, row in enumerate(track(indices, total=len(indices), label="descents", show=progress)):
        alone = row.reshape(1)
        own, loss = loss_and_gradient(task, q.mean, alone)
        params, drifting[k] = q.mean, drifts(task, q, own)
        if not drifting[k]:
            if preconditioner is None:
                preconditioner = _whole_curvature(task, q, len(indices), QUIET)
                if preconditioner is None:
                    preconditioner, enough = q.form, LITTLE
            without = changed(task, q.prior, leaving=alone)
            here = replace(start, value=start.value - loss, gradient=add(start.gradient, -1.0, own))
            descent = Descent(without, preconditioner, here, enough=enough)
            descend(descent, steps=None, passes=passes, tolerance=1.0)
            params, spent = descent.point.params, spent + descent.passes
            first = descent.moves[0].decrement
            left[k] = descent.moves[-1].decrement / first if first > 0 else 0.0
        with torch.no_grad(), task.evaluation():
            f, _ = task.run(task.fetch(alone), params, alone)
        outputs.append(f.cpu())
    residual = left.sqrt()
    return Removals(outputs, residual, residual <= ROUGH, drifting, passes, spent)


def _whole_curvature(task: Task, q: Posterior, count: int, chunking: Chunking) -> Structure | None:
    """Σ_i J_iᵀ Λ_i J_i + diag(δ) as a matrix; None where that costs more than ``count`` examples'
    moves would."""
    size = sum(m.numel() for m in q.mean.values())
    if task.likelihood.is_sequence or size > DENSE:
        return None
    if n_outputs(task, q.mean) * size > SAVED * count:
        return None
    like = next(iter(q.mean.values()))
    form = Full(like.new_zeros(size, size), {n: tuple(m.shape) for n, m in q.mean.items()})
    for chunk in chunks(task, q.mean, chunking, label="curvature"):
        form = form.add(chunk.terms(curvature_root(chunk)))
    return form.plus_prior(q.prior)


def _moved(task: Task, q: Posterior, group: Tensor, moves: Tree) -> list[Tensor]:
    """f_i + J_i move_i."""
    rows = []
    for k, index in enumerate(group):
        own = linearised(task, q.mean, index.reshape(1), "ggn")
        step = own.push([moves[n][k : k + 1] for n in q.mean])[0]
        rows.append(task.likelihood.moved(own.outputs, step).cpu())
    return rows
