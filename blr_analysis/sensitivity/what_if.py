"""What the model would be if a group of examples were gone, new, or relabelled.

    λ^{\\G} = λ − Σ_{i∈G} λ̃_i

A sum of sites is asked for exactly that; a network answers by one of four solvers
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
from blr_analysis.sensitivity.solvers import Change, Settings
from blr_analysis.sensitivity.subjects import subject_of
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

    Args:
        task: the model, the data it was trained on, and its ``recipe``. Without one a posterior's
            record may know it; else a short default training is taken, and ``note`` says so.
        posterior: learned on those data; or a list of those of several runs, the last one last:
            the step is the mean of theirs. A fitted probabilistic model of
            :mod:`blr_analysis.learning_rule.inference` stands alone, ``what_if(fitted, remove=...,
            add=data, evaluate=data)``: its sites are subtracted, then come steps of the rule on
            the changed data, until they rest or ``passes`` of them; ``error`` estimates how far
            that is from fitting again.
        remove: a boolean mask ``[N]``, indices, a query string (``"annotator == 'eve'"``), or a
            function of a row of the scores' table (``lambda row: row.target == 3``). A pandas
            Series is a mask by its own index, a pandas Index names rows.
        add: a task with examples to be added (its model is not used, its data and forward are).
        relabel: index → new target; a pandas Series: row label → new target. Sequences have a
            target per token: remove them, and add them corrected.
        evaluate: where to measure; default: ``task`` itself. Only its examples, their forward
            and their likelihood are used; the model is ``task``'s.
        solver: "posterior" (one step), "cg" (a descent), "replay" (short trainings), "retrain" (the
            whole recipe), or "auto": "posterior" for up to 1 % of the data, else "cg" for a model
            at its minimum, else "replay", or "retrain" where the recipe makes no more passes, or is
            a ``train=``. ``result.solver`` says which.
        seeds: trainings of "replay" and "retrain"; one gives no interval.
        passes: of "cg" over the changed data (60); epochs of a "replay" (8, or the recipe's).

    Raises:
        InputError: nothing to change, nothing left, a bad selection, an unknown solver, an example
            both removed and relabelled, ``add`` of another likelihood, weights that cannot be drawn
            anew, ``relabel`` of sequences.
        DataError: a new target out of range.
        ModelError: a training that diverges.
        PosteriorError: a posterior of another model or number of examples, S − S_G that is not
            positive definite, weights at which the model breaks down.

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
    answer = subject.answering(Settings(evaluate, solver, seeds, passes))
    return answer(subject.change(remove, add, relabel))


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
    """Take out each class (source, annotator, …) in turn; one row each.

    The short trainings on all data are made once for all groups.

    Args:
        task, posterior: as for :func:`what_if`; a fitted probabilistic model stands alone.
        by: "target" or a metadata column of the task.
        evaluate, solver, seeds, passes: as for :func:`what_if`.

    Returns:
        DataFrame with columns group, n, nll_before, nll_after, nll_change, accuracy_before,
        accuracy_after, accuracy_change, nll_low and nll_high (the interval), and solver, passes,
        converged, note as in :class:`~blr_analysis.sensitivity.WhatIf`. Changes are after −
        before: a positive nll_change means that the model is worse without the group.

    Raises:
        InputError: no such column, or one with the same value everywhere.
        PosteriorError, DataError, ModelError: as :func:`what_if`.

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
    settings = Settings(evaluate, solver, seeds, passes, groups=len(groups), quiet=True)
    answer = subject.answering(settings)
    label = f"without each {by}"
    shown = track(groups.items(), total=len(groups), label=label, show=subject.progress)
    rows = [answer(Change(members)).row(value) for value, members in shown]
    return GroupRows(rows).table
