"""What the model would be if a group of examples were gone, new, or relabelled.

One step of the memory-perturbation equation for a group G (Nickl et al., NeurIPS 2023):

    m^{\\G} = m + (S − S_G)⁻¹ Σ_{i∈G} J_iᵀ e_i,     S_G = Σ_{i∈G} J_iᵀ Λ_i J_i

in the posterior's own structure, followed by real forward passes at m^{\\G}. Adding is the same
with the sign turned, relabelling a removal plus an addition. No example that stays is visited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.backprop.engine import predict
from blr_analysis.checks import instance, one_of
from blr_analysis.data import chosen_indices
from blr_analysis.errors import InputError, ModelError, PosteriorError
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.structures import Tree
from blr_analysis.progress import track
from blr_analysis.sensitivity.scores import fitted
from blr_analysis.sensitivity.selection import Selection, groups_by, select
from blr_analysis.sensitivity.shares import Share, relabelled, share, step
from blr_analysis.task import Task
from blr_analysis.views import GroupRows, Plottable, make_table

SOLVERS = ("auto", "posterior")


@dataclass(frozen=True)
class Evaluation:
    """Losses ``[M]`` in nats and hits ``[M]`` (None for regression) on a set of examples."""

    losses: Tensor
    correct: Tensor | None

    @property
    def nll(self) -> float:
        return float(self.losses.double().mean())

    @property
    def accuracy(self) -> float | None:
        return None if self.correct is None else float(self.correct.double().mean())


@dataclass(frozen=True)
class WhatIf(Plottable):
    """What :func:`what_if` found.

    Attributes:
        parameters: m^{\\G}, the weights that the model would have, by name.
        posterior: the posterior that would be left: mean m^{\\G}, precision S − S_G, new n_data.
        after, before: losses and hits on ``evaluate`` with and without the change.
        targets: of ``evaluate``.
        removed, added, relabelled: how many examples.
        floored: the fraction of S − S_G that had to be raised to the prior, where the learned
            precision is smaller than the group's share; near 0 for a posterior that fits.
        solver: what was used.
    """

    parameters: Tree
    posterior: Posterior
    after: Evaluation
    before: Evaluation
    targets: Tensor
    removed: int
    added: int
    relabelled: int
    floored: float
    solver: str = "posterior"

    @property
    def nll(self) -> float:
        """Mean loss on ``evaluate`` after the change, in nats."""
        return self.after.nll

    @property
    def accuracy(self) -> float | None:
        """Accuracy on ``evaluate`` after the change; None for regression."""
        return self.after.accuracy

    @property
    def by_class(self) -> Any:
        """DataFrame: one row per class of ``evaluate``, before and after."""
        return make_table(ByClass(self.targets, self.before, self.after))

    def apply(self, model: nn.Module) -> nn.Module:
        """Write :attr:`parameters` into ``model`` (in place) and return it.

        Raises:
            ModelError: the model lacks a parameter or has another shape; nothing is written.
        """
        instance("model", model, nn.Module, "a torch.nn.Module")
        own = dict(model.named_parameters())
        for name, value in self.parameters.items():
            if name not in own or own[name].shape != value.shape:
                got = tuple(own[name].shape) if name in own else "no such parameter"
                raise ModelError(
                    f"cannot apply {name!r} of shape {tuple(value.shape)}: the model has {got}"
                )
        with torch.no_grad():
            for name, value in self.parameters.items():
                own[name].copy_(value)
        return model

    def __repr__(self) -> str:
        change = [
            f"{count} {word}"
            for count, word in (
                (self.removed, "removed"),
                (self.added, "added"),
                (self.relabelled, "relabelled"),
            )
            if count
        ]
        right = (
            ""
            if self.accuracy is None
            else f", accuracy {self.before.accuracy:.4f} -> {self.accuracy:.4f}"
        )
        return f"WhatIf({', '.join(change)}: nll {self.before.nll:.4f} -> {self.nll:.4f}{right})"


@dataclass(frozen=True)
class ByClass:
    """Losses and hits by target, for a table."""

    targets: Tensor
    before: Evaluation
    after: Evaluation


@torch.inference_mode(False)  # also where the caller switched it on
def what_if(
    task: Task,
    posterior: Posterior,
    *,
    remove: Selection | None = None,
    add: Task | None = None,
    relabel: Mapping[int, Any] | None = None,
    evaluate: Task | None = None,
    solver: str = "auto",
    steps: int = 1,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    progress: bool | None = None,
) -> WhatIf:
    """The model that other data would have given, predicted without retraining.

    m' = m + (S ∓ S_G)⁻¹ (± Σ_{i∈G} J_iᵀ e_i), then forward passes at m' on ``evaluate``.

    Args:
        task: the model and the data it was trained on.
        posterior: learned on those data.
        remove: a boolean mask ``[N]``, indices, or a function of a row of the scores' table
            (``lambda row: row.target == 3``; metadata columns included).
        add: a task with examples to be added (its model is not used, its data and forward are).
        relabel: index → new target.
        evaluate: where to measure; default: ``task`` itself. Only its examples, their forward
            and their likelihood are used; the model is ``task``'s.
        solver: "posterior" (one step in the posterior's structure), or "auto".
        steps: 1.

    Raises:
        InputError: nothing to change, nothing left, a bad selection, an unknown solver,
            steps ≠ 1, an example both removed and relabelled, ``add`` of another likelihood.
        DataError: a new target out of range.
        PosteriorError: a posterior of another model or number of examples, S − S_G that is not
            positive definite, weights at which the model breaks down.

    Source: Nickl et al., NeurIPS 2023 (the memory-perturbation equation, for a group); Khan & Rue,
    "The Bayesian Learning Rule", Eqs. 54 and 58 (a posterior as a sum of sites).

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(60, 2), torch.randint(3, (60,))
        >>> task = blr.Task(torch.nn.Linear(2, 3), (X, y))
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0, progress=False)
        >>> result = what_if(task, q, remove=y == 2, evaluate=task, progress=False)
        >>> result.removed == int((y == 2).sum()), result.nll > result.before.nll
        (True, True)
    """
    _check(solver, steps)
    q = fitted(task, posterior)
    where = _evaluated_on(evaluate, task, q)
    settings: dict[str, Any] = dict(
        chunk_size=chunk_size, memory_budget=memory_budget, progress=progress
    )
    leaving = torch.empty(0, dtype=torch.long) if remove is None else select(remove, task, q)
    if len(leaving) == task.n_data and add is None:
        raise InputError(
            f"remove selects all {task.n_data} examples; leave at least one, or add others"
        )
    new = None if add is None else _added(add, task)
    labels = _new_labels(relabel, task, leaving)
    changes: list[tuple[int, Share]] = []
    if len(leaving):
        changes.append((-1, share(task, q, leaving, **settings)))
    if new is not None:
        changes.append((1, share(new, q, None, **settings)))
    if not labels and not changes:
        raise InputError("nothing to change: give remove=, add= or relabel=")
    if labels:
        changes.append((1, relabelled(task, q, labels)))
    perturbed, floored = step(q, changes)
    before, targets = _measured(where, q, progress)
    after, _ = _measured(where, perturbed, progress, moved=True)
    return WhatIf(
        parameters={n: m.cpu() for n, m in perturbed.mean.items()},
        posterior=perturbed,
        after=after,
        before=before,
        targets=targets,
        removed=len(leaving),
        added=0 if add is None else add.n_data,
        relabelled=len(labels),
        floored=floored,
    )


@torch.inference_mode(False)  # also where the caller switched it on
def what_if_each(
    task: Task,
    posterior: Posterior,
    *,
    by: str = "target",
    evaluate: Task | None = None,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    progress: bool | None = None,
) -> Any:
    """Take out each class (source, annotator, …) in turn; one row each.

    Args:
        by: "target" or a metadata column of the task.
        evaluate: where to measure; default: ``task`` itself.

    Returns:
        DataFrame with columns group, n, nll_before, nll_after, nll_change, accuracy_before,
        accuracy_after, accuracy_change; one pass over the training data in all. Changes are
        after − before: a positive nll_change means that the model is worse without the group.

    Raises:
        InputError: no such column, or one with the same value everywhere.
        PosteriorError, DataError: as :func:`what_if`.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(60, 2), torch.randint(3, (60,))
        >>> task = blr.Task(torch.nn.Linear(2, 3), (X, y), metadata={"source": ["a", "b"] * 30})
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0, progress=False)
        >>> table = what_if_each(task, q, by="source", progress=False)
        >>> table.group.tolist(), table.n.tolist()
        (['a', 'b'], [30, 30])
    """
    q = fitted(task, posterior)
    where = _evaluated_on(evaluate, task, q)
    groups = groups_by(by, task, q)
    if len(groups) == 1:
        raise InputError(f"column {by!r} has the same value everywhere; without it nothing is left")
    before, _ = _measured(where, q, False)
    rows = []
    for value, indices in track(
        groups.items(), total=len(groups), label=f"without each {by}", show=progress
    ):
        leaving = share(
            task, q, indices, chunk_size=chunk_size, memory_budget=memory_budget, progress=False
        )
        after, _ = _measured(where, step(q, [(-1, leaving)])[0], False, moved=True)
        rows.append(
            {
                "group": value,
                "n": len(indices),
                "nll_before": before.nll,
                "nll_after": after.nll,
                "accuracy_before": before.accuracy,
                "accuracy_after": after.accuracy,
            }
        )
    return GroupRows(rows).table


def _evaluated_on(evaluate: Task | None, task: Task, q: Posterior) -> Task:
    """The examples to measure on, under the trained model (buffers, frozen weights and all)."""
    if evaluate is None:
        return task
    instance("evaluate", evaluate, Task, "a blr_analysis.Task with the examples to measure on")
    q.on(evaluate, same_data=False)
    return evaluate.with_model(task)


def _added(add: Task, task: Task) -> Task:
    """The new examples under the old task's model."""
    instance("add", add, Task, "a blr_analysis.Task with the new examples")
    new, old = add.likelihood, task.likelihood
    if type(new) is not type(old) or str(vars(new)) != str(vars(old)):
        raise InputError(
            f"the added examples have the likelihood {new!r}, the task {old!r}; build them with "
            "the same one"
        )
    return add.with_model(task)


def _new_labels(relabel: Any, task: Task, leaving: Tensor) -> dict[int, Any]:
    """Index → new target with plain integers as indices, checked."""
    if relabel is None:
        return {}
    try:
        indices = list(relabel.keys())
        labels = [relabel[index] for index in indices]
    except (AttributeError, TypeError, KeyError) as error:
        raise InputError(
            f"relabel must be a dict from index to new target, got {type(relabel).__name__}"
        ) from error
    chosen = chosen_indices(indices, task.n_data, "relabel") if indices else []
    if len(set(chosen)) < len(indices):
        raise InputError("relabel names an example more than once, or by booleans; use its index")
    both = set(chosen) & set(leaving.tolist())
    if both:
        raise InputError(f"example {min(both)} is both removed and relabelled; choose one")
    return dict(zip(chosen, labels, strict=True))


def _measured(
    task: Task, q: Posterior, progress: bool | None, *, moved: bool = False
) -> tuple[Evaluation, Tensor]:
    """Losses and hits at the posterior's mean, by forward passes, and the targets."""
    try:
        outputs, targets = predict(task, q.mean, progress=progress)
    except ModelError as error:
        if not moved:
            raise
        raise PosteriorError(
            f"at the weights after the change {error}. The step is too long for this posterior: "
            "raise prior_precision, change fewer examples, or use a structure with correlations"
        ) from error
    losses = task.likelihood.nll(outputs, targets)
    return Evaluation(losses, task.likelihood.correct(outputs, targets)), targets


def _check(solver: str, steps: int) -> None:
    one_of("solver", solver, SOLVERS)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps != 1:
        raise InputError(
            f"steps={steps!r}: the posterior solver makes one step; apply the result and fit "
            "again to go on"
        )
