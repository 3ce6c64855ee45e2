"""Will a merge work? How far the merged weights are from where each task's gradient should be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.loss import Evaluation, evaluated, evaluated_gradient
from blr_analysis.backprop.tree import Tree, add, dot, norm
from blr_analysis.errors import BLRError, InputError
from blr_analysis.merging.at_weights import (
    State,
    at_weights,
    in_order,
    named,
    named_tasks,
    state_of,
)
from blr_analysis.merging.formula import is_precision
from blr_analysis.posterior import Posterior
from blr_analysis.progress import track
from blr_analysis.task import Task
from blr_analysis.views import Plottable, Tabular


@dataclass(frozen=True)
class GradientMismatch(Tabular, Plottable):
    """The result of :func:`gradient_mismatch`.

    Attributes:
        rows: one mapping for each merge and task, the rows of ``table``.
        joint: by merge, ‖Σ_t ∇ℓ̄_t(θ_merged)‖. It is 0 at an optimum of all tasks' data together,
            even if single tasks have large gradients there.
        tensors: by merge and task, the part of each tensor in ``gap_by_gradient``, largest first.
            Its first tensors are those where the merge goes wrong.
    """

    rows: Sequence[Mapping[str, Any]]
    joint: Mapping[str, float]
    tensors: Mapping[tuple[str, str], Mapping[str, float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def totals(self, column: str = "mismatch") -> dict[str, float]:
        """One number per merge: the sum of a column over the tasks.

        Raises:
            InputError: there is no such column, or it does not hold numbers.
        """
        totals: dict[str, float] = {}
        for row in self.rows:
            if not isinstance(row.get(column), int | float):
                raise InputError(f"column must be one of numbers, got {column!r}")
            totals[row["merge"]] = totals.get(row["merge"], 0.0) + row[column]
        return totals

    def __repr__(self) -> str:
        gaps = self.totals("gap")
        merges = [
            f"{merge}: mismatch {total:.4g}, loss gap {gaps[merge]:.4g} nats"
            for merge, total in self.totals().items()
        ]
        tasks = len(self) // max(1, len(gaps))
        return f"GradientMismatch({tasks} tasks; {'; '.join(merges)})"


@torch.inference_mode(False)
def gradient_mismatch(
    tasks: Any,
    merged: Any,
    *,
    models: Any = None,
    precisions: Any = None,
    tests: Any = None,
    progress: bool | None = None,
) -> GradientMismatch:
    """How much a merge disturbs each task: its gradient at the merge against that at its own θ_t.

        mismatch_t = ‖∇ℓ̄_t(θ_merged) − ∇ℓ̄_t(θ_t)‖,      ℓ̄_t(θ) = Σ_{i in task t} ℓ_i(θ)

    Averaging goes wrong by exactly these differences. Let each θ_t be an optimum of ℓ̄_t plus
    ½‖θ − θ_0‖² in the metric H_0. Then the optimum θ* of all losses together differs from task
    arithmetic, θ_TA = θ_0 + Σ_t α_t(θ_t − θ_0), by

        θ* − θ_TA = −Σ_t α_t H_0⁻¹ [∇ℓ̄_t(θ*) − ∇ℓ̄_t(θ_t)]

    A merge with smaller mismatches disturbs its tasks less. Tasks that contradict each other leave
    some mismatch in every merge: at the optimum of all data together, the sum of their gradients
    is 0, and ``joint`` measures this sum. ℓ̄_t is the loss of the task's data alone. The prior
    belongs to all tasks together, and is not part of it.

    The result also holds losses: the gap ℓ̄_t(θ_merged) − ℓ̄_t(θ_t), and what the gap would be if
    the loss were quadratic between the two points,
    (θ_merged − θ_t)ᵀ(∇ℓ̄_t(θ_merged) + ∇ℓ̄_t(θ_t))/2. Where the two disagree, the merge is too far
    from θ_t for the curvature there to hold, and no precision can make the merge right.

    Args:
        tasks: the tasks with their training data, a list or a dict by name. θ_t are the weights of
            the task's model, unless ``models`` is given. Tasks may share one model.
        merged: the merge, with the names of the tasks' model: a state dict, a module, a folder of
            safetensors, or the result of :func:`blr_analysis.merge`. Several merges are a dict by
            name. A merge may also be a function without arguments that returns one. It is called
            (and a folder is read) only when its turn comes, so that one merge at a time is in
            memory.
        models: the fine-tuned θ_t, in the same forms, where the tasks' models hold other weights.
        precisions: H_t for each task, tensors by parameter name or a posterior. Two columns are
            added: the gap that they predict, ∇ℓ̄_t(θ_t)ᵀΔ + ½ ΔᵀH_tΔ with Δ = θ_merged − θ_t; and
            the mismatch v in their metric, √(Σ v²/S_t), in √nats. S_t is H_t, or a posterior's
            precision with its prior. The metric is infinite where S_t is 0 and gradients differ.
            If S_t = H_t is the curvature and θ_t an optimum, the predicted gap is half the square
            of the mismatch in the metric.
        tests: tasks with held-out data, by the same names; their losses are added. They are run at
            the same weights, in their own models.

    Gradients are those of the trainable parameters. A state dict may also name frozen parameters
    and buffers (BatchNorm statistics); they are put into the model meanwhile. Weights are converted
    to the model's dtype. Memory: θ_t and one gradient for every task.

    Returns:
        One row for each merge and task, with ``table`` and ``plot()`` (mismatch against loss gap).

    Raises:
        InputError: weights of other names or shapes, NaN or inf in them; ``models``,
            ``precisions`` or ``tests`` that do not belong to the tasks; several tasks with one
            model and no ``models``.
        StorageError: a folder that cannot be read.
        ModelError: BatchNorm in training mode, outputs that are not finite.

    Source: Daheim et al., "Model Merging by Uncertainty-Based Gradient Matching", ICLR 2024,
    Sec. 3 and Fig. 1.

    Example:
        >>> import blr_analysis as blr
        >>> X = torch.eye(2)
        >>> a = blr.Task(torch.nn.Linear(2, 1, bias=False), (X, X[:, 0]), likelihood="gaussian")
        >>> own = {"weight": torch.tensor([[1.0, 0.0]])}                # the optimum of the task
        >>> result = gradient_mismatch(a, {"weight": torch.tensor([[1.0, 2.0]])}, models=[own])
        >>> result.table[["mismatch", "gap", "gap_by_gradient"]].values.tolist()
        [[2.0, 2.0, 2.0]]
    """
    tasks = named_tasks(tasks)
    merges = _named_merges(merged)
    lookouts = _lookouts(tasks, models, precisions, tests)
    rows: list[Mapping[str, Any]] = []
    tensors: dict[tuple[str, str], Mapping[str, float]] = {}
    joint: dict[str, float] = {}
    for label in track(list(merges), total=len(merges), label="merges", show=progress):
        state = _state(merges[label], f"merged ({label})")
        total: Tree = {}
        for lookout in lookouts:
            disturbance = lookout.disturbed(state, f"merged ({label})")
            rows.append({"merge": label, "task": lookout.name, **disturbance.values})
            tensors[label, lookout.name] = disturbance.parts
            gradient = disturbance.gradient
            total = add(total, 1.0, gradient) if total else gradient
        joint[label] = norm(total)
        del state
    return GradientMismatch(tuple(rows), joint, tensors)


def _named_merges(merged: Any) -> dict[str, Any]:
    """The merges by name; a mapping of tensors is one merge."""
    is_state = isinstance(merged, Mapping) and any(isinstance(v, Tensor) for v in merged.values())
    if is_state or not isinstance(merged, Mapping):
        merged = {"merged": merged}
    return named(merged, "merged")


def _state(merge: Any, name: str) -> State:
    """The weights of a merge; a function is called for it."""
    if callable(merge) and not isinstance(merge, torch.nn.Module):
        merge = merge()
    return state_of(merge, name)


@dataclass(frozen=True)
class _View:
    """A task at some weights.

    Attributes:
        weights: the trainable parameters.
        gradient: ∇ℓ̄_t.
        losses: the losses on the task's data.
        test_losses: the losses on its held-out data; None without these.
    """

    weights: Tree
    gradient: Tree
    losses: Evaluation
    test_losses: Evaluation | None


@dataclass(frozen=True)
class _Metric:
    """A precision, which measures changes of gradients and of weights.

    Attributes:
        data: H_t.
        whole: S_t: H_t, with the prior of a posterior.
    """

    data: State
    whole: State

    def length(self, change: Tree) -> float:
        """√(Σ v²/S_t) of a change v of the gradient; infinite where S_t is 0 and v is not."""
        total = 0.0
        for name, values in change.items():
            squares = values.double().square()
            ratios = torch.where(squares > 0, squares / self.whole[name].to(squares), 0.0)
            total += float(ratios.sum())
        return math.sqrt(total)

    def curvature(self, step: Tree) -> float:
        """ΔᵀH_tΔ of a step Δ of the weights."""
        total = 0.0
        for name, values in step.items():
            squares = values.double().square()
            total += float((self.data[name].to(squares) * squares).sum())
        return total


@dataclass(frozen=True)
class _Disturbance:
    """The effect of a merge on a task.

    Attributes:
        values: the row of the mismatch table.
        parts: by tensor, its part in ``gap_by_gradient``.
        gradient: ∇ℓ̄_t at the merge.
    """

    values: dict[str, Any]
    parts: dict[str, float]
    gradient: Tree


@dataclass
class _Lookout:
    """A task with its fine-tuned weights, to which merges are compared.

    Attributes:
        name: the task's name.
        task: its training data and model.
        test: its held-out data; None: there are none.
        model: θ_t.
        metric: its precision; None: it has none.
        home: the task at θ_t.
    """

    name: str
    task: Task
    test: Task | None
    model: State
    metric: _Metric | None

    def __post_init__(self) -> None:
        self.home = self._view(self.model, f"the fine-tuned model of task {self.name!r}")

    def _view(self, state: State, who: str) -> _View:
        """The task at these weights, which messages call ``who``."""
        test_losses = None
        try:
            with at_weights(self.task, state, who) as params:
                weights = {name: value.detach().clone() for name, value in params.items()}
                losses, gradient = evaluated_gradient(self.task, params)
            if self.test is not None:
                with at_weights(self.test, state, f"{who}, in its test task,") as params:
                    test_losses = evaluated(self.test, params)[0]
        except BLRError as error:
            raise type(error)(f"task {self.name!r}: {error}") from error
        return _View(weights, gradient, losses, test_losses)

    def disturbed(self, state: State, who: str) -> _Disturbance:
        """The task at a merge compared with the task at θ_t.

        The gap that H_t predicts is ∇ℓ̄_t(θ_t)ᵀΔ + ½ ΔᵀH_tΔ.
        """
        home = self.home
        merged = self._view(state, who)
        count = self.task.n_data
        step = add(merged.weights, -1.0, home.weights)
        change = add(merged.gradient, -1.0, home.gradient)
        mismatch = norm(change)
        gap = merged.losses.loss - home.losses.loss
        slope = dot(home.gradient, step)
        values = {
            "n_data": count,
            "mismatch": mismatch,
            "mismatch_per_example": mismatch / count,
            "mismatch_in_metric": math.nan,
            "gradient_own": norm(home.gradient),
            "gradient_merged": norm(merged.gradient),
            "distance": norm(step),
            "gap": gap,
            "gap_per_example": gap / count,
            "gap_by_gradient": (dot(merged.gradient, step) + slope) / 2,
            "gap_by_precision": math.nan,
        }
        if self.metric is not None:
            values["mismatch_in_metric"] = self.metric.length(change)
            values["gap_by_precision"] = slope + self.metric.curvature(step) / 2
        values |= _scores("nll_own", "accuracy_own", home.losses)
        values |= _scores("nll_merged", "accuracy_merged", merged.losses)
        values |= _scores("test_nll_own", "test_accuracy_own", home.test_losses)
        values |= _scores("test_nll_merged", "test_accuracy_merged", merged.test_losses)
        return _Disturbance(values, _parts(merged, home, step), merged.gradient)


def _parts(merged: _View, home: _View, step: Tree) -> dict[str, float]:
    """By tensor, its part in Δᵀ(∇ℓ̄_t(θ_merged) + ∇ℓ̄_t(θ_t))/2, largest first."""
    slopes = add(merged.gradient, 1.0, home.gradient)
    parts = {name: float((slopes[name] * step[name]).sum()) / 2 for name in step}
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def _scores(nll: str, accuracy: str, losses: Evaluation | None) -> dict[str, float]:
    """Mean loss and accuracy under these names; NaN where they do not exist."""
    scores = {nll: math.nan, accuracy: math.nan}
    if losses is not None:
        scores[nll] = losses.nll
    if losses is not None and losses.accuracy is not None:
        scores[accuracy] = losses.accuracy
    return scores


def _lookouts(
    tasks: Mapping[str, Task], models: Any, precisions: Any, tests: Any
) -> list[_Lookout]:
    """Every task with its fine-tuned weights, its precision and its held-out data."""
    names = list(tasks)
    homes = _homes(tasks, models)
    metrics: list[Any] = [None] * len(names)
    if precisions is not None:
        metrics = in_order(precisions, names)
    test_tasks: list[Any] = [None] * len(names)
    if tests is not None:
        test_tasks = in_order([tests] if isinstance(tests, Task) else tests, names, "tests")
    return [
        _Lookout(name, tasks[name], test, homes[name], _metric(name, metric, tasks[name]))
        for name, test, metric in zip(names, test_tasks, metrics, strict=True)
    ]


def _homes(tasks: Mapping[str, Task], models: Any) -> dict[str, State]:
    """θ_t by task, from ``models`` or else from the tasks' own models."""
    task_models = [task.model for task in tasks.values()]
    if models is None and len({id(model) for model in task_models}) < len(tasks):
        raise InputError(
            "several tasks share one model: pass the fine-tuned weights as models=[state dicts]"
        )
    if models is not None:
        task_models = in_order(models, list(tasks), "models")
    return {
        name: state_of(model, f"models[{name!r}]")
        for name, model in zip(tasks, task_models, strict=True)
    }


def _metric(name: str, precision: Any, task: Task) -> _Metric | None:
    """The metric of a precision, checked against the task's model."""
    if precision is None:
        return None
    if isinstance(precision, Posterior):
        whole = {key: precision.precision(key) for key in precision.mean}
        prior = precision.prior
        data = {key: (values - prior.of(key)).clamp_min(0) for key, values in whole.items()}
    else:
        data = whole = dict(state_of(precision, f"precisions[{name!r}]"))
    for key, parameter in task.parameters().items():
        has_shape = key in data and data[key].shape == parameter.shape
        if not has_shape or not is_precision(data[key]):
            raise InputError(
                f"precisions[{name!r}] does not fit: {key!r} is {tuple(parameter.shape)} in the "
                "model: give finite numbers of that shape, at least 0"
            )
    return _Metric(data, whole)
