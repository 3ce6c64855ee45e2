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

from blr_analysis.backprop.engine import chunks, predict
from blr_analysis.errors import DataError, InputError, ModelError, PosteriorError
from blr_analysis.likelihoods import Likelihood
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.laplace import curvature_root
from blr_analysis.posterior.structures import Structure, Tree
from blr_analysis.progress import track
from blr_analysis.sensitivity.selection import Selection, groups_by, select
from blr_analysis.task import Task
from blr_analysis.views import GroupRows, make_table

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
class WhatIf:
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
            else (f", accuracy {self.before.accuracy:.4f} -> {self.accuracy:.4f}")
        )
        return f"WhatIf({', '.join(change)}: nll {self.before.nll:.4f} -> {self.nll:.4f}{right})"


@dataclass(frozen=True)
class ByClass:
    """Losses and hits by target, for a table."""

    targets: Tensor
    before: Evaluation
    after: Evaluation


@dataclass(frozen=True)
class Share:
    """A group's share of the posterior: Σ J_iᵀ e_i and Σ J_iᵀ Λ_i J_i."""

    gradient: Tree
    curvature: Structure
    count: int


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

    Args:
        task: the model and the data it was trained on.
        posterior: learned on those data.
        remove: a boolean mask ``[N]``, indices, or a function of a row of the scores' table
            (``lambda row: row.target == 3``; metadata columns included).
        add: a task with examples to be added (its model is not used, its data and forward are).
        relabel: index → new target.
        evaluate: where to measure; default: ``task`` itself.
        solver: "posterior" (one step in the posterior's structure), or "auto".
        steps: 1.

    Raises:
        InputError: nothing to change, a bad selection, an unknown solver, steps ≠ 1, an example
            both removed and relabelled.
        DataError: a new target out of range.
        PosteriorError: S − S_G is not positive definite.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(60, 2), torch.randint(3, (60,))
        >>> task = blr.Task(torch.nn.Linear(2, 3), (X, y))
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0, progress=False)
        >>> result = what_if(task, q, remove=y == 2, evaluate=task, progress=False)
        >>> result.removed == int((y == 2).sum()), result.nll > result.before.nll
        (True, True)
    """
    _check(remove, add, relabel, solver, steps)
    q = posterior.on(task)
    settings: dict[str, Any] = dict(chunk_size=chunk_size, memory_budget=memory_budget, progress=progress)
    leaving = None if remove is None else select(remove, task, q)
    changes: list[tuple[float, Share]] = []
    if leaving is not None:
        changes.append((-1.0, share(task, q, leaving, **settings)))
    if add is not None:
        new = task_like(add, task)
        changes.append((1.0, share(new, q.on(new, same_data=False), None, **settings)))
    if relabel:
        changes.append((1.0, _relabelled(task, q, dict(relabel), leaving)))
    perturbed, floored = _step(q, changes)
    where = task if evaluate is None else evaluate
    before = _evaluated(where, q.on(where, same_data=False).mean, progress)
    after = _evaluated(where, perturbed.on(where, same_data=False).mean, progress)
    return WhatIf(
        parameters={n: m.cpu() for n, m in perturbed.mean.items()},
        posterior=perturbed,
        after=after[0],
        before=before[0],
        targets=before[1],
        removed=0 if leaving is None else len(leaving),
        added=0 if add is None else add.n_data,
        relabelled=len(relabel or {}),
        floored=floored,
    )


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
        accuracy_after, accuracy_change; one pass over the training data in all.

    Raises:
        InputError: no such column.
    """
    q = posterior.on(task)
    where = task if evaluate is None else evaluate
    settings: dict[str, Any] = dict(chunk_size=chunk_size, memory_budget=memory_budget, progress=False)
    groups = groups_by(by, task, q)
    before, _ = _evaluated(where, q.on(where, same_data=False).mean, False)
    rows = []
    for value, indices in track(
        groups.items(), total=len(groups), label=f"without each {by}", show=progress
    ):
        perturbed, _ = _step(q, [(-1.0, share(task, q, indices, **settings))])
        after, _ = _evaluated(where, perturbed.on(where, same_data=False).mean, False)
        rows.append(
            {
                "group": value,
                "n": len(indices),
                "nll_before": before.nll,
                "nll_after": after.nll,
                "nll_change": after.nll - before.nll,
                "accuracy_before": before.accuracy,
                "accuracy_after": after.accuracy,
                "accuracy_change": None
                if after.accuracy is None or before.accuracy is None
                else after.accuracy - before.accuracy,
            }
        )
    return GroupRows(rows).table


def share(
    task: Task,
    q: Posterior,
    indices: Tensor | None,
    *,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    progress: bool | None = None,
) -> Share:
    """Σ_{i∈G} J_iᵀ e_i and S_G in the posterior's structure, at the posterior's mean."""
    curvature = q.form.zeros()
    passes = chunks(
        task,
        q.mean,
        indices=indices,
        chunk_size=chunk_size,
        memory_budget=memory_budget,
        label="the group's share",
        progress=progress,
    )
    for chunk in passes:
        curvature = curvature.add(chunk.terms(curvature_root(task, chunk)))
    count = task.n_data if indices is None else len(indices)
    return Share(loss_gradient(task, q.mean, indices), curvature, count)


def loss_gradient(
    task: Task,
    params: Tree,
    indices: Tensor | None = None,
    errors: Tensor | None = None,
) -> Tree:
    """Σ_i J_iᵀ e_i over the examples: the gradient of their summed loss, by plain autograd.

    ``errors`` ``[M, C]`` replaces the e_i.
    """
    total = {n: torch.zeros_like(p) for n, p in params.items()}
    start = 0
    for chosen, batch in task.batches(indices=indices):
        with torch.enable_grad(), task.evaluation():
            leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
            outputs, targets = task.run(batch, leaves, chosen)
        if errors is None:
            e = task.likelihood.error(outputs.detach(), targets)
        else:
            e = errors[start : start + len(chosen)].to(outputs)
        start += len(chosen)
        if not outputs.requires_grad:
            continue
        grads = torch.autograd.grad(
            outputs, list(leaves.values()), e, allow_unused=True, materialize_grads=True
        )
        for name, grad in zip(total, grads, strict=True):
            total[name] += grad
    return total


def task_like(new: Task, task: Task) -> Task:
    """The new examples under the old task's model and likelihood."""
    if not isinstance(new, Task):
        raise InputError(f"add must be a Task with the new examples, got {type(new).__name__}")
    same: Likelihood = task.likelihood
    if type(new.likelihood) is not type(same):
        raise InputError(
            f"the added examples have the {new.likelihood.name} likelihood, the task the "
            f"{same.name}; build them with the same one"
        )
    if new.model is task.model:
        return new
    other = Task(
        task.model,
        new.dataset,
        likelihood=same,
        forward=new.forward,
        batch_size=new.batch_size,
        device=task.device,
    )
    other._collate = new._collate
    return other


def _relabelled(task: Task, q: Posterior, relabel: dict[int, Any], leaving: Tensor | None) -> Share:
    """Old share out, new share in: Λ does not know the label, so that only e changes."""
    chosen = select(list(relabel), task, q, name="relabel")
    if leaving is not None and bool(torch.isin(chosen, leaving).any()):
        both = int(chosen[torch.isin(chosen, leaving)][0])
        raise InputError(f"example {both} is both removed and relabelled; choose one")
    outputs, targets = [], []
    with torch.no_grad(), task.evaluation():
        for indices, batch in task.batches(indices=chosen):
            f, y = task.run(batch, q.mean, indices)
            outputs.append(f)
            targets.append(y)
    f, y = torch.cat(outputs), torch.cat(targets)
    try:
        values = torch.stack([torch.as_tensor(relabel[int(i)]).cpu() for i in chosen])
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"relabel must map indices to targets: {error}") from error
    new = task.likelihood.prepare_targets(values.to(f.device), f)
    change = task.likelihood.error(f, new) - task.likelihood.error(f, y)
    return Share(loss_gradient(task, q.mean, chosen, change), q.form.zeros(), 0)


def _step(q: Posterior, changes: list[tuple[float, Share]]) -> tuple[Posterior, float]:
    """λ ∓ Σ λ̃: the posterior with the shares taken out (−1) or put in (+1)."""
    form, n_data = q.form, q.n_data
    pull = {n: torch.zeros_like(m) for n, m in q.mean.items()}
    for sign, part in changes:
        form = form.plus(part.curvature, sign)
        n_data += int(sign) * part.count
        for name, grad in part.gradient.items():
            pull[name] -= sign * grad
    form, floored = form.floored(q.prior_precision)
    move = form.solve(pull)
    mean = {n: m + move[n] for n, m in q.mean.items()}
    if not all(bool(torch.isfinite(m).all()) for m in mean.values()):
        raise PosteriorError(
            "the step is not finite; the posterior's precision is too small for this group: "
            "raise prior_precision, or remove fewer examples"
        )
    perturbed = Posterior(
        mean,
        form,
        prior_precision=q.prior_precision,
        n_data=max(n_data, 0),
        record={**q.record, "kind": "what_if"},
    )
    return perturbed, floored


def _evaluated(task: Task, params: Tree, progress: bool | None) -> tuple[Evaluation, Tensor]:
    outputs, targets = predict(task, params, progress=progress)
    losses = task.likelihood.nll(outputs, targets)
    return Evaluation(losses, task.likelihood.correct(outputs, targets)), targets


def _check(
    remove: Selection | None,
    add: Task | None,
    relabel: Mapping[int, Any] | None,
    solver: str,
    steps: int,
) -> None:
    if remove is None and add is None and not relabel:
        raise InputError("nothing to change: give remove=, add= or relabel=")
    if solver not in SOLVERS:
        raise InputError(f"solver must be one of {SOLVERS}, got {solver!r}")
    if steps != 1:
        raise InputError(
            f"steps={steps!r}: the posterior solver makes one step; apply the result and fit "
            "again to go on"
        )
