"""Which rank an index needs, judged before the pass over all data."""

from __future__ import annotations

from blr_analysis.posterior.posterior import Posterior
from blr_analysis.sensitivity.door import checked_posterior
from blr_analysis.sensitivity.index.build import exact_on_probe, measured_error, of_one_checkpoint
from blr_analysis.sensitivity.index.projection import DTYPES, Projection
from blr_analysis.sensitivity.index.sketch import Sketch
from blr_analysis.sensitivity.training_errors import mean_errors
from blr_analysis.task import Task

DOUBLINGS = 3


def larger_ranks(rank: int) -> list[int]:
    """The ranks that are tried.

    >>> larger_ranks(100)
    [200, 400, 800]
    """
    return [rank * 2**power for power in range(1, DOUBLINGS + 1)]


def rank_with_error_below(
    limit: float, task: Task, posterior: Posterior, rank: int, *, dtype: str = "int8"
) -> int | None:
    """The first of :func:`larger_ranks` whose index has a relative error below ``limit``.

    It is measured on the pairs of examples on which :meth:`Index.build` measures its error. None if
    no rank's error is.
    """
    q = of_one_checkpoint(checked_posterior(task, posterior))
    task = task.holding(q.buffers).quiet
    errors = mean_errors(task, q)
    exact = None
    for larger in larger_ranks(rank):
        projection = Projection(task, Sketch.of(q, larger), errors)
        if exact is None:
            exact = exact_on_probe(projection)
        if measured_error(projection, DTYPES[dtype], exact).relative_rms < limit:
            return larger
    return None
