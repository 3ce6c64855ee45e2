"""What an audit finds: scores, leave-one-out, memory map, and what each group is worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from blr_analysis.backprop.loss import Evaluation, evaluated
from blr_analysis.errors import InputError
from blr_analysis.memory_map import MemoryMap, memory_map
from blr_analysis.posterior import Posterior
from blr_analysis.posterior.predictive import scored_by
from blr_analysis.sensitivity import (
    LeaveOneOut,
    Scores,
    SequenceLeaveOneOut,
    SequenceScores,
    leave_one_out,
    sensitivity,
    what_if_each,
)
from blr_analysis.sensitivity.scores import check_test
from blr_analysis.task import Task
from blr_analysis.views import Tabular

MOST_GROUPS = 100  # without being asked; each group costs a pass over its examples and the test set
DESCENTS = 200  # passes over the data for all groups together, of a model near its minimum
AUTO = "auto"
JUDGED = ("label_quality", "suspicious")  # columns that only a classification has


@dataclass(frozen=True)
class Findings(Tabular):
    """What :func:`investigate` found.

    Attributes:
        task, posterior, test: what was asked about; ``test`` under the trained model, or None.
        scores, loo, memory: the analyses of the training data.
        on_test, test_targets: losses, hits and targets on ``test``; None without one.
        by: the column whose groups were taken out; None if none was.
        removals: DataFrame of :func:`blr_analysis.what_if_each`, measured on ``test`` (on the
            training data without one); None if ``by`` is.
    """

    task: Task
    posterior: Posterior
    scores: Scores | SequenceScores
    loo: LeaveOneOut | SequenceLeaveOneOut
    memory: MemoryMap
    test: Task | None = None
    on_test: Evaluation | None = None
    test_targets: Tensor | None = None
    by: str | None = None
    removals: pd.DataFrame | None = None

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per training example: the memory map's table and the left-out predictions.

        Beyond the columns of ``memory.table``: ``left_out_prediction`` and ``left_out_loss``
        (what the model would say without the example) and, for classification,
        ``label_quality`` (the left-out probability of the label, between 0 and 1, lower is more
        suspicious) and ``suspicious`` (whether the left-out prediction contradicts the label). Of
        sequences ``left_out_loss`` and ``left_out_loss_per_token`` alone.
        """
        if isinstance(self.loo, SequenceLeaveOneOut):
            losses = self.loo.losses
            left_out = {
                "left_out_loss": losses.numpy(),
                "left_out_loss_per_token": (losses / self.loo.tokens).numpy(),
            }
            return self._beside_the_map(left_out)
        said = self.loo.predictions.flatten(1) if self.loo.predictions.ndim > 1 else None
        columns: dict[str, Any] = {}
        if said is None or said.shape[1] == 1:
            columns["left_out_prediction"] = self.loo.predictions.flatten().numpy()
        else:
            for c, column in enumerate(said.unbind(1)):
                columns[f"left_out_prediction_{c}"] = column.numpy()
        columns["left_out_loss"] = self.loo.losses.numpy()
        right = self.loo.likelihood.correct(self.loo.logits, self.loo.targets)
        if right is not None:
            plain = scored_by(self.loo.likelihood)  # of weighted losses no probability is left
            losses = plain.nll(self.loo.logits, self.loo.targets).double()
            columns["label_quality"] = (-losses).exp().numpy()
            columns["suspicious"] = (right == 0).numpy()
        return self._beside_the_map(columns)

    def _beside_the_map(self, columns: dict[str, Any]) -> pd.DataFrame:
        """The memory map's table with further columns after the region."""
        table = self.memory.table.rename(columns={n: f"{n}_metadata" for n in (*columns, *JUDGED)})
        after = list(table).index("region") + 1
        for place, (name, column) in enumerate(columns.items()):
            table.insert(after + place, name, column)
        return table


def investigate(
    task: Task,
    posterior: Posterior,
    *,
    test: Task | None = None,
    by: str | None = AUTO,
    passes: int | None = None,
    say: Callable[[str], None] | None = None,
    progress: bool | None = None,
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
        progress: None shows bars on a terminal when the work is long.

    Raises:
        BLRError: as the analyses themselves.
    """
    say = say or (lambda text: None)
    if test is not None:
        test = check_test(test, task)
    say(f"sensitivity: how each of {task.n_data:,} examples shapes the model")
    estimated = True if task.likelihood.is_sequence else None
    scores = sensitivity(task, posterior, variance=estimated)
    say("memory map: prediction error against prediction variance")
    memory = memory_map(scores)
    say("leave-one-out: every prediction without its own example")
    loo = leave_one_out(task, posterior)
    on_test, test_targets = None, None
    if test is not None:
        say(f"test data: {test.n_data:,} examples")
        mean = posterior.on(test, same_data=False).mean
        on_test, test_targets = evaluated(test, mean, progress=progress)
    column = _groups(scores) if by == AUTO else by
    removals = None
    if column is not None:
        say(f"what if: without each {group_noun(column, scores)}")
        removals = what_if_each(task, posterior, by=column, evaluate=test, passes=passes)
    tested = (test, on_test, test_targets)
    return Findings(task, posterior, scores, loo, memory, *tested, by=column, removals=removals)


def descent_passes(groups: int) -> int:
    """Over the data, for each of so many groups of a model near its minimum."""
    return min(20, max(5, DESCENTS // groups))


def groups_of(task: Task, by: str | None) -> int:
    """How many groups an audit takes out, as far as the data alone tell; of predictions as many as
    there are classes."""
    if by is None or (by == AUTO and task.likelihood.is_sequence):
        return 0
    if by in task.metadata:
        return len(set(task.metadata[by]))
    rows = torch.arange(task.n_data).split(task.batch_size)
    with torch.no_grad(), task.evaluation():
        each = [task.run(task.fetch(i), task.parameters(), i)[1].cpu() for i in rows]
    targets = torch.cat(each)
    found = len(targets.unique(dim=0))
    several = targets.ndim == 2 and targets.shape[1] > 1
    auto = task.likelihood.is_classification and not several and 2 <= found <= MOST_GROUPS
    return found if by != AUTO or auto else 0


def influence_column(table: pd.DataFrame) -> str:
    """ "deviation"; "self_influence" where there are too many outputs for it."""
    known = "deviation" in table and not np.isnan(table["deviation"].to_numpy()).all()
    return "deviation" if known else "self_influence"


def most_influential(table: pd.DataFrame, n: int) -> pd.DataFrame:
    """The examples without which their own prediction would move furthest, the first first."""
    column = influence_column(table)
    return table.sort_values(column, ascending=False, kind="stable").head(n)


def most_suspicious(table: pd.DataFrame, n: int) -> pd.DataFrame:
    """The labels that the model, without that very example, contradicts most surely.

    For regression: the targets that are worst predicted without the example; of sequences those
    with the worst loss of a token.
    """
    if "suspicious" in table:
        return table.loc[table["suspicious"]].sort_values("label_quality", kind="stable").head(n)
    return table.sort_values(suspicion_column(table), ascending=False, kind="stable").head(n)


def suspicion_column(table: pd.DataFrame) -> str:
    """By what examples are suspicious whose labels cannot be contradicted."""
    each = "left_out_loss_per_token"
    return each if each in table else "left_out_loss"


def _groups(scores: Scores | SequenceScores) -> str | None:
    """ "target" where taking out each class is affordable and makes sense."""
    if isinstance(scores, SequenceScores) or not scores.likelihood.is_classification:
        return None
    targets = scores.targets
    if targets.ndim == 2 and targets.shape[1] > 1:
        return None
    return "target" if 2 <= len(targets.unique()) <= MOST_GROUPS else None


def group_noun(by: str, scores: Scores | SequenceScores) -> str:
    """What one group of a column is called."""
    return "class" if by == "target" and scores.likelihood.is_classification else by


def check_column(by: str | None, task: Task) -> None:
    """Raise :class:`InputError` before the work where ``by`` can be no column."""
    if by is not None and by not in (AUTO, "target", "prediction", *task.metadata):
        known = ", ".join(["target", "prediction", *task.metadata])
        raise InputError(f"there is no column {by!r} to group by; the task has {known}")
