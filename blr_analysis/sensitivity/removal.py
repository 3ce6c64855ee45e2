"""Single examples truly left out, one at a time, of a model at the minimum of its objective.

Nothing is linearised. Quasi-Newton moves from m that know the posterior
(:mod:`blr_analysis.sensitivity.minimise`) leave each example out, and a real forward pass gives its
outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blr_analysis.backprop.engine import chunks, n_outputs
from blr_analysis.backprop.loss import loss_and_gradient
from blr_analysis.backprop.tree import add
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.laplace import curvature_root
from blr_analysis.posterior.stationarity import drifts
from blr_analysis.posterior.structures import Full, Structure
from blr_analysis.progress import track
from blr_analysis.sensitivity.minimise import Descent, descend
from blr_analysis.sensitivity.objective import changed, whole
from blr_analysis.task import Task

DENSE = 4096  # parameters: up to here the whole curvature may be held as a matrix
PASSES = 12  # over the data, for each example of a descent
UNTIL_REST = 40  # of one that is to come to rest
ENOUGH = 1e-4  # of the first decrement, in the whole curvature: the rest is 1e-3 of a rise
LITTLE = 1e-6  # the same in a posterior's precision, which may see some directions badly
ROUGH = 0.3  # of the first move's length: a descent that is that near has converged for a scale
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


def descended_removals(
    task: Task, q: Posterior, indices: Tensor, *, passes: int = PASSES
) -> Removals:
    """Take each of these examples out by at most so many passes over the others."""
    outputs, drifting = [], torch.zeros(len(indices), dtype=torch.bool)
    left, spent = torch.ones(len(indices), dtype=torch.float64), 1.0
    preconditioner: Structure | None = None
    enough = ENOUGH
    start = whole(task, q.prior).at(dict(q.mean))
    rows = track(indices, total=len(indices), label="descents", show=task.progress)
    for k, row in enumerate(rows):
        alone = row.reshape(1)
        own, loss = loss_and_gradient(task, q.mean, alone)
        params, drifting[k] = q.mean, drifts(task, q, own)
        if not drifting[k]:
            if preconditioner is None:
                preconditioner = _whole_curvature(task.quiet, q, len(indices))
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


def _whole_curvature(task: Task, q: Posterior, count: int) -> Structure | None:
    """Σ_i J_iᵀ Λ_i J_i + diag(δ) as a matrix; None where that costs more than ``count`` examples'
    moves would."""
    size = sum(m.numel() for m in q.mean.values())
    if task.likelihood.is_sequence or size > DENSE:
        return None
    if n_outputs(task, q.mean) * size > SAVED * count:
        return None
    like = next(iter(q.mean.values()))
    form = Full(like.new_zeros(size, size), {n: tuple(m.shape) for n, m in q.mean.items()})
    for chunk in chunks(task, q.mean, label="curvature"):
        form = form.add(chunk.terms(curvature_root(chunk)))
    return form.plus_prior(q.prior)
