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
    """What :func:`gradient_mismatch` found.

    Attributes:
        rows: one mapping per merge and task; ``table`` is made of them.
        joint: by merge, ‖Σ_t ∇ℓ̄_t(θ_merged)‖: 0 where all tasks' data together have an optimum,
            however hard the single tasks pull there.
        tensors: by merge and task, the part of each tensor in ``gap_by_gradient``, largest first:
            where the merge goes wrong.
    """

    rows: Sequence[Mapping[str, Any]]
    joint: Mapping[str, float]
    tensors: Mapping[tuple[str, str], Mapping[str, float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def totals(self, column: str = "mismatch") -> dict[str, float]:
        """One number per merge: the sum of a column over the tasks.

        Raises:
            InputError: no such column, or one without numbers.
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
    """How much a merge disturbs each task: its gradient there against its gradient at home.

        mismatch_t = ‖∇ℓ̄_t(θ_merged) − ∇ℓ̄_t(θ_t)‖,      ℓ̄_t(θ) = Σ_{i in task t} ℓ_i(θ)

    Averaging goes wrong by exactly these differences: if each θ_t is an optimum of ℓ̄_t plus
    ½‖θ − θ_0‖² in the metric H_0, then the optimum θ* of all losses together and task arithmetic
    θ_TA = θ_0 + Σ_t α_t(θ_t − θ_0) are apart by

        θ* − θ_TA = −Σ_t α_t H_0⁻¹ [∇ℓ̄_t(θ*) − ∇ℓ̄_t(θ_t)]

    Of two merges, that with the smaller mismatches disturbs its tasks less. Tasks that contradict
    each other leave some mismatch in every merge: at the optimum of all data together it is their
    gradients' sum that vanishes, which ``joint`` measures. ℓ̄_t is the loss of the task's data;
    the prior belongs to all tasks together and has no share in it.

    Beside the gradients stand the losses: the gap ℓ̄_t(θ_merged) − ℓ̄_t(θ_t), and what it would be
    if the loss were quadratic between the two, (θ_merged − θ_t)ᵀ(∇ℓ̄_t(θ_merged) + ∇ℓ̄_t(θ_t))/2.
    Where those two disagree, the weights have left the region in which curvature at θ_t says
    anything, and no precision can make the merge right.

    Args:
        tasks: the tasks with their training data, a list or a dict by name. θ_t are the model's
            own weights, unless ``models`` names them. Tasks may share one model.
        merged: the merge to look at, with the names of the tasks' model: a state dict, a module, a
            folder of safetensors, or what :func:`blr_analysis.merge` returned; or several, as a
            dict by name. A merge may also be a function of no arguments that returns one: it is
            called (a folder is read) when its turn comes, and let go of before the next.
        models: the fine-tuned θ_t, in the same forms, for tasks whose model stands elsewhere.
        precisions: H_t, one per task, by parameter name or a posterior: adds the gap that they
            foretell, ∇ℓ̄_t(θ_t)ᵀΔ + ½ ΔᵀH_tΔ with Δ = θ_merged − θ_t, and the mismatch in their
            metric, √(Σ v²/S_t) in units of √nats. S_t is H_t, infinite where that is 0 and the
            gradients differ, or of a posterior its precision with the prior. Where S_t = H_t is
            the curvature and θ_t an optimum, half the square of the second is the first.
        tests: tasks with held-out data, by the same names: adds the losses there. They are run
            at the same weights, in their own models.

    Frozen parameters and buffers (BatchNorm statistics) that a state dict names are put into the
    model while it is looked at; gradients are of the trainable parameters. Weights in another
    dtype than the model's are converted to it. Memory: θ_t and one gradient for every task.

    Returns:
        One row per merge and task; ``table`` and ``plot()`` (mismatch against loss gap).

    Raises:
        InputError: weights of other names or shapes, NaN or inf in them, ``models``,
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
    """The weights of a merge, or of what a function makes."""
    if callable(merge) and not isinstance(merge, torch.nn.Module):
        merge = merge()
    return state_of(merge, name)


@dataclass(frozen=True)
class _View:
    """What a task shows at some weights.

    Attributes:
        weights: the trainable ones.
        gradient: ∇ℓ̄_t.
        losses: on the task.
        test_losses: on its held-out data, or None.
    """

    weights: Tree
    gradient: Tree
    losses: Evaluation
    test_losses: Evaluation | None


@dataclass(frozen=True)
class _Metric:
    """What a precision says of a step.

    Attributes:
        data: H_t.
        whole: S_t, with a posterior's prior.
    """

    data: State
    whole: State

    def length(self, change: Tree) -> float:
        """√(Σ v²/S_t); infinite where S is 0 and the gradients differ."""
        total = 0.0
        for name, values in change.items():
            squares = values.double().square()
            ratios = torch.where(squares > 0, squares / self.whole[name].to(squares), 0.0)
            total += float(ratios.sum())
        return math.sqrt(total)

    def curvature(self, step: Tree) -> float:
        """ΔᵀH_tΔ."""
        total = 0.0
        for name, values in step.items():
            squares = values.double().square()
            total += float((self.data[name].to(squares) * squares).sum())
        return total


@dataclass(frozen=True)
class _Disturbance:
    """What a merge does to a task.

    Attributes:
        values: by the keys of the mismatch table.
        parts: of each tensor in ``gap_by_gradient``.
        gradient: ∇ℓ̄_t at the merge.
    """

    values: dict[str, Any]
    parts: dict[str, float]
    gradient: Tree


@dataclass
class _Lookout:
    """A task at its own fine-tuned weights, kept while merges come and go."""

    name: str
    task: Task
    test: Task | None
    model: State
    metric: _Metric | None

    def __post_init__(self) -> None:
        self.home = self._view(self.model, f"the fine-tuned model of task {self.name!r}")

    def _view(self, state: State, who: str) -> _View:
        """Weights, gradient, and losses on the task and on its held-out data."""
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
        """How far a merge takes the task from home.

        H_t foretells the gap ∇ℓ̄_t(θ_t)ᵀΔ + ½ ΔᵀH_tΔ.
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
    """Of each tensor in Δᵀ(∇ℓ̄_t(θ_merged) + ∇ℓ̄_t(θ_t))/2, largest first."""
    slopes = add(merged.gradient, 1.0, home.gradient)
    parts = {name: float((slopes[name] * step[name]).sum()) / 2 for name in step}
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def _scores(nll: str, accuracy: str, losses: Evaluation | None) -> dict[str, float]:
    """Mean loss and accuracy under these names; NaN where there is none."""
    if losses is None:
        return {nll: math.nan, accuracy: math.nan}
    return {nll: losses.nll, accuracy: math.nan if losses.accuracy is None else losses.accuracy}


def _lookouts(
    tasks: Mapping[str, Task], models: Any, precisions: Any, tests: Any
) -> list[_Lookout]:
    """Every task at home."""
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
    """θ_t, by task."""
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
    """A precision, checked against the task's model."""
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
