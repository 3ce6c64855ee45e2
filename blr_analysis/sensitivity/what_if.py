"""Predict the model after a group of examples is removed, added, or relabelled.

    λ^{\\G} = λ − Σ_{i∈G} λ̃_i

For a sum of sites it is this subtraction; for a network one of four solvers
(:mod:`blr_analysis.sensitivity.solvers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from blr_analysis.errors import InputError
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.progress import track
from blr_analysis.sensitivity.results import WhatIf
from blr_analysis.sensitivity.selection import Selection, groups_by
from blr_analysis.sensitivity.solvers import Change, Cost, Settings, cost_of, possible_solvers
from blr_analysis.sensitivity.subjects import subject_of
from blr_analysis.sensitivity.training import known_recipe
from blr_analysis.task import Task
from blr_analysis.views import GroupRows


@torch.inference_mode(False)  # also where the caller switched it on
def what_if(
    task: Task,
    posterior: Posterior | Sequence[Posterior] | None = None,
    *,
    remove: Selection | None = None,
    add: Task | None = None,
    relabel: Mapping[int, Any] | None = None,
    evaluate: Task | None = None,
    solver: str = "auto",
    seeds: int = 3,
    passes: int | None = None,
) -> WhatIf:
    """The model that other data would have given, predicted in one step or by short trainings.

    If the trainings or the descent take more than a second, their time is printed first (on
    standard error), unless the task's ``progress`` is False.

    Args:
        task: the model, the data it was trained on, and its ``recipe``. Without a recipe, that of
            the posterior's record is used, or a short default one; ``note`` says so.
        posterior: learned on those data; or a list of the posteriors of several runs, whose steps
            are averaged; the last run is the model. A fitted probabilistic model of
            :mod:`blr_analysis.learning_rule.inference` needs no task, ``what_if(fitted, remove=...,
            add=data, evaluate=data)``. Its sites are subtracted, and steps of the rule on the
            changed data follow until they change nothing, at most ``passes`` of them; ``error``
            estimates how far the result is from a new fit.
        remove: a boolean mask ``[N]``, indices, a slice, a query string (``"annotator == 'eve'"``),
            or a function of a row of the scores' table (``lambda row: row.target == 3``). A pandas
            Series is a mask by its own index, a pandas Index names rows.
        add: a task with examples to add. Its data and its forward are used, but not its model.
        relabel: index → new target; a pandas Series: row label → new target. Sequences have a
            target per token: remove them, and add corrected ones.
        evaluate: a task with the examples to measure on; None: ``task``. Its examples, its forward
            and its likelihood are used; the model is that of ``task``.
        solver: "posterior" (one step), "cg" (a descent), "replay" (short trainings), "retrain" (the
            whole recipe), or "auto". "auto" is "posterior" for up to 1 % of the data, else "cg" for
            a model at its minimum, else "replay", or "retrain" if the recipe makes no more passes,
            or is a ``train=``. ``result.solver`` says which it was.
        seeds: the number of trainings of "replay" and "retrain"; a single one gives no interval.
        passes: passes of "cg" over the changed data (60); epochs of "replay" (8, or the recipe's).

    Raises:
        InputError: nothing changes, no example is left, the selection is bad, the solver is
            unknown, an example is both removed and relabelled, ``add`` has another likelihood,
            weights cannot be drawn anew, or sequences are relabelled.
        DataError: a new target is out of range.
        ModelError: a training diverges.
        PosteriorError: the posterior is of another model or number of examples, S − S_G is not
            positive definite, or the model breaks down at the new weights.

    Source: Nickl et al., NeurIPS 2023 (the memory-perturbation equation, for a group); Khan & Rue,
    "The Bayesian Learning Rule", Eqs. 54 and 58 (a posterior as a sum of sites).

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(60, 2), torch.randint(3, (60,))
        >>> task = blr.Task(torch.nn.Linear(2, 3), (X, y))
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
        >>> result = what_if(task, q, remove=y == 2, evaluate=task)
        >>> result.removed == int((y == 2).sum()), result.solver
        (True, 'replay')
    """
    subject = subject_of(task, posterior)
    settings = Settings(evaluate=evaluate, solver=solver, seeds=seeds, passes=passes)
    answer = subject.answering(settings)
    change = subject.change(remove, add, relabel)
    return answer(change)


def cost_of_what_if(
    task: Task,
    posterior: Posterior,
    *,
    remove: Selection | None = None,
    relabel: Mapping[int, Any] | None = None,
    evaluate: Task | None = None,
    solver: str = "auto",
    seeds: int = 3,
    passes: int | None = None,
) -> Cost:
    """What :func:`what_if` of a network would take with these arguments: solver, passes, seconds.

    Raises:
        InputError: as :func:`what_if`.
    """
    subject = subject_of(task, posterior)
    answer: Any = subject.answering(Settings(evaluate, solver, seeds, passes))
    return answer.cost(subject.change(remove, None, relabel))


def costs_before_fit(task: Task, count: int | None, settings: Settings) -> list[Cost]:
    """What :func:`what_if` may take where no posterior is fitted yet.

    Args:
        count: the number of examples that change; None: the query needs a posterior.

    Returns:
        The cost of each solver that "auto" may take, which the fit decides; of a named one its own.
    """
    recipe = known_recipe(task)
    counts = [1, task.n_data] if count is None else [count]
    solvers = [
        solver for changed in counts for solver in possible_solvers(task, settings, recipe, changed)
    ]
    return [cost_of(task, solver, settings, recipe) for solver in dict.fromkeys(solvers)]


@torch.inference_mode(False)  # also where the caller switched it on
def what_if_each(
    task: Task,
    posterior: Posterior | Sequence[Posterior] | None = None,
    *,
    by: str = "target",
    evaluate: Task | None = None,
    solver: str = "auto",
    seeds: int = 3,
    passes: int | None = None,
) -> Any:
    """Remove each class (source, annotator, …) in turn, and give a row for each.

    The short trainings on all data are made once for all groups.

    Args:
        task, posterior: the arguments of :func:`what_if`.
        by: "target" or a metadata column of the task.
        evaluate, solver, seeds, passes: the arguments of :func:`what_if`.

    Returns:
        DataFrame with columns group, n, nll_before, nll_after, nll_change, accuracy_before,
        accuracy_after, accuracy_change, nll_low and nll_high (the interval), and solver, passes,
        converged, note as in :class:`~blr_analysis.sensitivity.WhatIf`. Changes are after −
        before: a positive nll_change means that the model is worse without the group.

    Raises:
        InputError: there is no such column, or it has the same value everywhere.
        PosteriorError, DataError, ModelError: the errors of :func:`what_if`.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(60, 2), torch.randint(3, (60,))
        >>> task = blr.Task(torch.nn.Linear(2, 3), (X, y), metadata={"source": ["a", "b"] * 30})
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
        >>> table = what_if_each(task, q, by="source")
        >>> table.group.tolist(), table.n.tolist()
        (['a', 'b'], [30, 30])
    """
    subject = subject_of(task, posterior)
    groups = groups_by(by, subject)
    if len(groups) == 1:
        raise InputError(f"column {by!r} has the same value everywhere; choose another")
    settings = Settings(
        evaluate=evaluate,
        solver=solver,
        seeds=seeds,
        passes=passes,
        groups=len(groups),
        quiet=True,
    )
    answer = subject.answering(settings)
    label = f"without each {by}"
    rows = []
    for value, members in track(
        groups.items(), total=len(groups), label=label, show=subject.progress
    ):
        rows.append(answer(Change(members)).row(value))
    return GroupRows(rows).table
