"""Will a merge work? How far the merged weights are from where each task's gradient should be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
            if not isinstance(row.get(column), int | float):
                raise InputError(f"column must be one of numbers, got {column!r}")
            totals[row["merge"]] = totals.get(row["merge"], 0.0) + row[column]
        return totals

    def __repr__(self) -> str:
        gaps = self.totals("gap")
        found = self.totals().items()
        shown = (f"{m}: mismatch {t:.4g}, loss gap {gaps[m]:.4g} nats" for m, t in found)
        return f"GradientMismatch({len(self) // max(1, len(gaps))} tasks; {'; '.join(shown)})"


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
    one = not isinstance(merged, Mapping) or any(isinstance(v, Tensor) for v in merged.values())
    merges, by_name = named({"merged": merged} if one else merged, "merged"), named_tasks(tasks)
    names = list(by_name)
    homes = _homes(by_name, models)
    held = [None] * len(names) if precisions is None else in_order(precisions, names)
    others: Any = [None] * len(names)
    if tests is not None:
        others = in_order([tests] if isinstance(tests, Task) else tests, names, "tests")
    lookouts = [
        _Lookout(n, by_name[n], other, homes[n], _metric(n, h, by_name[n]))
        for n, other, h in zip(names, others, held, strict=True)
    ]
    rows: list[Mapping[str, Any]] = []
    joint: dict[str, float] = {}
    for label in track(list(merges), total=len(merges), label="merges", show=progress):
        made = merges[label]
        if callable(made) and not isinstance(made, torch.nn.Module):
            made = made()
        state, total = state_of(made, f"merged ({label})"), {}
        for lookout in lookouts:
            values, gradient = lookout.disturbed(state, f"merged ({label})")
            rows.append({"merge": label, "task": lookout.name, **values})
            total = {n: total[n] + g if total else g for n, g in gradient.items()}
        joint[label] = norm(total)
        del state, made
    return GradientMismatch(tuple(rows), joint)


@dataclass
class _Lookout:
    """A task at its own fine-tuned weights, kept while merges come and go."""

    name: str
    task: Task
    test: Task | None
    own: State
    metric: tuple[State, State] | None

    def __post_init__(self) -> None:
        self.home = self._seen(self.own, f"the fine-tuned model of task {self.name!r}")

    def _seen(self, state: State, who: str) -> tuple[Tree, Tree, Evaluation, Evaluation | None]:
        """Weights, gradient, and losses on the task and on its held-out data."""
        there = None
        try:
            with at_weights(self.task, state, who) as params:
                weights = {n: p.detach().clone() for n, p in params.items()}
                here, gradient = evaluated_gradient(self.task, params)
            if self.test is not None:
                with at_weights(self.test, state, f"{who}, in its test task,") as params:
                    there = evaluated(self.test, params)[0]
        except BLRError as error:
            raise type(error)(f"task {self.name!r}: {error}") from error
        return weights, gradient, here, there

    def disturbed(self, state: State, who: str) -> tuple[dict[str, Any], Tree]:
        """How far a merge takes the task from home, by the keys of the mismatch table; ∇ℓ̄_t there.

        H_t foretells the gap ∇ℓ̄_t(θ_t)ᵀΔ + ½ ΔᵀH_tΔ.
        """
        own_weights, own_gradient, own, own_there = self.home
        weights, gradient, here, there = self._seen(state, who)
        step = add(weights, -1.0, own_weights)
        change = add(gradient, -1.0, own_gradient)
        count, mismatch, gap = self.task.n_data, norm(change), here.loss - own.loss
        in_metric = bend = math.nan
        if self.metric is not None:  # infinite where S is 0 and the gradients differ
            h, s = self.metric
            v2, d2 = ({n: t.double().square() for n, t in tree.items()} for tree in (change, step))
            over = {n: torch.where(x > 0, x / s[n].to(x), 0.0) for n, x in v2.items()}
            in_metric = math.sqrt(sum(float(x.sum()) for x in over.values()))
            bend = sum(float((h[n].to(x) * x).sum()) for n, x in d2.items())
        foretold = dot(own_gradient, step)
        values = {
            "n_data": count,
            **{"mismatch": mismatch, "mismatch_per_example": mismatch / count},
            "mismatch_in_metric": in_metric,
            **{"gradient_own": norm(own_gradient), "gradient_merged": norm(gradient)},
            "distance": norm(step),
            **{"gap": gap, "gap_per_example": gap / count},
            "gap_by_gradient": (dot(gradient, step) + foretold) / 2,
            "gap_by_precision": foretold + bend / 2,
        }
        for prefix, pair in (("", (own, here)), ("test_", (own_there, there))):
            for at, e in zip(("own", "merged"), pair, strict=True):
                right = None if e is None else e.accuracy
                values[f"{prefix}nll_{at}"] = math.nan if e is None else e.nll
                values[f"{prefix}accuracy_{at}"] = math.nan if right is None else right
        return values, gradient


def _homes(tasks: Mapping[str, Task], models: Any) -> dict[str, State]:
    if models is None and len({id(t.model) for t in tasks.values()}) < len(tasks):
        raise InputError(
            "several tasks share one model: pass the fine-tuned weights as models=[state dicts]"
        )
    own = [t.model for t in tasks.values()] if models is None else models
    given = zip(tasks, in_order(own, list(tasks), "models"), strict=True)
    return {n: state_of(m, f"models[{n!r}]") for n, m in given}


def _metric(name: str, given: Any, task: Task) -> tuple[State, State] | None:
    """H_t of the data, and S_t, with a posterior's prior, checked against the task's model."""
    if given is None:
        return None
    if isinstance(given, Posterior):
        whole = {n: given.precision(n) for n in given.mean}
        data = {n: (s - given.prior.of(n)).clamp_min(0) for n, s in whole.items()}
    else:
        data = whole = state_of(given, f"precisions[{name!r}]")
    for n, p in task.parameters().items():
        if n not in data or data[n].shape != p.shape or not is_precision(data[n]):
            raise InputError(
                f"precisions[{name!r}] does not fit: {n!r} is {tuple(p.shape)} in the model: give "
                "finite numbers of that shape, at least 0"
            )
    return data, whole
