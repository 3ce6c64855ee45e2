"""Single examples truly left out, one at a time, of a model at the minimum of its objective.

Nothing is linearised. Quasi-Newton moves from m that know the posterior
(:mod:`blr_analysis.sensitivity.minimise`) leave each example out, and a real forward pass gives its
outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blr_analysis.backprop.engine import chunks, n_outputs
from blr_analysis.backprop.loss import loss_and_gradient
from blr_analysis.backprop.tree import add
from blr_analysis.posterior.fit import curvature_root
from blr_analysis.posterior.minimum import DRIFT
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.stationarity import gain, stationarity
from blr_analysis.posterior.structures import Full, Structure
from blr_analysis.progress import track
from blr_analysis.sensitivity.minimise import Descent
from blr_analysis.sensitivity.objective import changed, whole
from blr_analysis.task import Task

DENSE = 4096  # parameters: up to here the whole curvature may be held as a matrix
PASSES = 12  # over the data, for each example of a descent
UNTIL_REST = 40  # of one that is to come to rest
ENOUGH = 1e-4  # of the first decrement in the whole curvature may be left: 1e-3 of a rise
LITTLE = 1e-6  # … in a posterior's precision, which may see some directions badly
SAVED = 500  # gradients per example and parameter that a matrix as preconditioner may cost


@dataclass(frozen=True)
class Removals:
    """K examples, each left out; on the CPU.

    Attributes:
        outputs: of each without it, ``[1, C]``, of a sequence ``[1, T, C]``.
        lost: where it cannot be left out, ``[K]``: its pull at the model is so small beside what is
            left to train that the moves would show the training that goes on. These outputs are
            at m. An example without any pull (an ignored label, a weight of 0) is not lost: m
            stays the minimum without it.
    """

    outputs: list[Tensor]
    lost: Tensor


def descended_removals(
    task: Task, q: Posterior, indices: Tensor, *, passes: int = PASSES
) -> Removals:
    """Take each of these examples out by at most so many passes over the others."""
    outputs: list[Tensor] = []
    lost = torch.zeros(len(indices), dtype=torch.bool)
    start = whole(task, q.prior).at(dict(q.mean))
    left_to_train = stationarity(task, q).decrement
    unnoticed = _rounding(q) * abs(start.value)
    curvature: tuple[Structure, float] | None = None
    rows = track(indices, total=len(indices), label="descents", show=task.progress)
    for nth, row in enumerate(rows):
        alone = row.reshape(1)
        gradient, loss = loss_and_gradient(task, q.mean, alone)
        pull = gain(q, gradient)
        has_pull = pull > unnoticed
        lost[nth] = has_pull and left_to_train > DRIFT * pull
        params = q.mean
        if has_pull and not lost[nth]:
            if curvature is None:
                curvature = _whole_curvature(task.quiet, q, len(indices))
            preconditioner, enough = curvature
            value = start.value - loss
            point = replace(start, value=value, gradient=add(start.gradient, -1.0, gradient))
            without = changed(task, q.prior, leaving=alone)
            descent = Descent(without, preconditioner, point, enough=enough)
            descent.run(passes)
            params = descent.point.params
        outputs.append(_output_at(task, params, alone))
    return Removals(outputs, lost)


def _output_at(task: Task, params: Mapping[str, Tensor], alone: Tensor) -> Tensor:
    with torch.no_grad(), task.evaluation():
        output, _ = task.run(task.fetch(alone), params, alone)
    return output.cpu()


def _rounding(q: Posterior) -> float:
    """The relative rounding of the objective, in the dtype of the weights."""
    return torch.finfo(next(iter(q.mean.values())).dtype).eps


def _whole_curvature(task: Task, q: Posterior, count: int) -> tuple[Structure, float]:
    """Σ_i J_iᵀ Λ_i J_i + diag(δ) as a matrix, and the share of a decrement in it that may be left.

    Where the matrix costs more than the moves of ``count`` examples would, the posterior's own
    precision instead.
    """
    size = sum(m.numel() for m in q.mean.values())
    if task.likelihood.is_sequence or size > DENSE:
        return q.form, LITTLE
    if n_outputs(task, q.mean) * size > SAVED * count:
        return q.form, LITTLE
    like = next(iter(q.mean.values()))
    form = Full(like.new_zeros(size, size), {n: tuple(m.shape) for n, m in q.mean.items()})
    for chunk in chunks(task, q.mean, label="curvature"):
        form = form.add(chunk.terms(curvature_root(chunk)))
    return form.plus_prior(q.prior), ENOUGH
