"""One task at its own weights and at a merge: gradients, distances, losses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.loss import Evaluation, evaluated, evaluated_gradient
from blr_analysis.errors import BLRError
from blr_analysis.merging.at_weights import State, at_weights
from blr_analysis.task import Task

Tree = dict[str, Tensor]


@dataclass(frozen=True)
class Home:
    """A task at its own fine-tuned weights, kept while merges come and go."""

    weights: Tree
    gradient: Tree
    here: Evaluation
    there: Evaluation | None  # on held-out data


@dataclass(frozen=True)
class Forecast:
    """What a precision says of a task: H_t of its data, and S_t, with the prior if it knows one."""

    data: State
    metric: State


def at_home(
    name: str, task: Task, test: Task | None, state: State, *, progress: bool | None = None
) -> Home:
    """Weights, gradient and losses of a task at θ_t.

    Raises:
        InputError, ModelError: as :func:`~blr_analysis.merging.at_weights.at_weights`.
    """
    who = f"the fine-tuned model of task {name!r}"
    with _told(name), at_weights(task, state, who) as params:
        weights = {n: p.detach().clone() for n, p in params.items()}
        here, gradient = evaluated_gradient(task, params, progress=progress)
    return Home(weights, gradient, here, _held_out(name, test, state, who, progress))


def disturbance(
    name: str,
    task: Task,
    test: Task | None,
    home: Home,
    merged: State,
    who: str,
    forecast: Forecast | None,
    *,
    progress: bool | None = None,
) -> tuple[dict[str, Any], Tree]:
    """How far a merge takes one task from home, by the keys of the mismatch table; and ∇ℓ̄_t there.

    Args:
        name, task, test: the task, and its held-out data.
        home: the same task at θ_t.
        merged: θ_merged; ``who`` names it in messages.
        forecast: of its precision, if there is one.

    Raises:
        InputError, ModelError: as :func:`~blr_analysis.merging.at_weights.at_weights`.
    """
    with _told(name), at_weights(task, merged, who) as params:
        here, gradient = evaluated_gradient(task, params, progress=progress)
        step = {n: p.detach() - home.weights[n] for n, p in params.items()}
    there = _held_out(name, test, merged, who, progress)
    change = {n: g - home.gradient[n] for n, g in gradient.items()}
    middle = {n: (g + home.gradient[n]) / 2 for n, g in gradient.items()}
    mismatch, gap = norm(change), here.loss - home.here.loss
    values = {
        "n_data": task.n_data,
        "mismatch": mismatch,
        "mismatch_per_example": mismatch / task.n_data,
        "mismatch_in_metric": norm(change, forecast.metric) if forecast else math.nan,
        "gradient_own": norm(home.gradient),
        "gradient_merged": norm(gradient),
        "distance": norm(step),
        "gap": gap,
        "gap_per_example": gap / task.n_data,
        "gap_by_gradient": _dot(middle, step),
        "gap_by_precision": _foretold(home.gradient, forecast.data, step) if forecast else math.nan,
        **_losses("", home.here, here),
        **_losses("test_", home.there, there),
    }
    return values, gradient


def _losses(prefix: str, own: Evaluation | None, merged: Evaluation | None) -> dict[str, float]:
    pairs = (("own", own), ("merged", merged))
    nll = {f"{prefix}nll_{at}": math.nan if m is None else m.nll for at, m in pairs}
    right = {at: None if m is None else m.accuracy for at, m in pairs}
    return {
        **nll,
        **{f"{prefix}accuracy_{at}": math.nan if a is None else a for at, a in right.items()},
    }


def _held_out(
    name: str, test: Task | None, state: State, who: str, progress: bool | None
) -> Evaluation | None:
    if test is None:
        return None
    with _told(name), at_weights(test, state, f"{who}, in its test task,") as params:
        return evaluated(test, params, progress=progress)[0]


@contextmanager
def _told(task: str) -> Iterator[None]:
    """Errors from inside name the task that they come from."""
    try:
        yield
    except BLRError as error:
        raise type(error)(f"task {task!r}: {error}") from error


def norm(tree: Tree, metric: State | None = None) -> float:
    """√Σ v², or √Σ v²/H, infinite where H is 0 and v is not; all in float64."""
    total = 0.0
    for n, v in tree.items():
        squares = v.double().square()
        if metric is not None:
            squares = torch.where(squares > 0, squares / metric[n].to(squares), 0.0)
        total += float(squares.sum())
    return math.sqrt(total)


def _dot(a: Tree, b: Tree) -> float:
    return sum(float((x.double() * b[n].double()).sum()) for n, x in a.items())


def _foretold(gradient: Tree, h: State, step: Tree) -> float:
    bend = sum(
        float((h[n].to(d.device).double() * d.double().square()).sum()) for n, d in step.items()
    )
    return _dot(gradient, step) + bend / 2
