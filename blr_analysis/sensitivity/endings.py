"""Whether trainings by a recipe end at the same loss as the model's own training.

Let L be the mean training loss of the model, and L_1 … L_n the losses at the end of trainings with
other seeds, with mean M and standard deviation σ. Let s be the standard error of M − L over the
examples. The recipe describes another training if

    |M − L| > max(t σ √(1 + 1/n), 3 s, (ROUGH + changed) · max(M, L))

The first bound holds for 19 of 20 further trainings by the same recipe, where their losses are
normal: t is the quantile of Student's distribution with n − 1 degrees of freedom.

``changed`` is the share of the data that was different in these trainings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ROUGH = 0.1  # share of a loss by which trainings may differ before a second seed is trained
LIKELY = 0.95  # share of further trainings by the same recipe that are within the bound
ERRORS = 3.0  # standard errors over the examples
TRAININGS = 3  # with fewer the bound is so wide that few other recipes are beyond it


def ending_note(
    model_losses: Tensor,
    trainings: Sequence[Tensor],
    *,
    changed: float = 0.0,
    another: Callable[[int], Tensor] | None = None,
) -> str:
    """One line that says that the recipe's trainings end at another loss than the model's.

    It is "" where they end at the same loss.

    Args:
        model_losses: losses ``[M]`` of training examples at the model's weights.
        trainings: losses ``[M]`` of the same examples at the end of each training.
        changed: the share of the data that was different in these trainings.
        another: trains one more seed, the k-th further one from 0, and returns its losses. It is
            called, until there are TRAININGS, only where those so far ended at another loss: two
            losses say little of a spread.

    >>> own = torch.full((100,), 0.2)
    >>> ending_note(own, [own + 0.3, own + 0.31]).partition(": ")[0]
    "the recipe's trainings end at a training loss of 0.505, the model's at 0.2"
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
    if another is not None:
        for further in range(TRAININGS - len(at_endings)):
            at_endings.append(another(further).double()[usable])
            if _alike(at_model, at_endings, changed):
                return ""
    mean_ending = float(torch.stack(at_endings).mean())
    return (
        f"the recipe's trainings end at a training loss of {mean_ending:.3g}, the model's at "
        f"{float(at_model.mean()):.3g}: the recipe is of another training"
    )


def _alike(model_losses: Tensor, trainings: list[Tensor], changed: float) -> bool:
    """Whether the model's own training may be one more of these."""
    means = torch.stack([losses.mean() for losses in trainings])
    differences = torch.stack(trainings).mean(0) - model_losses
    gap = abs(float(differences.mean()))
    error = float(differences.std(correction=0)) / len(model_losses) ** 0.5
    size = max(abs(float(means.mean())), abs(float(model_losses.mean())))
    return gap <= max(_bound_of_seeds(means), ERRORS * error, (ROUGH + changed) * size)


def _bound_of_seeds(means: Tensor) -> float:
    """How far a further training by the same recipe is likely to end from their mean; 0 of one."""
    n = len(means)
    if n == 1:
        return 0.0
    from scipy.special import stdtrit  # 0.3 s: not every import of the package pays for it

    quantile = float(stdtrit(n - 1, (1 + LIKELY) / 2))
    return quantile * float(means.std()) * (1 + 1 / n) ** 0.5
