"""What the model would be if a group of examples were gone, new, or relabelled.

``solver="posterior"``: one step of the memory-perturbation equation for a group G (Nickl et al.,
NeurIPS 2023), in the posterior's own structure; no example that stays is visited:

    m^{\\G} = m + (S − S_G)⁻¹ Σ_{i∈G} J_iᵀ e_i,     S_G = Σ_{i∈G} J_iᵀ Λ_i J_i

``solver="cg"``: a descent on the objective of the changed data that starts at m, with the learned
S − S_G as preconditioner (:mod:`blr_analysis.sensitivity.minimise`), for a few passes over them.

Real forward passes at m^{\\G} follow. Adding is the same with the sign turned, relabelling a
removal plus an addition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunking
from blr_analysis.backprop.loss import Evaluation, evaluated
from blr_analysis.checks import instance
from blr_analysis.data import chosen_indices
from blr_analysis.errors import InputError, ModelError, PosteriorError
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.structures import Tree
from blr_analysis.progress import track
from blr_analysis.sensitivity.minimise import Descent
from blr_analysis.sensitivity.perturbed import ByClass, WhatIf
from blr_analysis.sensitivity.scores import fitted
from blr_analysis.sensitivity.selection import Selection, groups_by, select
from blr_analysis.sensitivity.solving import Change, checked_plan, next_parameters, solve
from blr_analysis.task import Task
from blr_analysis.views import GroupRows

__all__ = ["ByClass", "WhatIf", "what_if", "what_if_each"]


@torch.inference_mode(False)  # also where the caller switched it on
def what_if(
    task: Task,
    posterior: Posterior = None,  # type: ignore[assignment]
    *,
    remove: Selection | None = None,
    add: Task | None = None,
    relabel: Mapping[int, Any] | None = None,
    evaluate: Task | None = None,
    solver: str = "auto",
    steps: int | str | None = None,
    passes: int | None = None,
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
        posterior: learned on those data.
        remove: a boolean mask ``[N]``, indices, or a function of a row of the scores' table
            (``lambda row: row.target == 3``; metadata columns included).
        add: a task with examples to be added (its model is not used, its data and forward are).
        relabel: index → new target.
        evaluate: where to measure; default: ``task`` itself. Only its examples, their forward
            and their likelihood are used; the model is ``task``'s.
        solver: "posterior" (one step in the posterior's structure, no pass over the data that
            stay), "cg" (a descent on the changed data), or "auto": "posterior" for up to 1 % of
            the data, fewer than 8 passes, or a model that does not minimise its own F (checked
            by one pass over the data), else "cg"; with ``steps`` or 8 passes and more, "cg".
            ``result.solver`` says which.
        steps: of "cg". None: as many quasi-Newton moves as ``passes`` allow, each a forward and
            a backward pass; 1: one Gauss–Newton step, its system solved by preconditioned
            conjugate gradients to 1e-6; K: that many rough Gauss–Newton steps, six
            quasi-Newton moves after each; "converge": moves until nothing is left to gain,
            which is retraining by another name.
        passes: at most about that many passes over the changed data (default 60 where ``steps``
            is None, no bound else); the answer says how many were made, and ``result.error``
            what one more would change.

    Raises:
        InputError: nothing to change, nothing left, a bad selection, an unknown solver, bad
            steps or passes, an example both removed and relabelled, ``add`` of another
            likelihood.
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
    plan = checked_plan(solver, steps, passes)
    q = fitted(task, posterior)
    where = _evaluated_on(evaluate, task, q)
    leaving = torch.empty(0, dtype=torch.long) if remove is None else select(remove, task, q)
    if len(leaving) == task.n_data and add is None:
        raise InputError(
            f"remove selects all {task.n_data} examples; leave at least one, or add others"
        )
    new = None if add is None else _added(add, task)
    change = Change(leaving, new, _new_labels(relabel, task, leaving))
    if not change.count:
        raise InputError("nothing to change: give remove=, add= or relabel=")
    chunking = Chunking(chunk_size, memory_budget, progress)
    perturbed, floored, descent = solve(task, q, change, plan, chunking)
    before, targets = _measured(where, q.mean, progress)
    after, _ = _measured(where, perturbed.mean, progress, moved=True)
    return WhatIf(
        parameters={n: m.cpu() for n, m in perturbed.mean.items()},
        posterior=perturbed,
        after=after,
        before=before,
        targets=targets,
        removed=len(leaving),
        added=0 if add is None else add.n_data,
        relabelled=len(change.labels or {}),
        floored=floored,
        **_account(descent, where, after),
    )


@torch.inference_mode(False)  # also where the caller switched it on
def what_if_each(
    task: Task,
    posterior: Posterior = None,  # type: ignore[assignment]
    *,
    by: str = "target",
    evaluate: Task | None = None,
    solver: str = "auto",
    steps: int | str | None = None,
    passes: int | None = None,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    progress: bool | None = None,
) -> Any:
    """Take out each class (source, annotator, …) in turn; one row each.

    Args:
        by: "target" or a metadata column of the task.
        evaluate: where to measure; default: ``task`` itself.
        solver, steps, passes: as in :func:`what_if`, for each group.

    Returns:
        DataFrame with columns group, n, nll_before, nll_after, nll_change, accuracy_before,
        accuracy_after, accuracy_change, and solver, passes, converged, error as in
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
    q = fitted(task, posterior)
    where = _evaluated_on(evaluate, task, q)
    groups = groups_by(by, task, q)
    if len(groups) == 1:
        raise InputError(f"column {by!r} has the same value everywhere; without it nothing is left")
    chunking = Chunking(chunk_size, memory_budget, progress=False)
    before, _ = _measured(where, q.mean, False)
    rows = []
    for value, indices in track(
        groups.items(), total=len(groups), label=f"without each {by}", show=progress
    ):
        perturbed, _, descent = solve(task, q, Change(indices), plan, chunking)
        after, _ = _measured(where, perturbed.mean, False, moved=True)
        account = _account(descent, where, after)
        rows.append(
            {
                "group": value,
                "n": len(indices),
                "nll_before": before.nll,
                "nll_after": after.nll,
                "accuracy_before": before.accuracy,
                "accuracy_after": after.accuracy,
                **{k: account[k] for k in ("solver", "passes", "converged", "error")},
            }
        )
    return GroupRows(rows).table


def _account(descent: Descent | None, where: Task, after: Evaluation) -> dict[str, Any]:
    """How the answer was found: the entries of :class:`WhatIf` that say so."""
    if descent is None:
        return {"solver": "posterior", "passes": 0.0, "converged": True, "error": None}
    try:
        further, _ = evaluated(where, next_parameters(descent), progress=False)
        error = abs(further.nll - after.nll)
    except ModelError:  # it breaks down there: the search would have shortened the move
        error = float("inf")
    return {
        "solver": "cg",
        "passes": descent.passes,
        "converged": descent.converged,
        "error": error,
        "moves": tuple(descent.moves),
    }


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
    if not new.same(old):
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
    task: Task, mean: Tree, progress: bool | None, *, moved: bool = False
) -> tuple[Evaluation, Tensor]:
    """Losses and hits at these weights, by forward passes, and the targets."""
    try:
        return evaluated(task, mean, progress=progress)
    except ModelError as error:
        if not moved:
            raise
        raise PosteriorError(
            f"at the weights after the change {error}. The step is too long for this posterior: "
            "raise prior_precision, change fewer examples, or use a structure with correlations"
        ) from error
