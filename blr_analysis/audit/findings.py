"""What an audit finds: scores, leave-one-out, memory map, suspects, and what groups are worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
from blr_analysis.sensitivity.subjects import Sites, subject_of
from blr_analysis.sensitivity.suspicious import suspicions_of
from blr_analysis.task import Task
from blr_analysis.views import Tabular

MOST_GROUPS = 100  # that "auto" takes out; each group costs its trainings
AUTO = "auto"
LEAST_FOR_TWINS = 3  # with fewer examples, nearness says nothing


@dataclass(frozen=True)
class Findings(Tabular):
    """What :func:`investigate` found.

    Attributes:
        task, posterior, test: the subject of the audit; ``test`` under the trained model, or None.
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
        model says without the example (``left_out_prediction``, ``left_out_loss``) and ``kind``,
        the fault that is suspected."""
        columns = self._left_out_predictions()
        columns["left_out_loss"] = self.loo.losses.numpy()
        columns["kind"] = self.suspicions.kind
        table = self.memory.table.rename(columns={name: f"{name}_metadata" for name in columns})
        first_position = list(table).index("region") + 1
        for position, (name, column) in enumerate(columns.items(), first_position):
            table.insert(position, name, column)
        return table

    def _left_out_predictions(self) -> dict[str, Any]:
        """A column for each number that the model predicts of an example."""
        if self.loo.predictions is None:
            return {}
        predictions = self.loo.predictions.reshape(len(self.loo), -1).numpy()
        if predictions.shape[1] == 1:
            return {"left_out_prediction": predictions[:, 0]}
        return {f"left_out_prediction_{c}": column for c, column in enumerate(predictions.T)}

    @property
    def suspects(self) -> pd.DataFrame:
        """The rows of ``suspicious(task, posterior).table`` that are suspected of a fault."""
        table = self.suspicions.table
        return table[table["kind"] != NO_FAULT]

    @property
    def influence(self) -> str:
        """The column that ranks: "deviation", or "self_influence" where there are too many outputs
        for it."""
        if "deviation" in self.table and self.table["deviation"].notna().to_numpy().any():
            return "deviation"
        return "self_influence"

    @property
    def noun(self) -> str:
        """What one group is called: "class", or the column that tells groups apart."""
        if self.task.likelihood.is_classification and self.by in (None, "target"):
            return "class"
        return str(self.by)


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
        InputError: a fitted probabilistic model in the place of a task, no task, no posterior, or
            several.
        BLRError: as the analyses themselves.
    """
    check_auditable(task, posterior)
    say = say or (lambda text: None)
    if test is not None:
        test = check_test(test, task)
    posterior = with_stationarity(task, posterior)  # the temperature depends on it
    say(f"sensitivity: how each of {task.n_data:,} examples shapes the model")
    subject = subject_of(task, posterior)
    scores = subject.scores(variance=task.likelihood.is_sequence or None)
    say("leave-one-out: every prediction without its own example")
    loo = subject.left_out()
    say("wrong labels, strangers and duplicates")
    findings = Findings(
        task=task,
        posterior=posterior,
        scores=scores,
        loo=loo,
        memory=memory_map(scores),
        suspicions=suspicions_of(subject, loo, duplicates=task.n_data >= LEAST_FOR_TWINS),
    )
    if test is not None:
        say(f"test data: {test.n_data:,} examples")
        findings = with_test(findings, test)
    column = column_to_remove_by(task, by)
    if column is None:
        return findings
    say(f"what if: without each {column}")
    removals = what_if_each(task, posterior, by=column, evaluate=test, passes=passes)
    return replace(findings, by=column, removals=removals)


def check_auditable(task: Any, posterior: Any) -> None:
    """Raise :class:`InputError` where an audit has nothing to work on: it takes a task and one
    posterior."""
    subject = subject_of(task, posterior)
    if isinstance(subject, Sites):
        remedy = "ask sensitivity, leave_one_out, suspicious and what_if of it"
        raise subject.lacks("audit or report", remedy)
    instance("posterior", posterior, Posterior, "one Posterior")


def with_test(findings: Findings, test: Task) -> Findings:
    """The findings with losses, hits and targets on the test data."""
    mean = findings.posterior.on(test, same_data=False).mean
    on_test, test_targets = evaluated(test, mean)
    return replace(
        findings,
        test=test,
        on_test=on_test,
        test_targets=test_targets,
        unlike=unlike_training(findings.task, test, mean),
    )


def column_to_remove_by(task: Task, by: str | None) -> str | None:
    """The column whose groups are taken out; "auto" means the classes, where there are several."""
    if by != AUTO:
        return by
    return "target" if len(groups_of(task, by)) > 1 else None


def groups_of(task: Task, by: str | None) -> list[Any]:
    """The groups that an audit takes out, as far as the data alone tell."""
    if by is None:
        return []
    if by in task.metadata:
        return sorted({str(value) for value in task.metadata[by]})
    has_classes = task.likelihood.is_classification and not task.likelihood.is_sequence
    if by == AUTO and not has_classes:
        return []
    targets = all_targets(task).reshape(task.n_data, -1)
    groups = targets.unique(dim=0).tolist()
    has_several_targets = targets.shape[1] > 1
    if by == AUTO and (has_several_targets or len(groups) > MOST_GROUPS):
        return []
    return groups


def all_targets(task: Task) -> Tensor:
    """The targets of all examples, as the task's forward function gives them."""
    batches = torch.arange(task.n_data).split(task.batch_size)
    model = task.at(task.parameters())
    with torch.no_grad():
        return torch.cat([model.run(indices)[1].cpu() for indices in batches])


def check_column(by: str | None, task: Task) -> None:
    """Raise :class:`InputError` before the work where ``by`` can be no column."""
    if by is None or by == AUTO:
        return
    columns = ["target", "prediction", *task.metadata]
    if by not in columns:
        names = ", ".join(columns)
        raise InputError(f"there is no column {by!r} to group by; the task has {names}")
