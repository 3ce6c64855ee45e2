"""Prediction error, prediction variance and deviation of every training example.

The memory-perturbation equation (Nickl et al., NeurIPS 2023): without example i the model's
output there would move by

    f_i^{\\i} − f_i ≈ τ V_i ē_i,    ē_i = mean_t ∂ℓ_i/∂f (t),    V_i = J_i Σ J_iᵀ

prediction variance times prediction error, averaged over the posterior's run; τ its temperature.
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

    One forward pass and C backward passes that stop at the layers' outputs; no per-example
    gradient of the model is formed. The model runs at the posterior's mean, in eval mode, and is
    left as it is.

    Args:
        task: the model and the data it was trained on.
        posterior: learned on those data. A fitted probabilistic model of
            :mod:`blr_analysis.learning_rule.inference` keeps its data and stands alone,
            ``sensitivity(fitted)`` or ``sensitivity(None, fitted)``: its sites are subtracted.
            A list of those of several runs (:func:`blr_analysis.rerun`): error, variance,
            deviation and self-influence are means over them; outputs, losses and predictions are
            the last one's.
        variance: whether to compute V_i; None: where C ≤ 256 and N·C² fits in 1 GiB. Without it
            one backward pass gives the self-influence. Of sequences: whether to estimate tr V_i,
            by four more backward passes.

    Returns:
        The scores; what sequences (likelihood "tokens", "causal_lm") or a sum of sites do not
        have is None.

    Raises:
        PosteriorError: a posterior of another model, or of another number of examples.
        ModelError: NaN or inf outputs, BatchNorm in training mode, half precision.
        DataError: NaN or inf inputs, targets out of range.

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
