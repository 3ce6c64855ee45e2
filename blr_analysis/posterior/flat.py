"""Why a loss has no curvature at some weights: the cause in words, and what helps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor

from blr_analysis.backprop.loss import depends, disconnected
from blr_analysis.errors import ModelError, PosteriorError
from blr_analysis.likelihoods import Likelihood
from blr_analysis.task import Task

REMEDY = "stop training earlier, or give prior_precision"


def refuse_flat(task: Task, params: Mapping[str, Tensor], curvature: str) -> NoReturn:
    """Raise the error that says why no parameter has any curvature.

    Raises:
        ModelError: the outputs do not depend on the parameters, or do not move with them.
        PosteriorError: no example counts, or every prediction is certain, or has no error.
    """
    if not depends(task, params):
        raise disconnected()
    counts, curved, has_errors = _facts(task, params)
    if not counts:
        raise PosteriorError("no example counts: every label is ignored; give labels")
    if not curved:
        raise PosteriorError(f"every prediction is certain: the loss has no curvature; {REMEDY}")
    if curvature == "empirical_fisher" and not has_errors:
        raise PosteriorError(f"every prediction has an error of 0: no Fisher; {REMEDY}")
    raise ModelError("no output moves with any parameter; are the units dead, the inputs all 0?")


def _facts(task: Task, params: Mapping[str, Tensor]) -> tuple[bool, bool, bool]:
    """Whether any example counts, any Λ_i is more than 0, and any e_i is."""
    counts = False
    curved = False
    has_errors = False
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), task.evaluation():
        for indices, batch in task.batches():
            outputs, targets = task.run(batch, params, indices)
            likelihood = task.likelihood.at(indices)
            directions = torch.randn(outputs.shape, generator=generator).to(outputs)
            counts |= _any_counts(likelihood, outputs, targets)
            curved |= bool(likelihood.hessian_times(outputs, targets, directions).any())
            has_errors |= bool(likelihood.error(outputs, targets).any())
    return counts, curved, has_errors


def _any_counts(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> bool:
    """Whether some label is not ignored: the hit of an ignored one is NaN."""
    hits = likelihood.correct(outputs, targets)
    return hits is None or not bool(hits.isnan().all())
