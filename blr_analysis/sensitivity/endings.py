"""Whether trainings by a recipe end at the same loss as the model's own training.

Let L be the mean training loss of the model, L_s the losses at the end of trainings with other
seeds, M their mean, and s the standard error of M − L over the examples. The recipe describes
another training if

    |M − L| > max(2 (max_s L_s − min_s L_s), 3 s, (ROUGH + changed) · max(M, L))

``changed`` is the share of the data that was different in these trainings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ROUGH = 0.1  # share of a loss by which trainings may differ before a second seed is trained
SEEDS = 2.0  # times the spread between seeds
ERRORS = 3.0  # standard errors over the examples


def ending_note(
    model_losses: Tensor,
    trainings: Sequence[Tensor],
    *,
    changed: float = 0.0,
    another: Callable[[], Tensor] | None = None,
) -> str:
    """One line that says that the recipe's trainings end at another loss than the model's.

    It is "" where they end at the same loss.

    Args:
        model_losses: losses ``[M]`` of training examples at the model's weights.
        trainings: losses ``[M]`` of the same examples at the end of each training.
        changed: the share of the data that was different in these trainings.
        another: trains one more seed and returns its losses; called where a single training
            ended at another loss.

    >>> own = torch.full((100,), 0.2)
    >>> ending_note(own, [own + 0.3, own + 0.31])
    "the recipe's trainings end at a training loss of 0.505, the model's at 0.2: another training"
    >>> ending_note(own, [own + 0.3, own - 0.1])
    ''
    """
    losses = torch.stack([losses.double() for losses in (model_losses, *trainings)])
    usable = losses.isfinite().all(0)
    if not bool(usable.any()):
        return ""
    at_model, *at_endings = losses[:, usable]
    if _alike(at_model, at_endings, changed):
        return ""
    if len(at_endings) == 1 and another is not None:
        at_endings.append(another().double()[usable])
        if _alike(at_model, at_endings, changed):
            return ""
    mean_ending = float(torch.stack(at_endings).mean())
    return (
        f"the recipe's trainings end at a training loss of {mean_ending:.3g}, "
        f"the model's at {float(at_model.mean()):.3g}: another training"
    )


def _alike(model_losses: Tensor, trainings: list[Tensor], changed: float) -> bool:
    """Whether the model's own training may be one more of these."""
    means = torch.stack([losses.mean() for losses in trainings])
    differences = torch.stack(trainings).mean(0) - model_losses
    gap = abs(float(differences.mean()))
    error = float(differences.std(correction=0)) / len(model_losses) ** 0.5
    size = max(abs(float(means.mean())), abs(float(model_losses.mean())))
    spread = float(means.max() - means.min())
    return gap <= max(SEEDS * spread, ERRORS * error, (ROUGH + changed) * size)
