"""What each training example's prediction would have been without it.

    first order   f_i^{\\i} = f_i + τ V_i ē_i
    cavity        f_i^{\\i} = f_i + (I − τ V_i Λ_i)⁻¹ τ V_i ē_i

ē_i is averaged over the posterior's run, τ its temperature. At a minimum, where
ē_i is the error and τ is 1, structures that hold the whole curvature take the cavity form: it takes
the example's own share out of the posterior as well. For linear regression it is Cook's formula,
and the mean squared error is PRESS, exactly. Averaged over the data the left-out losses estimate
the loss on new data from the training data alone.
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
        posterior: learned on those data. A fitted probabilistic model of
            :mod:`blr_analysis.learning_rule.inference` keeps its data and stands alone,
            ``leave_one_out(fitted)`` or ``leave_one_out(None, fitted)``: its sites are subtracted.
            A list of those of several runs: the mean of their moves, from the last one's outputs.
        correction: "first_order", "cavity", or "auto": at a minimum the cavity for structures that
            bear it ("full", "lowrank"), else first order. Where the leverage is too close to 1 for
            the cavity, the row is "bounded"; the table's ``correction`` column says so.
        refine: how many examples, those whose loss is estimated to change most, are left out by
            quasi-Newton moves on the others and a real forward pass instead, some 12 passes over
            the data each: rows "descent". For a model at the minimum of its own objective.

    Returns:
        The left-out predictions; of sequences (likelihood "tokens", "causal_lm") and of a sum of
        sites the losses alone.

    Raises:
        InputError: an unknown correction, the cavity or refinement of sequences, ``refine`` out of
            range or of several posteriors.
        PosteriorError, ModelError, DataError: as :func:`blr_analysis.sensitivity`.

    Source: Nickl et al., NeurIPS 2023, Eq. 12 (first order); Cook, 1977 (cavity). Beyond
    the bound see :mod:`blr_analysis.sensitivity.corrections`.

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
    count = 0 if refine is None else at_least(0, "refine", refine)
    subject = subject_of(task, posterior)
    if count > subject.n:
        raise InputError(f"refine must be at most {subject.n} examples, got {count}")
    return subject.left_out(correction, count)
