"""Leave out single examples by training, for a model at the minimum of its objective.

Each example is left out by quasi-Newton moves on the objective of the others
(:mod:`blr_analysis.sensitivity.minimise`). They start from the posterior's mean m, with its
precision as preconditioner. A forward pass at the end gives the example's output; nothing is
linearised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from blr_analysis.backprop.engine import chunks, n_outputs
from blr_analysis.backprop.loss import loss_and_gradient
from blr_analysis.backprop.tree import add
from blr_analysis.posterior.fit import curvature_root
from blr_analysis.posterior.minimum import DRIFT
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.stationarity import gain, stationarity
from blr_analysis.posterior.structures import Full, Structure, Tree
from blr_analysis.progress import track
from blr_analysis.sensitivity.minimise import Descent
from blr_analysis.sensitivity.objective import Point, objective_after, whole_objective
from blr_analysis.task import Task

DENSE = 4096  # parameters; models with more have no curvature matrix
PASSES = 12  # over the data, for each example
UNTIL_REST = 40  # passes over the data for each example, where the descent should end by itself
# A descent ends when its decrement is this share of the first one. The exact curvature measures
# the decrement well, and a share of 1e-4 is 1e-3 of a rise; a posterior's precision may be poor in
# some directions.
ENOUGH_BY_CURVATURE = 1e-4
ENOUGH_BY_POSTERIOR = 1e-6
# The curvature matrix takes (outputs · parameters) operations per example of the data. It pays off
# if that is below this number for each removed example.
OPERATIONS_SAVED = 500


@dataclass(frozen=True)
class Removals:
    """The outputs of K examples, each left out by itself; on the CPU.

    Attributes:
        outputs: the output of each example without it, ``[1, C]``, of a sequence ``[1, T, C]``.
        lost: which examples cannot be left out, ``[K]``. Their pull at the model is small beside
            the training that is left to do, so that a descent would mostly continue the training.
            Their outputs are those at m. An example without any pull (an ignored label, a weight
            of 0) is not lost: m is the minimum without it as well.
    """

    outputs: list[Tensor]
    lost: Tensor


def descended_removals(
    task: Task, q: Posterior, indices: Tensor, *, passes: int = PASSES
) -> Removals:
    """Leave out each of these examples, by at most ``passes`` passes over the other examples."""
    outputs: list[Tensor] = []
    lost: list[bool] = []
    at_mean = whole_objective(task, q.prior).at(dict(q.mean))
    left_to_train = stationarity(task, q).decrement
    rounding = _relative_rounding(q) * abs(at_mean.value)
    preconditioner: Preconditioner | None = None
    for row in track(indices, total=len(indices), label="descents", show=task.progress):
        index = row.reshape(1)
        gradient, loss = loss_and_gradient(task, q.mean, index)
        pull = gain(q, gradient)
        has_pull = pull > rounding
        is_lost = has_pull and left_to_train > DRIFT * pull
        params = q.mean
        if has_pull and not is_lost:
            if preconditioner is None:
                preconditioner = _preconditioner(task.quiet, q, n_removed=len(indices))
            start = replace(
                at_mean,
                value=at_mean.value - loss,
                gradient=add(at_mean.gradient, -1.0, gradient),
            )
            params = _descended(task, q, index, start, preconditioner, passes)
        outputs.append(_output_at(task, params, index))
        lost.append(is_lost)
    return Removals(outputs, torch.tensor(lost, dtype=torch.bool))


def _descended(
    task: Task,
    q: Posterior,
    index: Tensor,
    start: Point,
    preconditioner: Preconditioner,
    passes: int,
) -> Tree:
    """The weights after a descent without one example, from its objective at ``start``."""
    objective = objective_after(task, q.prior, leaving=index)
    descent = Descent(objective, preconditioner.form, start, enough=preconditioner.enough)
    descent.run(passes)
    return descent.point.params


def _output_at(task: Task, params: Mapping[str, Tensor], index: Tensor) -> Tensor:
    """The output of one example at these weights, on the CPU."""
    with torch.no_grad(), task.evaluation():
        output, _ = task.run(task.fetch(index), params, index)
    return output.cpu()


def _relative_rounding(q: Posterior) -> float:
    """The relative rounding error of the objective, that of the weights' dtype."""
    return torch.finfo(next(iter(q.mean.values())).dtype).eps


class Preconditioner(NamedTuple):
    """A precision for descents.

    Attributes:
        form: the precision.
        enough: the share of the first decrement at which a descent ends.
    """

    form: Structure
    enough: float


def _preconditioner(task: Task, q: Posterior, n_removed: int) -> Preconditioner:
    """Σ_i J_iᵀ Λ_i J_i + diag(δ) as a matrix where it pays off, else the posterior's precision."""
    n_parameters = sum(m.numel() for m in q.mean.values())
    if task.likelihood.is_sequence or n_parameters > DENSE:
        return Preconditioner(q.form, ENOUGH_BY_POSTERIOR)
    if n_outputs(task, q.mean) * n_parameters > OPERATIONS_SAVED * n_removed:
        return Preconditioner(q.form, ENOUGH_BY_POSTERIOR)
    some_weight = next(iter(q.mean.values()))
    zeros = some_weight.new_zeros(n_parameters, n_parameters)
    form = Full(zeros, {name: tuple(m.shape) for name, m in q.mean.items()})
    for chunk in chunks(task, q.mean, label="curvature"):
        form = form.add(chunk.terms(curvature_root(chunk)))
    return Preconditioner(form.plus_prior(q.prior), ENOUGH_BY_CURVATURE)
