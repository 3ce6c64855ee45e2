"""Explains why a loss has no curvature at some weights, and what helps."""

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
        ModelError: the outputs do not depend on the parameters, or have a gradient of 0.
        PosteriorError: no example counts; or every prediction is certain, or has no error.
    """
    if not depends(task, params):
        raise disconnected()
    any_counts, any_curvature, any_error = _causes(task, params)
    if not any_counts:
        raise PosteriorError("no example counts: every label is ignored; give labels")
    if not any_curvature:
        raise PosteriorError(f"every prediction is certain: the loss has no curvature; {REMEDY}")
    if curvature == "empirical_fisher" and not any_error:
        raise PosteriorError(f"every prediction has an error of 0: no Fisher; {REMEDY}")
    raise ModelError("no output moves with any parameter; are the units dead, the inputs all 0?")


def _causes(task: Task, params: Mapping[str, Tensor]) -> tuple[bool, bool, bool]:
    """Whether any example counts, any has an output Hessian Λ_i above 0, and any an error e_i."""
    any_counts = False
    any_curvature = False
    any_error = False
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), task.evaluation():
        for indices, batch in task.batches():
            outputs, targets = task.run(batch, params, indices)
            likelihood = task.likelihood.at(indices)
            directions = torch.randn(outputs.shape, generator=generator).to(outputs)
            curvature = likelihood.hessian_times(outputs, targets, directions)
            any_counts |= _any_counts(likelihood, outputs, targets)
            any_curvature |= bool(curvature.any())
            any_error |= bool(likelihood.error(outputs, targets).any())
    return any_counts, any_curvature, any_error


def _any_counts(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> bool:
    """Whether some label is not ignored: ``correct`` is NaN for those that are."""
    hits = likelihood.correct(outputs, targets)
    return hits is None or not bool(hits.isnan().all())
