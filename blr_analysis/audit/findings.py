"""What an audit finds: scores, leave-one-out, memory map, suspects, and what groups are worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from blr_analysis.backprop.loss import Evaluation, evaluated
from blr_analysis.checks import instance
from blr_analysis.errors import InputError
from blr_analysis.memory_map import MemoryMap, memory_map
from blr_analysis.posterior import Posterior
from blr_analysis.posterior.stationarity import with_stationarity
from blr_analysis.sensitivity import (
    LeaveOneOut,
    Scores,
    Suspicions,
    what_if_each,
)
from blr_analysis.sensitivity.door import check_test
from blr_analysis.sensitivity.other_units import unlike_training
from blr_analysis.sensitivity.results import NO_FAULT
from blr_analysis.sensitivity.subjects import subject_of
from blr_analysis.sensitivity.suspicious import suspicions_of
from blr_analysis.task import Task
from blr_analysis.views import Tabular

MOST_GROUPS = 100  # without being asked; each group costs its trainings
AUTO = "auto"
TWINS = 3  # examples, below which none can be another's


@dataclass(frozen=True)
class Findings(Tabular):
    """What :func:`investigate` found.

    Attributes:
        task, posterior, test: what was asked about; ``test`` under the trained model, or None.
        scores, loo, memory, suspicions: the analyses of the training data.
        on_test, test_targets: losses, hits and targets on ``test``; None without one.
        unlike: how ``test`` differs from the training data, in one line; "".
        by: the column whose groups were taken out; None if none was.
        removals: DataFrame of :func:`blr_analysis.what_if_each`, measured on ``test`` (on the
            training data without one); None if ``by`` is.
    """

    task: Task
    posterior: Posterior
    scores: Scores
    loo: LeaveOneOut
    memory: MemoryMap
    suspicions: Suspicions
    test: Task | None = None
    on_test: Evaluation | None = None
    test_targets: Tensor | None = None
    unlike: str = ""
    by: str | None = None
    removals: pd.DataFrame | None = None

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per training example: the memory map's table, and behind the region what the
        model says without the example: ``left_out_prediction``, ``left_out_loss``, and ``kind``,
        the fault that is suspected."""
        columns: dict[str, Any] = {}
        if self.loo.predictions is not None:
            predictions = self.loo.predictions.reshape(len(self.loo), -1)
            several = predictions.shape[1] > 1
            for c, column in enumerate(predictions.unbind(1)):
                name = f"left_out_prediction_{c}" if several else "left_out_prediction"
                columns[name] = column.numpy()
        columns["left_out_loss"] = self.loo.losses.numpy()
        columns["kind"] = self.suspicions.kind
        table = self.memory.table.rename(columns={name: f"{name}_metadata" for name in columns})
        after = list(table).index("region") + 1
        for place, (name, column) in enumerate(columns.items()):
            table.insert(after + place, name, column)
        return table

    @property
    def suspects(self) -> pd.DataFrame:
        """The rows of ``suspicious(task, posterior).table`` that are suspected of a fault."""
        table = self.suspicions.table
        return table[table["kind"] != NO_FAULT]

    @property
    def influence(self) -> str:
        """ "deviation"; "self_influence" where there are too many outputs for it."""
        known = "deviation" in self.table and self.table["deviation"].notna().to_numpy().any()
        return "deviation" if known else "self_influence"

    @property
    def noun(self) -> str:
        """What one group is called."""
        classes = self.task.likelihood.is_classification and self.by in (None, "target")
        return "class" if classes else str(self.by)


def investigate(
    task: Task,
    posterior: Posterior,
    *,
    test: Task | None = None,
    by: str | None = "auto",
    passes: int | None = None,
    say: Callable[[str], None] | None = None,
) -> Findings:
    """Every analysis of a task, one after the other.

    Args:
        task: the model and the data it was trained on.
        posterior: learned on those data.
        test: further examples, for comparison and to measure the removals on.
        by: the column whose groups are taken out in turn: "target" or a metadata column; None
            for none; "auto" for the classes of a classification with at most 100 of them.
        passes: of :func:`blr_analysis.what_if`, for each group.
        say: told in a few words what begins.

    Raises:
        InputError: no task, or no posterior of one run.
        BLRError: as the analyses themselves.
    """
    say = say or (lambda text: None)
    instance("task", task, Task, "a blr_analysis.Task (ask fitted models one analysis at a time)")
    wanted = "a blr_analysis.Posterior of one run (ask several one analysis at a time)"
    instance("posterior", posterior, Posterior, wanted)
    if test is not None:
        test = check_test(test, task)
    posterior = with_stationarity(task, posterior)  # on which the temperature depends
    say(f"sensitivity: how each of {task.n_data:,} examples shapes the model")
    subject = subject_of(task, posterior)
    scores = subject.scores(variance=task.likelihood.is_sequence or None)
    memory = memory_map(scores)
    say("leave-one-out: every prediction without its own example")
    loo = subject.left_out()
    say("wrong labels, strangers and duplicates")
    suspicions = suspicions_of(subject, loo, duplicates=task.n_data >= TWINS)
    tested: tuple[Any, ...] = (None, None, "")
    if test is not None:
        say(f"test data: {test.n_data:,} examples")
        mean = posterior.on(test, same_data=False).mean
        tested = (*evaluated(test, mean), unlike_training(task, test, mean))
    found = Findings(task, posterior, scores, loo, memory, suspicions, test, *tested)
    column = by if by != AUTO else "target" if len(groups_of(task, by)) > 1 else None
    if column is None:
        return found
    say(f"what if: without each {column}")
    removals = what_if_each(task, posterior, by=column, evaluate=test, passes=passes)
    return Findings(**{**vars(found), "by": column, "removals": removals})


def groups_of(task: Task, by: str | None) -> list[Any]:
    """The groups that an audit takes out, as far as the data alone tell."""
    if by in task.metadata:
        return sorted({str(value) for value in task.metadata[by]})
    classes = task.likelihood.is_classification and not task.likelihood.is_sequence
    if by is None or (by == AUTO and not classes):
        return []
    rows = torch.arange(task.n_data).split(task.batch_size)
    with torch.no_grad(), task.evaluation():
        each = [task.run(task.fetch(i), task.parameters(), i)[1].cpu() for i in rows]
    targets = torch.cat(each).reshape(task.n_data, -1)
    found = targets.unique(dim=0).tolist()
    return [] if by == AUTO and (targets.shape[1] > 1 or len(found) > MOST_GROUPS) else found


def check_column(by: str | None, task: Task) -> None:
    """Raise :class:`InputError` before the work where ``by`` can be no column."""
    if by is not None and by not in (AUTO, "target", "prediction", *task.metadata):
        known = ", ".join(["target", "prediction", *task.metadata])
        raise InputError(f"there is no column {by!r} to group by; the task has {known}")
