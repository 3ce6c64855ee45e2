"""Subjects: a posterior and its data, of one of three kinds.

:func:`subject_of` is the only function that decides on the kind.
"""

from __future__ import annotations

from typing import Any

from blr_analysis.errors import InputError
from blr_analysis.sensitivity.subjects.contract import Subject
from blr_analysis.sensitivity.subjects.network import Network
from blr_analysis.sensitivity.subjects.sites import Sites, SumOfSites
from blr_analysis.sensitivity.subjects.tokens import Sequences
from blr_analysis.task import Task

__all__ = ["Network", "Sequences", "Sites", "Subject", "subject_of"]


def subject_of(task: Any, posterior: Any = None) -> Subject:
    """The subject of a task and its posterior, or of a fitted probabilistic model.

    A fitted probabilistic model (a sum of sites) keeps its data. It may be either argument, and the
    other one must be None.

    Raises:
        InputError: there is no posterior, or another argument beside a fitted model.
        PosteriorError: the posterior is of another model, or of another number of examples.
    """
    if isinstance(posterior, SumOfSites):
        _check_alone(posterior, task)
        return Sites(posterior)
    if isinstance(task, SumOfSites):
        _check_alone(task, posterior)
        return Sites(task)
    if isinstance(task, Task) and task.likelihood.is_sequence:
        return Sequences(task, posterior)
    return Network(task, posterior)


def _check_alone(fitted: Any, other_argument: Any) -> None:
    """Refuse another argument beside a fitted model."""
    if other_argument is None or other_argument is fitted:
        return
    raise InputError(
        f"a fitted {type(fitted).__name__} stands alone: leave out the "
        f"{type(other_argument).__name__}; test data come third"
    )
