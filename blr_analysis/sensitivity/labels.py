"""Which other label fits an example's prediction better than its own?

The gain of class c is ℓ(y) − ℓ(c) with ℓ = −log p: how much ℓ falls if the label y becomes c.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blr_analysis.likelihoods import Bernoulli, Likelihood


def relabelling_gains(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """ℓ(y) − ℓ(c) of every label c, in nats ``[N, C]``.

    It is −inf for the label y itself, and 0 for targets that do not count. Of targets that are
    probabilities of the classes, y is the most probable class. For Bernoulli it is the gain of
    flipping each output.
    """
    if isinstance(likelihood.kind, Bernoulli):
        return outputs * (1 - 2 * targets)
    are_probabilities = targets.ndim == 2
    classes = targets.argmax(-1) if are_probabilities else targets
    is_ignored = _ignored(likelihood, outputs, targets)[:, None]
    columns = classes[:, None].masked_fill(is_ignored, 0)
    gains = outputs - outputs.gather(1, columns)  # ℓ(y) − ℓ(c) = f_c − f_y
    gains = gains.scatter(1, columns, -torch.inf)
    return gains.masked_fill(is_ignored, 0.0)


def _ignored(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """Which targets do not count, ``[N]``."""
    correct = likelihood.correct(outputs, targets)
    assert correct is not None
    return correct.isnan()


def best_label(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gain of the best other label, in nats ``[N]``, and this label.

    The label is a class ``[N]``, also where the targets are probabilities of the classes; for
    Bernoulli it is a target ``[N, C]``, and for regression None. Only labels that some example has
    are considered. An example without another label, or whose target does not count, keeps its
    own.
    """
    if not likelihood.is_classification:
        return torch.zeros(len(outputs)), None
    gains = relabelling_gains(likelihood, outputs, targets)
    if isinstance(likelihood.kind, Bernoulli):
        return _best_flips(gains, targets)
    is_ignored = _ignored(likelihood, outputs, targets)
    occurs = _occurring(targets, outputs.shape[1], is_ignored)
    gain, proposed = gains.masked_fill(~occurs, -torch.inf).max(-1)
    are_probabilities = targets.ndim == 2
    classes = targets.argmax(-1) if are_probabilities else targets
    has_no_other = gain.isinf()
    return gain, torch.where(is_ignored | has_no_other, classes, proposed)


def _best_flips(gains: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The largest gain of flipping a binary output, and the targets after all useful flips.

    A single output has one other label, so it is always flipped. Of several outputs those are
    flipped whose gain is positive. An output with the same answer in all examples is not flipped.
    """
    has_both_answers = (targets > 0.5).any(0) & (targets <= 0.5).any(0)
    gains = gains.masked_fill(~has_both_answers, -torch.inf)
    has_one_output = gains.shape[1] == 1
    is_flipped = gains > (-torch.inf if has_one_output else 0.0)
    proposed = torch.where(is_flipped, 1 - targets, targets)
    return gains.amax(-1), proposed


def _occurring(targets: Tensor, n_classes: int, is_ignored: Tensor) -> Tensor:
    """Which classes some example has, ``[C]``."""
    if targets.ndim == 2:
        return (targets > 0).any(0)
    return torch.bincount(targets[~is_ignored], minlength=n_classes) > 0
