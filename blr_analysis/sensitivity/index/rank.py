"""Which rank an index needs, judged before the pass over all data."""

from __future__ import annotations

from collections.abc import Sequence

from blr_analysis.posterior.posterior import Posterior
from blr_analysis.sensitivity.door import checked_posterior
from blr_analysis.sensitivity.index.build import measured_errors, of_one_checkpoint
from blr_analysis.sensitivity.index.projection import DTYPES, Projection
from blr_analysis.sensitivity.index.sketch import Sketch
from blr_analysis.sensitivity.influence.results import ProjectionError
from blr_analysis.sensitivity.training_errors import mean_errors
from blr_analysis.task import Task

DOUBLINGS = 3
LARGEST = 32768  # the rank where the user names none and no smaller one is enough
HALVINGS = 5


def larger_ranks(rank: int) -> list[int]:
    """The ranks that are tried.

    >>> larger_ranks(100)
    [200, 400, 800]
    """
    return [rank * 2**power for power in range(1, DOUBLINGS + 1)]


def smaller_ranks(rank: int) -> list[int]:
    """The rank and its halves, which are tried in this order.

    >>> smaller_ranks(320)
    [320, 160, 80, 40, 20, 10]
    """
    return [rank // 2**power for power in range(HALVINGS + 1)]


def rank_with_error_below(
    limit: float, task: Task, posterior: Posterior, rank: int, *, dtype: str = "int8"
) -> int | None:
    """The first of :func:`larger_ranks` whose index has a relative error below ``limit``.

    It is measured on the pairs of examples on which :meth:`Index.build` measures its error. None if
    no rank's error is.
    """
    errors = errors_of_ranks(task, posterior, larger_ranks(rank), dtype)
    return next((larger for larger, error in errors if error.relative_rms < limit), None)


def smallest_rank_with_error_below(
    limit: float,
    task: Task,
    posterior: Posterior,
    largest: int = LARGEST,
    *,
    dtype: str = "int8",
) -> tuple[int, ProjectionError]:
    """The last of :func:`smaller_ranks` down to which the relative error stays below ``limit``.

    Returns:
        The rank and its error, on the pairs of examples on which :meth:`Index.build` measures it.
        Where no error is below the limit, these are of the largest rank.
    """
    size = sum(mean.numel() for mean in posterior.mean.values())
    ranks = smaller_ranks(largest)
    storing_all = [rank for rank in ranks if rank >= size]
    errors = errors_of_ranks(task, posterior, ranks[len(storing_all[1:]) :], dtype)
    chosen = errors[0]
    for rank, error in errors:
        if not error.relative_rms < limit:
            break
        chosen = (rank, error)
    return chosen


def errors_of_ranks(
    task: Task, posterior: Posterior, ranks: Sequence[int], dtype: str
) -> list[tuple[int, ProjectionError]]:
    """Each rank with the error that an index of that rank has, from the same gradients."""
    q = of_one_checkpoint(checked_posterior(task, posterior))
    task = task.holding(q.buffers).quiet
    cotangent = mean_errors(task, q)
    projections = [Projection(task, Sketch.of(q, rank), cotangent) for rank in ranks]
    errors = measured_errors(projections, DTYPES[dtype])
    return list(zip(ranks, errors, strict=True))
