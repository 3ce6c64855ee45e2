"""The prediction of each training example by a model that was trained without it.

    first order   f_i^{\\i} = f_i + τ V_i ē_i
    cavity        f_i^{\\i} = f_i + (I − τ V_i Λ_i)⁻¹ τ V_i ē_i

ē_i is the error, averaged over the posterior's run, and τ is the posterior's temperature. At a
minimum ē_i is the final error and τ is 1. There, structures that contain the whole curvature use
the cavity form, which also removes the example's curvature from the posterior. For linear
regression the cavity is exact: it is Cook's formula, and the mean squared error is PRESS. The mean
of left-out losses estimates the loss on new data from the training data alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blr_analysis.checks import at_least, one_of
from blr_analysis.errors import InputError
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.sensitivity.results import LeaveOneOut
from blr_analysis.sensitivity.subjects import subject_of
from blr_analysis.task import Task

CORRECTIONS = ("auto", "cavity", "first_order")


@torch.inference_mode(False)  # also where the caller switched it on
def leave_one_out(
    task: Task,
    posterior: Posterior | Sequence[Posterior] | None = None,
    *,
    correction: str = "auto",
    refine: int | None = None,
) -> LeaveOneOut:
    """Every example's prediction as if the model had been trained without it.

    Args:
        task: the model and the data it was trained on.
        posterior: learned on those data; or a list of the posteriors of several runs, whose mean
            move is added to the outputs of the last run. A fitted probabilistic model of
            :mod:`blr_analysis.learning_rule.inference` has its data and needs no task,
            ``leave_one_out(fitted)`` or ``leave_one_out(None, fitted)``: its sites are subtracted.
        correction: "first_order", "cavity", or "auto". "auto" takes the cavity at a minimum for
            structures with the whole curvature ("full", "lowrank"), and else the first order. If
            the leverage is too close to 1 for the cavity, the correction is "bounded". The table's
            column ``correction`` says which one each example has.
        refine: how many examples to solve by a descent on all other examples, in place of the
            formula ("descent"). They are those whose loss should change most. Each takes about 12
            passes over the data. Only for a model at the minimum of its objective.

    Returns:
        The left-out predictions; for sequences (likelihood "tokens", "causal_lm") and for sums of
        sites, the left-out losses alone.

    Raises:
        InputError: the correction is unknown; ``refine`` is out of range, or the posteriors are
            several; or sequences are to have a cavity or a refinement.
        PosteriorError, ModelError, DataError: the errors of :func:`blr_analysis.sensitivity`.

    Source: Nickl et al., NeurIPS 2023, Eq. 12 (first order); Cook, 1977 (cavity). For "bounded" see
    :mod:`blr_analysis.sensitivity.corrections`.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X = torch.randn(40, 2, dtype=torch.float64); y = X.sum(1)
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> model.weight.data = torch.linalg.solve(X.T @ X + torch.eye(2), X.T @ y)[None]
        >>> task = blr.Task(model, (X, y), likelihood="gaussian")
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
        >>> loo = leave_one_out(task, q)
        >>> hat = (X @ torch.linalg.inv(X.T @ X + torch.eye(2)) @ X.T).diagonal()
        >>> press = ((y - X @ model.weight[0]) / (1 - hat)).square().mean().item()
        >>> abs(loo.mse / press - 1) < 1e-9
        True
    """
    one_of("correction", correction, CORRECTIONS)
    n_refined = 0 if refine is None else at_least(0, "refine", refine)
    subject = subject_of(task, posterior)
    if n_refined > subject.n:
        raise InputError(f"refine must be at most {subject.n} examples, got {n_refined}")
    return subject.left_out(correction, n_refined)
