"""What the model would be if a group of examples were gone, new, or relabelled.

``solver="posterior"``: one step of the memory-perturbation equation for a group G (Nickl et al.,
NeurIPS 2023), in the posterior's own structure; no example that stays is visited:

    m^{\\G} = m + (S − S_G)⁻¹ Σ_{i∈G} J_iᵀ e_i,     S_G = Σ_{i∈G} J_iᵀ Λ_i J_i

``solver="replay"``: the difference that the change makes to a short training from the first
weights (:mod:`blr_analysis.sensitivity.groups.replay`), for models that do not minimise their own
loss.

``solver="cg"``: a descent on the objective of the changed data that starts at m, with the learned
S − S_G as preconditioner (:mod:`blr_analysis.sensitivity.minimise`), for a few passes over them.

Real forward passes at m^{\\G} follow. Adding is the same with the sign turned, relabelling a
removal plus an addition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunking
from blr_analysis.backprop.loss import evaluated
from blr_analysis.checks import instance, some
from blr_analysis.data import chosen_indices
from blr_analysis.errors import InputError
from blr_analysis.posterior.gaussian import Posterior, made_of
from blr_analysis.posterior.stationarity import caveat_of
from blr_analysis.progress import track
from blr_analysis.sensitivity.groups.perturbed import Answer, ByClass, References, WhatIf, combined
from blr_analysis.sensitivity.groups.retraining import Retraining, Train, calibrated
from blr_analysis.sensitivity.groups.solving import Change, GroupSolver, checked_plan
from blr_analysis.sensitivity.scores import all_fitted
from blr_analysis.sensitivity.selection import Selection, groups_by, select
from blr_analysis.sensitivity.sites import site_what_if, sum_of_sites
from blr_analysis.task import Task
from blr_analysis.views import GroupRows

__all__ = ["ByClass", "WhatIf", "what_if", "what_if_each"]


@torch.inference_mode(False)  # also where the caller switched it on
def what_if(
    task: Task,
    posterior: Posterior | Sequence[Posterior] = None,  # type: ignore[assignment]
    *,
    remove: Selection | None = None,
    add: Task | None = None,
    relabel: Mapping[int, Any] | None = None,
    evaluate: Task | None = None,
    solver: str = "auto",
    steps: int | str | None = None,
    passes: int | None = None,
    train: Train | None = None,
    seeds: int = 3,
    cache: str | Path | None = None,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    progress: bool | None = None,
) -> WhatIf:
    """The model that other data would have given, predicted without retraining.

    "posterior":  m' = m + (S ∓ S_G)⁻¹ (± Σ_{i∈G} J_iᵀ e_i)
    "cg":         m' from m by minimising F(θ) = Σ_{changed data} ℓ_i(θ) + ½ θᵀ diag(δ) θ

    then forward passes at m' on ``evaluate``. F never rises from one accepted move to the next.
    What is compared is m and m': where m does not minimise its own F (a model stopped early, a
    posterior mean of IVON), part of the change is training that goes on.

    Args:
        task: the model and the data it was trained on.
        posterior: learned on those data; or a list of those of one training run, the last one
            last: the losses (and hits) before the change are the last one's, and what changes is
            the mean of the changes that each finds at its own weights. ``parameters`` and
            ``posterior`` are the last one's; passes add up. Each replays from other first weights,
            so that ``[q, q]`` averages two replays of one. A fitted probabilistic model of
            :mod:`blr_analysis.learning_rule.inference` stands alone, ``what_if(fitted, remove=...,
            add=data, evaluate=data)``: its sites are subtracted, then come ``steps`` (10) of the
            rule on the changed data; ``error`` estimates how far that is from fitting again.
        remove: a boolean mask ``[N]``, indices, or a function of a row of the scores' table
            (``lambda row: row.target == 3``; metadata columns included). A pandas Series is a mask
            by its own index, a pandas Index names rows; numbers in a list are places, 0 … N − 1.
        add: a task with examples to be added (its model is not used, its data and forward are).
        relabel: index → new target; a pandas Series: row label → new target. Sequences have a
            target per token: remove them, and add them corrected.
        evaluate: where to measure; default: ``task`` itself. Only its examples, their forward
            and their likelihood are used; the model is ``task``'s.
        solver: "posterior" (one step in the posterior's structure; where "auto" takes it for
            want of better, shortened where it would raise the loss on the changed data), "cg"
            (a descent on the changed data), "replay" (a short training from the first weights,
            with and without the change, see
            :mod:`blr_analysis.sensitivity.groups.replay`), "retrain" (``train``), or "auto":
            "posterior" for up to 1 % of the data where the changed data's loss is flat where that
            step ends (a pass over them tells, and none where the step promises next to nothing);
            else "cg" for a model that minimises its own F (checked by one pass over the data); for
            one that does not (stopped early, trained in minibatches, the mean of IVON) "posterior"
            up to 1 % of the data, shortened where that loss rises (``note`` says so, or that it
            falls by less than half of what is promised), and "replay" above or where several labels
            are new.
            ``result.solver`` says which.
        steps: of "cg". None: as many quasi-Newton moves as ``passes`` allow, each a forward and
            a backward pass; 1: one Gauss–Newton step, its system solved by preconditioned
            conjugate gradients to 1e-6; K: that many rough Gauss–Newton steps, six
            quasi-Newton moves after each; "converge": moves until nothing is left to gain,
            which is retraining by another name. Of a fitted model of the rule, with EM or
            messages: None: until they rest, 2,000 steps or ten seconds; K: that many.
        passes: at most about that many passes over the changed data, at least 2; with "auto" a
            descent or a replay makes them, also for a single example. Of "cg": default 60 where
            ``steps`` is None, no bound else; ``result.error`` says what one more step would
            change. Of "replay": spent on finding the size of the steps and on two trainings;
            default 6, doubled up to twice where the training stays far from the model's loss.
            Retraining takes as many as it had epochs.
        train: of "retrain": your own training, ``train(data, seed)`` → model or state dict, where
            ``data`` is the dataset of the changed data, items as the task's own; of those
            relabelled the target of (x, y), or a dict's "labels" or "label", is another.
        seeds: how many runs of it; the answer is their mean.
        cache: a folder for their weights; what is there is not trained again. A run is known by
            its examples and seed, the source of ``train`` and the numbers and texts that it reads;
            where a function that it calls has changed, take another folder.

    Raises:
        InputError: nothing to change, nothing left, a bad selection, an unknown solver, bad
            steps or passes, an example both removed and relabelled, ``add`` of another
            likelihood, a replay of a model whose weights cannot be drawn anew, no ``train``,
            ``relabel`` of sequences.
        DataError: a new target out of range; of "retrain", items of another form than above.
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
        >>> low, high = result.interval
        >>> result.removed == int((y == 2).sum()), low <= result.nll <= high
        (True, True)
    """
    if (sites := sum_of_sites(task, posterior)) is not None:
        asked = dict(relabel=relabel, solver=solver, passes=passes, train=train, cache=cache)
        return site_what_if(sites, remove, add, evaluate, steps, asked)  # type: ignore[return-value]
    plan = checked_plan(solver, steps, passes)
    if train is not None and plan.solver != "retrain":
        raise InputError("train= belongs to solver='retrain'")
    chunking = Chunking(chunk_size, memory_budget, progress)

    def answer(q: Posterior, seed: int) -> WhatIf:
        where = _evaluated_on(evaluate, task, q)
        leaving = torch.empty(0, dtype=torch.long) if remove is None else select(remove, task, q)
        if len(leaving) == task.n_data and add is None:
            n = task.n_data
            raise InputError(f"remove selects all {n} examples; leave at least one, or add others")
        new, added = (None, 0) if add is None else (_added(add, task), add.n_data)
        change = Change(leaving, new, _new_labels(relabel, task, leaving))
        if not change.count:
            raise InputError("nothing to change: give remove=, add= or relabel=")
        before, targets = evaluated(where, q.mean, progress=progress)
        floored, caveat = 0.0, ""
        if plan.solver == "retrain":
            retraining = Retraining(task, q, train, seeds, cache)
            account, weights = retraining.answer(change, where, before)
            left = q.n_data - len(leaving) + added
            how = {"kind": "what_if", "solver": "retrain", "seeds": seeds}
            around = made_of(q, weights, n_data=left, **how)
        else:
            moved = GroupSolver(task, q, plan, chunking, seed=seed).solve(change)
            account = References(where, before, dict(q.mean)).answer(moved)
            around, floored = moved.posterior, moved.floored
            caveat = "" if moved.solver == "replay" else caveat_of(q)
        return WhatIf(
            **vars(account),
            parameters={n: m.cpu() for n, m in around.mean.items()},
            posterior=around,
            targets=targets,
            removed=len(leaving),
            added=added,
            relabelled=len(change.labels or {}),
            floored=floored,
            caveat=caveat,
        )

    qs = all_fitted(task, posterior)
    return combined([answer(q, seed) for seed, q in enumerate(qs[-1:] if train else qs)])


@torch.inference_mode(False)  # also where the caller switched it on
def what_if_each(
    task: Task,
    posterior: Posterior | Sequence[Posterior] = None,  # type: ignore[assignment]
    *,
    by: str = "target",
    evaluate: Task | None = None,
    solver: str = "auto",
    steps: int | str | None = None,
    passes: int | None = None,
    train: Train | None = None,
    seeds: int = 1,
    retrain: int = 2,
    cache: str | Path | None = None,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    progress: bool | None = None,
) -> Any:
    """Take out each class (source, annotator, …) in turn; one row each.

    Args:
        posterior: as in :func:`what_if`; of a list, changes are means over it.
        by: "target" or a metadata column of the task.
        evaluate: where to measure; default: ``task`` itself.
        solver, steps, passes: as in :func:`what_if`, for each group; what a replay needs once
            serves all groups.
        train, seeds, cache: as in :func:`what_if`, with solver="retrain" for all groups, else
            for ``retrain`` of them.
        retrain: how many groups are truly retrained, of the largest and the smallest predicted
            loss; by what they teach the changes of the others are scaled ("…, calibrated").

    Returns:
        DataFrame with columns group, n, nll_before, nll_after, nll_change, accuracy_before,
        accuracy_after, accuracy_change, nll_low and nll_high (the interval), and solver, passes,
        converged, error, note as in
        :class:`WhatIf`. Changes are after − before: a positive nll_change means that the model
        is worse without the group.

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
    plan = checked_plan(solver, steps, passes)

    chunking = Chunking(chunk_size, memory_budget, progress=False)

    def answers_of(q: Posterior, seed: int) -> list[tuple[Any, int, Answer]]:
        where = _evaluated_on(evaluate, task, q)
        groups = groups_by(by, task, q)
        if len(groups) == 1:
            raise InputError(f"column {by!r} has the same value everywhere; choose another")
        before, _ = evaluated(where, q.mean, progress=False)
        solver_of_all = GroupSolver(task, q, plan, chunking, groups=len(groups), seed=seed)
        references = References(where, before, dict(q.mean))
        retraining = Retraining(task, q, train, seeds, cache)
        changes = [Change(indices) for indices in groups.values()]

        def exact(k: int) -> Answer:
            return retraining.answer(changes[k], where, before)[0]

        each = range(len(changes))
        shown = track(each, total=len(each), label=f"without each {by}", show=progress)
        if plan.solver == "retrain":
            answers = [exact(k) for k in shown]
        else:
            answers = [references.answer(solver_of_all.solve(changes[k])) for k in shown]
            answers = answers if train is None else calibrated(answers, exact, retrain)
        known = zip(groups.items(), answers, strict=True)
        return [(value, len(indices), answer) for (value, indices), answer in known]

    qs = all_fitted(task, posterior)
    tables = [answers_of(q, seed) for seed, q in enumerate(qs[-1:] if train else qs)]
    rows = []
    for group in zip(*tables, strict=True):
        value, n, _ = group[-1]
        rows.append(combined([answer for *_, answer in group]).row(value, n))
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
    add = add.with_model(task)
    new, old = add.likelihood, task.likelihood
    if not new.same(old):
        raise InputError(
            f"the added examples have the likelihood {new!r}, the task {old!r}; take one for both"
        )
    return add


def _new_labels(relabel: Any, task: Task, leaving: Tensor) -> dict[int, Any]:
    """Index → new target with plain integers as indices, checked."""
    if relabel is None:
        return {}
    try:
        named = relabel.keys()
        labels = [relabel[index] for index in named]
    except (AttributeError, TypeError, KeyError) as error:
        got = type(relabel).__name__
        raise InputError(f"relabel must be a dict from index to new target, got {got}") from error
    indices = named if hasattr(named, "get_indexer") else list(named)  # an Index holds row labels
    chosen = []
    if labels:
        chosen = chosen_indices(indices, task.n_data, "relabel", task.examples.labels)
    if len(set(chosen)) < len(labels):
        raise InputError("relabel names an example more than once, or by booleans; use its index")
    both = set(chosen) & set(leaving.tolist())
    if both:
        raise InputError(f"example {min(both)} is both removed and relabelled; choose one")
    words = task.examples.classes or ()
    for place, label in enumerate(labels):
        if isinstance(label, str):
            if label not in words:
                known = f"none of {some(words)}" if words else "no number"
                raise InputError(f"relabel: {label!r} is {known}")
            labels[place] = words.index(label)
    return dict(zip(chosen, labels, strict=True))
