"""The findings of an audit: scores, leave-one-out, memory map, suspects, the worth of groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from blr_analysis.backprop.loss import Evaluation, evaluated
from blr_analysis.checks import did_you_mean, instance
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

MAX_AUTO_GROUPS = 100  # that "auto" takes out; each group costs its trainings
AUTO = "auto"
MIN_EXAMPLES_FOR_TWINS = 3  # with fewer examples, nearness says nothing


@dataclass(frozen=True)
class Findings(Tabular):
    """What :func:`investigate` found.

    Attributes:
        task, posterior, test: the subject of the audit; ``test`` under the trained model, or None.
        scores, loo, memory, suspicions: the analyses of the training data.
        on_test, test_targets: losses, hits and targets on ``test``; None without test data.
        unlike: how ``test`` differs from the training data, in one line; "" if it does not.
        by: the column whose groups were taken out; None if no groups were.
        removals: DataFrame of :func:`blr_analysis.what_if_each`, measured on ``test``, or on the
            training data without test data; None without ``by``.
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
        """One row per training example: the memory map's table, and three columns after the region.

        These are the prediction and the loss without the example (``left_out_prediction``, several
        where a prediction has several numbers, and ``left_out_loss``) and the suspected fault
        (``kind``).
        """
        columns = self._left_out_predictions()
        columns["left_out_loss"] = self.loo.losses.numpy()
        columns["kind"] = self.suspicions.kind
        table = self.memory.table.rename(columns={name: f"{name}_metadata" for name in columns})
        first_position = list(table).index("region") + 1
        for position, (name, column) in enumerate(columns.items(), first_position):
            table.insert(position, name, column)
        return table

    def _left_out_predictions(self) -> dict[str, Any]:
        """A column for each number of a left-out prediction."""
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
        """The column that ranks examples: "deviation", or "self_influence" where the deviation is
        missing because there are too many outputs."""
        if "deviation" in self.table and self.table["deviation"].notna().to_numpy().any():
            return "deviation"
        return "self_influence"

    @property
    def noun(self) -> str:
        """The word for one group: "class", or the column by which examples are grouped."""
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
        by: the column whose groups are taken out in turn: "target" or a metadata column; "auto":
            the classes of a classification with at most 100 of them; None: no groups.
        passes: of :func:`blr_analysis.what_if`, for each group.
        say: is called with a few words before each part of the work.

    Raises:
        InputError: no task (a fitted probabilistic model, say), no posterior, or several.
        BLRError: as the analyses themselves.
    """
    check_auditable(task, posterior)
    say = say or (lambda text: None)
    if test is not None:
        test = check_test(test, task)
    posterior = with_stationarity(task, posterior)  # the temperature depends on it
    findings = _on_training_data(task, posterior, say)
    if test is not None:
        say(f"test data: {test.n_data:,} examples")
        findings = with_test(findings, test)
    column = column_to_remove_by(task, by)
    if column is None:
        return findings
    say(f"what if: without each {column}")
    removals = what_if_each(task, posterior, by=column, evaluate=test, passes=passes)
    return replace(findings, by=column, removals=removals)


def _on_training_data(task: Task, posterior: Posterior, say: Callable[[str], None]) -> Findings:
    """The findings that need the training data alone."""
    say(f"sensitivity: how each of {task.n_data:,} examples shapes the model")
    subject = subject_of(task, posterior)
    scores = subject.scores(variance=task.likelihood.is_sequence or None)
    say("leave-one-out: every prediction without its own example")
    loo = subject.left_out()
    say("wrong labels, strangers and duplicates")
    finds_twins = task.n_data >= MIN_EXAMPLES_FOR_TWINS
    return Findings(
        task=task,
        posterior=posterior,
        scores=scores,
        loo=loo,
        memory=memory_map(scores),
        suspicions=suspicions_of(subject, loo, duplicates=finds_twins),
    )


def check_auditable(task: Any, posterior: Any) -> None:
    """Raise :class:`InputError` for anything but a task and one posterior."""
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
        unlike=unlike_training(findings.task, test, mean, names_classes=False),  # trust.py does
    )


def column_to_remove_by(task: Task, by: str | None) -> str | None:
    """The column whose groups are taken out; "auto" means the classes if there are several."""
    if by != AUTO:
        return by
    return "target" if len(groups_of(task, by)) > 1 else None


def groups_of(task: Task, by: str | None) -> list[Any]:
    """The groups that an audit takes out, by the data alone, before anything is computed."""
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
    if by == AUTO and (has_several_targets or len(groups) > MAX_AUTO_GROUPS):
        return []
    return groups


def all_targets(task: Task) -> Tensor:
    """The targets of all examples, as the task's forward function gives them."""
    batches = torch.arange(task.n_data).split(task.batch_size)
    model = task.at(task.parameters())
    with torch.no_grad():
        return torch.cat([model.run(indices)[1].cpu() for indices in batches])


def check_column(by: str | None, task: Task) -> None:
    """Raise :class:`InputError` before the work if ``by`` is no column of the audit."""
    if by is None or by == AUTO:
        return
    columns = ["target", "prediction", *task.metadata]
    if by not in columns:
        names = f"{', '.join(columns)}{did_you_mean(by, columns)}"
        raise InputError(f"there is no column {by!r} to group by; the task has {names}")
