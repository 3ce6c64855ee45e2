"""Which α? Merges over a grid of weights are tried on validation tasks; nothing is written."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from blr_analysis.backprop.loss import Evaluation, evaluated
from blr_analysis.checks import one_of
from blr_analysis.errors import InputError, ModelError, told_as
from blr_analysis.merging.at_weights import (
    State,
    at_weights,
    in_order,
    named,
    named_tasks,
    state_of,
)
from blr_analysis.merging.folders import collect
from blr_analysis.merging.job import Job, job_of, refuse_idle
from blr_analysis.merging.methods import Method, default_weights, method_of
from blr_analysis.merging.plan import make_plan
from blr_analysis.progress import track
from blr_analysis.task import Task
from blr_analysis.views import Plottable, Tabular

STEPS = tuple(k / 10 for k in range(16))  # weights from 0 to 1.5, unless the user gives others
SMALLEST_TOTAL = 1e-12  # a smaller sum of weights divides nothing
DECIMALS = 6  # points whose losses agree to so many decimals are equal
Weights = tuple[float, ...]


@dataclass(frozen=True)
class MergePoint:
    """One merge that was tried.

    Attributes:
        method: the name of the method.
        weights: α_t, in the order of the models.
        nlls: the mean loss on each validation task, nats per example; infinite where the merge
            failed.
        accuracies: the fraction of correct predictions on each task; NaN for regression.
        failure: why the merge could not be run; "" where it could.
    """

    method: str
    weights: Weights
    nlls: tuple[float, ...]
    accuracies: tuple[float, ...]
    failure: str = ""

    @property
    def nll(self) -> float:
        """The mean NLL over the tasks; each counts the same, whatever its size."""
        return sum(self.nlls) / len(self.nlls)

    @property
    def accuracy(self) -> float:
        """The mean accuracy over the classification tasks; NaN where there are none."""
        numbers = [accuracy for accuracy in self.accuracies if not math.isnan(accuracy)]
        return sum(numbers) / len(numbers) if numbers else math.nan


@dataclass(frozen=True)
class MergeCurve(Tabular, Plottable):
    """The result of :func:`blr_analysis.merge_curve`.

    Attributes:
        points: every merge that was tried, in order.
        models: the names of the models, in the order of a point's weights.
        tasks: the names of the tasks, in the order of a point's losses.
        shape: the weights that were tried: "shared" (one α for all models), "grid" (all
            combinations) or "rows" (as listed).
    """

    points: Sequence[MergePoint]
    models: tuple[str, ...]
    tasks: tuple[str, ...]
    shape: str

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the methods that were tried."""
        return tuple(dict.fromkeys(point.method for point in self.points))

    @cached_property
    def best(self) -> MergePoint:
        """The point with the smallest mean NLL over the tasks, each of which counts the same.

        Among points that are equal to six decimals the accuracy decides, then the smallest Σ|α|,
        which is nearest to the base.
        """
        return self.best_of()

    def best_of(self, method: str | None = None) -> MergePoint:
        """The best point of one method, or of all.

        Raises:
            InputError: a method that was not tried.
        """
        if method is not None:
            one_of("method", method, self.methods)
        points = [point for point in self.points if method in (None, point.method)]
        return min(points, key=_rank)

    @property
    def weights(self) -> dict[str, float]:
        """α_t of the best point, by model."""
        return dict(zip(self.models, self.best.weights, strict=True))

    def __len__(self) -> int:
        return len(self.points)

    def __repr__(self) -> str:
        best = self.best
        weights = ", ".join(f"{model}: {alpha:.4g}" for model, alpha in self.weights.items())
        facts = [f"{best.method} with {{{weights}}}", f"NLL {best.nll:.4f}"]
        if not math.isnan(best.accuracy):
            facts.append(f"accuracy {best.accuracy:.4f}")
        text = f"best of {len(self)}: {', '.join(facts)}"
        failed = sum(bool(point.failure) for point in self.points)
        if failed:
            text += f"; {failed} could not be run"
        return f"MergeCurve({text})"


def _rank(point: MergePoint) -> tuple[float, float, float]:
    """The key by which points are compared, the smaller the better: loss, −accuracy, Σ|α|."""
    loss = math.inf
    if math.isfinite(point.nll):
        loss = round(point.nll, DECIMALS)
    negative_accuracy = math.inf
    if not math.isnan(point.accuracy):
        negative_accuracy = -round(point.accuracy, DECIMALS)
    length = sum(abs(weight) for weight in point.weights)
    return loss, negative_accuracy, length


def _grid(weights: Any, models: Sequence[str]) -> tuple[str, list[Weights]]:
    """The shape and the rows of weights that the argument of :func:`merge_curve` describes."""
    if isinstance(weights, Mapping):
        axes = [_table(axis).tolist() for axis in in_order(weights, models, "weights")]
        return "grid", list(itertools.product(*axes))
    table = _table(STEPS if weights is None else weights)
    if table.ndim == 1:
        different_weights = dict.fromkeys(table.tolist())
        return "shared", [(weight,) * len(models) for weight in different_weights]
    if table.shape[1] != len(models):
        raise InputError(f"a row of weights needs one number for each of {len(models)} models")
    different_rows = dict.fromkeys(tuple(row) for row in table.tolist())
    return "rows", list(different_rows)


def _table(values: Any) -> torch.Tensor:
    """The numbers as a tensor, ``[K]`` or ``[K, T]``, which must be finite."""
    with told_as(InputError, "weights must be numbers, rows of numbers, or a dict of them"):
        table = torch.as_tensor(values, dtype=torch.float64)
    is_list_or_table = table.ndim in (1, 2) and table.numel() > 0
    if not is_list_or_table or not bool(torch.isfinite(table).all()):
        raise InputError(f"weights must be at least one finite number, got {values!r:.60}")
    return table


def evaluations(tasks: Mapping[str, Task], state: State, who: str) -> list[Evaluation]:
    """Losses and correct predictions on each task at a merge's weights."""
    losses = []
    for task in tasks.values():
        with at_weights(task, state, f"the merge by {who!r}") as params:
            losses.append(evaluated(task, params)[0])
    return losses


def point_of(name: str, weights: Weights, losses: Sequence[Evaluation]) -> MergePoint:
    """A merge with its losses on each task."""
    nlls = tuple(loss.nll for loss in losses)
    accuracies = tuple(math.nan if loss.accuracy is None else loss.accuracy for loss in losses)
    return MergePoint(name, weights, nlls, accuracies)


@torch.inference_mode(False)
def merge_curve(
    base: Any,
    models: Any,
    tasks: Any,
    *,
    method: Any = "gradient_matching",
    weights: Any = None,
    precisions: Any = None,
    base_precision: Any = None,
    progress: bool | None = None,
    **options: Any,
) -> MergeCurve:
    """Merge with many weights α, and find those that do best on validation tasks.

    One merge at a time is made in memory, run and forgotten. No checkpoint is written.

    Args:
        base: θ_0: a state dict, a module, or a folder of safetensors, which is read into memory.
        models: the θ_t, a list or a dict by name; each a state dict, a module or a folder.
        tasks: validation tasks, a list or a dict by the names that tables show. Their data should
            be held out: on training data, the largest α wins too often. Tasks may share one model,
            which gives the architecture, not the weights.
        method: the name of a merge method, or a list of several that are compared.
        weights: the α that are tried.

            * numbers: each of them is one α for all models;
            * rows of T numbers: each row is the α of the T models;
            * a dict model → numbers: all combinations;
            * None: 0, 0.1, …, 1.5 for all models, and the method's own default.
        precisions, base_precision: H_t and H_0, as in :func:`blr_analysis.merge`.
        options: further arguments of :func:`blr_analysis.merge`: ``delta``, ``normalize``,
            ``missing_precision``, ``n_data``, ``dtype``. A method gets those that it takes.

    "fisher" and "linear" depend on the ratios of the α_t alone. So does gradient matching, if
    H_0 + δ is small beside the H_t. One α for all models then draws a flat line; use rows.

    A merge that overflows (a negative α can bring H̄ close to 0) has an infinite NLL, and the reason
    is in the table. It is an error only if no merge can be run.

    Returns:
        A curve with ``best`` (a point: method, weights, nll, accuracy), its ``weights`` by model,
        ``table``, and ``plot()``: curves, or a map for two models.

    Raises:
        InputError: no weights, not as many weights as models, NaN or inf, an unknown method or
            option, or state dicts that do not belong to the tasks' models.
        ModelError: no merge could be run, or a task cannot be run (:meth:`Task.run`).

    Example:
        >>> import blr_analysis as blr
        >>> X, y = torch.eye(2), torch.tensor([1.0, 2.0])
        >>> task = blr.Task(torch.nn.Linear(2, 1, bias=False), (X, y), likelihood="gaussian")
        >>> base, a, b = ({"weight": torch.tensor([w])} for w in ([0., 0.], [1., 0.], [0., 2.]))
        >>> curve = merge_curve(base, [a, b], task, method="task_arithmetic",
        ...                     weights=[0.0, 0.5, 1.0, 1.5], progress=False)
        >>> curve.best.weights
        (1.0, 1.0)
    """
    tasks_by_name = named_tasks(tasks)
    base_state = state_of(base, "base")
    states = {
        name: state_of(model, f"models[{name!r}]")
        for name, model in named(models, "models").items()
    }
    names = tuple(states)
    shape, rows = _grid(weights, names)
    arguments = {"base_precision": base_precision, **options, "precisions": None}
    if precisions is not None:
        arguments["precisions"] = in_order(precisions, names)
    methods = _methods(method, options)
    # Tasks that cannot evaluate the base are refused here, so that later errors are the merges'.
    evaluations(tasks_by_name, base_state, "base")
    trials = _Trials(base_state, list(states.values()), tasks_by_name, arguments, progress)
    points: list[MergePoint] = []
    for name, row in methods.items():
        tried_rows = rows
        if weights is None:
            default = tuple(default_weights(name, len(names)))
            tried_rows = sorted({*rows, default})
        points += trials.points(row, tried_rows)
    if all(point.failure for point in points):
        raise ModelError(
            f"none of the {len(points)} merges could be run; the first: {points[0].failure}"
        )
    return MergeCurve(tuple(points), names, tuple(tasks_by_name), shape)


@dataclass(frozen=True)
class _Trials:
    """Merges that differ in their method and weights alone.

    Attributes:
        base: θ_0.
        models: θ_t.
        tasks_by_name: the validation tasks, by name.
        arguments: further arguments of :func:`blr_analysis.merge`.
        progress: whether a bar is shown.
    """

    base: State
    models: list[State]
    tasks_by_name: Mapping[str, Task]
    arguments: Mapping[str, Any]
    progress: bool | None

    def points(self, row: Method, rows: Sequence[Weights]) -> list[MergePoint]:
        """The points of one method, one for each row of weights."""
        arguments = {key: value for key, value in self.arguments.items() if row.takes(key)}
        label = f"merges: {row.name}"
        points = []
        for weights in track(rows, total=len(rows), label=label, show=self.progress):
            job = job_of(self.base, self.models, row.name, weights=list(weights), **arguments)
            points.append(_point_of_job(job, weights, self.tasks_by_name))
        return points


def _methods(method: Any, options: Mapping[str, Any]) -> dict[str, Method]:
    """The methods to compare, by name; every option must be for one of them."""
    names = method if isinstance(method, list | tuple) else [method]
    rows = {name: method_of(name) for name in names}
    if not rows or len(rows) != len(names):
        raise InputError("method must name at least one merge method, each once")
    refuse_idle(list(rows.values()), options)
    return rows


def _point_of_job(job: Job, alphas: Weights, tasks_by_name: Mapping[str, Task]) -> MergePoint:
    """The point of one merge, which is made, run on every task, and forgotten."""
    name = job.method
    total = sum(alphas)
    try:
        divides = job.divides or job.row.divides_by_precisions
        if divides and abs(total) <= SMALLEST_TOTAL:
            raise ModelError(f"the weights sum to {total:g}")
        state = collect(make_plan(job), False)
        return point_of(name, alphas, evaluations(tasks_by_name, state, name))
    except ModelError as error:
        nlls = (math.inf,) * len(tasks_by_name)
        accuracies = (math.nan,) * len(tasks_by_name)
        return MergePoint(name, alphas, nlls, accuracies, failure=str(error))
