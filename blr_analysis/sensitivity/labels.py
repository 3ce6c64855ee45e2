"""Which other label would an example rather have?

gain of class c = ℓ(y) − ℓ(c)
"""

from __future__ import annotations

import torch
from torch import Tensor

from blr_analysis.likelihoods import Bernoulli, Likelihood


def relabelling_gains(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """ℓ(y) − ℓ(c) for every other label c, ``[N, C]``: −inf at y itself, 0 of examples that do
    not count; of Bernoulli what flipping each output would gain."""
    if isinstance(likelihood.kind, Bernoulli):
        return outputs * (1 - 2 * targets)
    hits = likelihood.correct(outputs, targets)
    assert hits is not None
    ignored = hits.isnan()[:, None]
    classes = targets[:, None] if targets.ndim == 1 else targets.argmax(-1, keepdim=True)
    classes = classes.masked_fill(ignored, 0)
    gains = outputs - outputs.gather(1, classes)
    gains = gains.scatter(1, classes, -torch.inf)
    return gains.masked_fill(ignored, 0.0)


def best_label(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor | None]:
    """What the best other label gains, ``[N]``, and which label that is, in the form of the
    targets; None where there are no labels. A label that no example has is no choice."""
    if not likelihood.is_classification:
        return torch.zeros(len(outputs)), None
    gains = relabelling_gains(likelihood, outputs, targets)
    ignored = (gains == 0).all(-1)
    if isinstance(likelihood.kind, Bernoulli):
        has_both_answers = (targets > 0.5).any(0) & (targets <= 0.5).any(0)
        gains = gains.masked_fill(~has_both_answers, -torch.inf)
        gain = gains.amax(-1)
        is_single_label = gains.shape[1] == 1  # which has exactly one other
        least = -torch.inf if is_single_label else 0.0
        return gain, torch.where(gains > least, 1 - targets, targets)
    occurs = _occurring(targets, outputs.shape[1], ignored)
    gain, proposed = gains.masked_fill(~occurs, -torch.inf).max(-1)
    has_no_other = gain.isinf()
    if targets.ndim == 2:
        return gain, torch.where(has_no_other, targets.argmax(-1), proposed)
    return gain, torch.where(ignored | has_no_other, targets, proposed)


def _occurring(targets: Tensor, n_classes: int, ignored: Tensor) -> Tensor:
    """Which classes some example has, ``[C]``."""
    if targets.ndim == 2:
        return (targets > 0).any(0)
    return torch.bincount(targets[~ignored], minlength=n_classes) > 0
