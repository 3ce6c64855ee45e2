"""What can be asked of a posterior and its data, whatever they are.

:func:`subject_of` is the only place that asks which kind somebody has.
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
    """A network (of vectors or of sequences) with its posterior, or a sum of sites that stands
    alone, in the place of one of the two.

    Raises:
        InputError: neither of them, or a task beside a sum of sites.
        PosteriorError: a posterior of another model, or of another number of examples.
    """
    fitted = posterior if isinstance(posterior, SumOfSites) else task
    if isinstance(fitted, SumOfSites):
        _check_alone(fitted, task if fitted is posterior else posterior)
        return Sites(fitted)
    if isinstance(task, Task) and task.likelihood.is_sequence:
        return Sequences(task, posterior)
    return Network(task, posterior)


def _check_alone(fitted: Any, beside: Any) -> None:
    if beside is None or beside is fitted:
        return
    fitted_name, name = type(fitted).__name__, type(beside).__name__
    raise InputError(
        f"a fitted {fitted_name} stands alone: leave out the {name}; test data come third"
    )
