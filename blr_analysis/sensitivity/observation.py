"""Everything of chosen training examples in one pass: loss, left-out loss, influence, leverage.

And a held-out set beside them, under the same model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunk, Chunking, chunks, n_outputs, predict
from blr_analysis.checks import instance
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.sensitivity.corrections import (
    bound_of,
    left_out_by,
    prediction_variance,
    self_influence,
    taken,
)
from blr_analysis.sensitivity.scores import MOST_OUTPUTS
from blr_analysis.task import Task

MEASURES = ("deviation", "self_influence", "leverage", "loss", "left_out_loss")


@dataclass(frozen=True)
class Observation:
    """Measures ``[n]`` of the examples, on the CPU; as in :class:`Scores` and :class:`LeaveOneOut`.

    Where there are too many outputs for V_i, deviation and leverage are NaN, and the left-out loss
    is ℓ_i + g_iᵀ Σ g_i, to first order. ``correct`` is None for regression.
    """

    loss: Tensor
    left_out_loss: Tensor
    deviation: Tensor
    self_influence: Tensor
    leverage: Tensor
    correct: Tensor | None
    left_out_correct: Tensor | None


def observe(
    task: Task,
    q: Posterior,
    indices: Tensor,
    correction: str,
    chunking: Chunking,
) -> Observation:
    """Watch these examples of the task at the posterior's mean."""
    variance = (c := n_outputs(task, q.mean)) <= MOST_OUTPUTS
    word = taken(q, correction)
    columns = c if variance else 1
    passes = chunks(task, q.mean, chunking, columns=columns, indices=indices, label="monitor")
    parts = [_with_variance(task, q, chunk, word) if variance else _without(task, q, chunk)
             for chunk in passes]  # fmt: skip
    f, y, after, influence, levers = (torch.cat(p) for p in zip(*parts, strict=True))
    likelihood = task.likelihood.at(indices)
    loss = likelihood.nll(f, y)
    nothing = torch.full_like(loss, torch.nan)
    return Observation(
        loss=loss,
        left_out_loss=likelihood.nll(after, y) if variance else loss + influence,
        deviation=likelihood.distance(f, after) if variance else nothing,
        self_influence=influence,
        leverage=levers if variance else nothing,
        correct=likelihood.correct(f, y),
        left_out_correct=likelihood.correct(after, y) if variance else None,
    )


def _with_variance(task: Task, q: Posterior, chunk: Chunk, word: str) -> tuple[Tensor, ...]:
    likelihood, f, y = chunk.likelihood, chunk.outputs, chunk.targets
    e = likelihood.error(f, y)
    v = prediction_variance(q, chunk)
    influence = torch.einsum("bc,bcd,bd->b", e, v, e)
    after, levers, _ = left_out_by(word, f, y, v, likelihood, bound_of(q))
    return tuple(t.cpu() for t in (f, y, after, influence, levers))


def _without(task: Task, q: Posterior, chunk: Chunk) -> tuple[Tensor, ...]:
    e = chunk.likelihood.error(chunk.outputs, chunk.targets)
    influence = self_influence(q, chunk, e)
    f = chunk.outputs.cpu()
    return f, chunk.targets.cpu(), f, influence.cpu(), influence.cpu()


def check_outputs(task: Any, who: str) -> None:
    """Raise :class:`InputError` unless this is a task with one output vector per example."""
    instance("task", task, Task, "a blr_analysis.Task")
    if task.likelihood.is_sequence:
        raise InputError(
            f"{who} takes one output vector per example, the likelihood {task.likelihood.name!r} "
            "has one per token; use leave_one_out(task, posterior) instead"
        )


def check_test(test: Any, task: Task) -> None:
    """Raise unless the held-out examples can be run and judged as the training examples are.

    Raises:
        InputError: no task, or one of another likelihood.
        PosteriorError: its model has other parameters.
    """
    instance("test", test, Task, "a blr_analysis.Task with the examples to measure on")
    mine, theirs = task.likelihood, test.likelihood
    if not mine.judged_by(theirs):
        raise InputError(
            f"the test task has the likelihood {theirs!r}, the training task {mine!r}; build them "
            "with the same one"
        )
    shapes = [{n: p.shape for n, p in t.model.named_parameters()} for t in (task, test)]
    if shapes[0] != shapes[1]:
        raise PosteriorError(
            "the test task is of another model: its parameters have other names or shapes; build "
            "it with the model that is trained"
        )


def measured(
    name: str, task: Task | None, params: Mapping[str, Tensor], progress: bool | None = False
) -> dict[str, float]:
    """``{name}_nll`` (nats per example) and ``{name}_accuracy``; NaN where there is none."""
    if task is None:
        return {f"{name}_nll": math.nan, f"{name}_accuracy": math.nan}
    outputs, targets = predict(task, params, progress=progress)
    likelihood = task.likelihood
    return {
        f"{name}_nll": mean(likelihood.nll(outputs, targets)),
        f"{name}_accuracy": mean(likelihood.correct(outputs, targets)),
    }


def mean(values: Tensor | None) -> float:
    """In float64; NaN of nothing."""
    return math.nan if values is None else float(values.double().nanmean())
