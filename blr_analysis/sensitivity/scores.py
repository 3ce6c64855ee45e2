"""Prediction error, prediction variance and deviation of every training example.

The memory-perturbation equation (Nickl et al., NeurIPS 2023): without example i the model's
output there would move by

    f_i^{\\i} − f_i ≈ τ V_i ē_i,    ē_i = mean_t ∂ℓ_i/∂f (t),    V_i = J_i Σ J_iᵀ

It is the prediction variance V_i times the prediction error ē_i, which is averaged over the
posterior's run; τ is the posterior's temperature.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blr_analysis.checks import instance
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.sensitivity.results import Scores
from blr_analysis.sensitivity.subjects import subject_of
from blr_analysis.task import Task


@torch.inference_mode(False)  # also where the caller switched it on
def sensitivity(
    task: Task,
    posterior: Posterior | Sequence[Posterior] | None = None,
    *,
    variance: bool | None = None,
) -> Scores:
    """How much each training example shapes the model.

    It takes one forward pass, and C backward passes that stop at the layers' outputs; no gradient
    of a single example is stored. The model runs at the posterior's mean, in eval mode, and is not
    changed.

    Args:
        task: the model and the data it was trained on.
        posterior: learned on those data; or a list of the posteriors of several runs
            (:func:`blr_analysis.rerun`): error, variance, deviation and self-influence are then
            means over the runs; outputs, losses and predictions are those of the last run. A fitted
            probabilistic model of :mod:`blr_analysis.learning_rule.inference` has its data and
            needs no task, ``sensitivity(fitted)`` or ``sensitivity(None, fitted)``: its sites are
            subtracted.
        variance: whether to compute V_i; None: if C ≤ 256 and N·C² numbers fit in 1 GiB. Without
            V_i, one backward pass gives the self-influence. For sequences: whether to estimate
            tr V_i, by four more backward passes.

    Returns:
        The scores. Attributes that sequences (likelihood "tokens", "causal_lm") or sums of sites do
        not have are None.

    Raises:
        PosteriorError: the posterior is of another model, or of another number of examples.
        ModelError: outputs are NaN or inf, BatchNorm is in training mode, or the model is in half
            precision.
        DataError: inputs are NaN or inf, or targets are out of range.

    Source: Nickl et al., NeurIPS 2023, Eqs. 5–8. V_i is summed layer by layer, for a diagonal Σ as
    Σ_o d_co d_c'o Σ_k σ²_ok a_k².

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(30, 2), torch.randint(3, (30,))
        >>> task = blr.Task(torch.nn.Linear(2, 3), (X, y))
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
        >>> scores = sensitivity(task, q)
        >>> scores.error.shape, scores.variance.shape, scores.deviation.shape
        (torch.Size([30, 3]), torch.Size([30, 3, 3]), torch.Size([30]))
    """
    if variance is not None:
        instance("variance", variance, bool, "True, False or None")
    return subject_of(task, posterior).scores(variance)
