"""Will a merge work? How far the merged weights are from where each task's gradient should be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.loss import Evaluation, evaluated, evaluated_gradient
from blr_analysis.backprop.tree import Tree, dot, norm
from blr_analysis.errors import BLRError, InputError
from blr_analysis.merging.at_weights import State, at_weights, named_states, named_tasks, state_of
from blr_analysis.merging.weighting import in_order, matched_precisions
from blr_analysis.posterior import Posterior
from blr_analysis.progress import track
from blr_analysis.task import Task
from blr_analysis.views import Plottable, Tabular


@dataclass(frozen=True)
class Home:
    """A task at its own fine-tuned weights, kept while merges come and go."""

    weights: Tree
    gradient: Tree
    here: Evaluation
    there: Evaluation | None  # on held-out data


@dataclass(frozen=True)
class Foretold:
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
    forecast: Foretold | None,
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
        "mismatch_in_metric": _norm_in(forecast.metric, change) if forecast else math.nan,
        "gradient_own": norm(home.gradient),
        "gradient_merged": norm(gradient),
        "distance": norm(step),
        "gap": gap,
        "gap_per_example": gap / task.n_data,
        "gap_by_gradient": dot(middle, step),
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


def _norm_in(metric: State, tree: Tree) -> float:
    """√Σ v²/H, infinite where H is 0 and v is not; in float64."""
    total = 0.0
    for n, v in tree.items():
        squares = v.double().square()
        total += float(torch.where(squares > 0, squares / metric[n].to(squares), 0.0).sum())
    return math.sqrt(total)


def _foretold(gradient: Tree, h: State, step: Tree) -> float:
    bend = sum(
        float((h[n].to(d.device).double() * d.double().square()).sum()) for n, d in step.items()
    )
    return dot(gradient, step) + bend / 2


@dataclass(frozen=True)
class GradientMismatch(Tabular, Plottable):
    """What :func:`gradient_mismatch` found.

    Attributes:
        rows: one mapping per merge and task; :func:`blr_analysis.tables.mismatch_table` says
            with which keys, and ``table`` is made of them.
        joint: by merge, ‖Σ_t ∇ℓ̄_t(θ_merged)‖: 0 where all tasks' data together have an optimum,
            however hard the single tasks pull there.
    """

    rows: Sequence[Mapping[str, Any]]
    joint: Mapping[str, float]

    def __len__(self) -> int:
        return len(self.rows)

    def totals(self, column: str = "mismatch") -> dict[str, float]:
        """One number per merge: the sum of a column over the tasks.

        Raises:
            InputError: no such column, or one without numbers.
        """
        totals: dict[str, float] = {}
        for row in self.rows:
            value = row.get(column)
            if not isinstance(value, (int, float)):
                raise InputError(
                    f"column must be one of numbers, such as 'mismatch', got {column!r}"
                )
            totals[row["merge"]] = totals.get(row["merge"], 0.0) + value
        return totals

    def __repr__(self) -> str:
        gaps = self.totals("gap")
        shown = "; ".join(
            f"{merge}: mismatch {total:.4g}, loss gap {gaps[merge]:.4g} nats"
            for merge, total in self.totals().items()
        )
        return f"GradientMismatch({len(self) // max(1, len(gaps))} tasks; {shown})"


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
    by_name = named_tasks(tasks)
    names = list(by_name)
    homes = _homes(by_name, models)
    forecasts = dict.fromkeys(names) if precisions is None else _forecasts(precisions, by_name)
    held_out: Mapping[str, Task | None] = dict.fromkeys(names)
    if tests is not None:
        given = in_order([tests] if isinstance(tests, Task) else tests, names, "tests")
        held_out = named_tasks(dict(zip(names, given, strict=True)), "tests")
    merges = _merges(merged)
    kept = {
        name: at_home(name, by_name[name], held_out[name], homes[name], progress=progress)
        for name in track(names, total=len(names), label="fine-tuned models", show=progress)
    }
    rows: list[Mapping[str, Any]] = []
    joint: dict[str, float] = {}
    for label in track(list(merges), total=len(merges), label="merges", show=progress):
        made, who = merges[label], f"merged ({label})"
        if callable(made) and not isinstance(made, torch.nn.Module):
            made = made()
        state = state_of(made, who)
        total: Tree = {}
        for name in names:
            task, test, home, h = by_name[name], held_out[name], kept[name], forecasts[name]
            values, gradient = disturbance(name, task, test, home, state, who, h, progress=progress)
            rows.append({"merge": label, "task": name, **values})
            for n, g in gradient.items():
                total[n] = total[n] + g if n in total else g
        joint[label] = norm(total)
        del state, made
    return GradientMismatch(tuple(rows), joint)


def _homes(tasks: Mapping[str, Task], models: Any) -> dict[str, State]:
    if models is None:
        if len({id(t.model) for t in tasks.values()}) < len(tasks):
            raise InputError(
                "several tasks share one model: pass the fine-tuned weights as models=[state dicts]"
            )
        return {n: state_of(t.model, f"the model of task {n!r}") for n, t in tasks.items()}
    given = in_order(models, list(tasks), "models")
    return named_states(dict(zip(tasks, given, strict=True)), "models")


def _merges(merged: Any) -> dict[str, Any]:
    several = isinstance(merged, Mapping) and not any(
        isinstance(v, Tensor) for v in merged.values()
    )
    given = {str(n): v for n, v in merged.items()} if several else {"merged": merged}
    if not given:
        raise InputError("merged must hold at least one state dict, got an empty dict")
    return given


def _forecasts(precisions: Any, tasks: Mapping[str, Task]) -> dict[str, Foretold]:
    """H_t, and S_t with a posterior's prior, checked against the tasks' models."""
    names = list(tasks)
    curved = matched_precisions(precisions, names)
    forecasts = {}
    for name, given in zip(names, in_order(precisions, names), strict=True):
        h = curved[name]
        for n, p in tasks[name].parameters().items():
            if n not in h or h[n].shape != p.shape:
                raise InputError(
                    f"precisions[{name!r}] does not fit: {n!r} is {tuple(p.shape)} in the model, "
                    f"{tuple(h[n].shape) if n in h else 'absent'} there"
                )
        own = {n: given.precision(n) for n in h} if isinstance(given, Posterior) else h
        forecasts[name] = Foretold(h, own)
    return forecasts
