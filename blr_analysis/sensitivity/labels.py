"""Which other label fits an example's prediction better than its own?

gain of class c = ℓ(y) − ℓ(c)
"""

from __future__ import annotations

import torch
from torch import Tensor

from blr_analysis.likelihoods import Bernoulli, Likelihood


def relabelling_gains(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """ℓ(y) − ℓ(c) of every label c, in nats ``[N, C]``.

    It is −inf for the label y itself, and 0 for targets that do not count. For Bernoulli it is the
    gain of flipping each output.
    """
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
    """The gain of the best other label, in nats ``[N]``, and this label.

    The label has the form of the targets; it is None for regression. Only labels that some example
    has are considered.
    """
    if not likelihood.is_classification:
        return torch.zeros(len(outputs)), None
    gains = relabelling_gains(likelihood, outputs, targets)
    if isinstance(likelihood.kind, Bernoulli):
        return _best_flips(gains, targets)
    ignored = (gains == 0).all(-1)
    occurs = _occurring(targets, outputs.shape[1], ignored)
    gain, proposed = gains.masked_fill(~occurs, -torch.inf).max(-1)
    has_no_other = gain.isinf()
    if targets.ndim == 2:
        return gain, torch.where(has_no_other, targets.argmax(-1), proposed)
    return gain, torch.where(ignored | has_no_other, targets, proposed)


def _best_flips(gains: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The largest gain of flipping a binary output, and the targets after all useful flips.

    A single output has one other label, so it is always flipped. Of several outputs those are
    flipped whose gain is positive. An output with the same answer in all examples is not flipped.
    """
    has_both_answers = (targets > 0.5).any(0) & (targets <= 0.5).any(0)
    gains = gains.masked_fill(~has_both_answers, -torch.inf)
    has_one_output = gains.shape[1] == 1
    smallest_gain = -torch.inf if has_one_output else 0.0
    proposed = torch.where(gains > smallest_gain, 1 - targets, targets)
    return gains.amax(-1), proposed


def _occurring(targets: Tensor, n_classes: int, ignored: Tensor) -> Tensor:
    """Which classes some example has, ``[C]``."""
    if targets.ndim == 2:
        return (targets > 0).any(0)
    return torch.bincount(targets[~ignored], minlength=n_classes) > 0
