"""Whether predictions agree with their own targets more than chance has it."""

from __future__ import annotations

import torch
from torch import Tensor

from blr_analysis.backprop.loss import Evaluation


def agreement_beyond_chance(evaluation: Evaluation, predictions: Tensor, targets: Tensor) -> float:
    """How much more often predictions agree with their own targets than with those of others;
    of regression their covariance with the targets, which is 0 of shuffled ones."""
    if evaluation.correct is None:
        return _covariance(predictions, targets)
    has_shares = targets.ndim == 2 and targets.shape[1] > 1 and predictions.ndim == 1
    classes = targets.argmax(1) if has_shares else targets
    counts = ~evaluation.correct.isnan()
    answers = predictions.long().reshape(len(predictions), -1)[counts]
    truth = classes.long().reshape(len(classes), -1)[counts]
    size = int(max(answers.max(), truth.max())) + 1
    chances = []
    for answer, true in zip(answers.unbind(1), truth.unbind(1), strict=True):
        answer_shares = torch.bincount(answer, minlength=size) / len(answer)
        true_shares = torch.bincount(true, minlength=size) / len(true)
        chances.append((answer_shares * true_shares).sum())
    agreement = (answers == truth).double().mean()
    return float(agreement - torch.stack(chances).mean())


def _covariance(predictions: Tensor, targets: Tensor) -> float:
    """Σ_i of the products of their distances from their means; 0 where shapes differ."""
    predictions = predictions.double().reshape(len(predictions), -1)
    targets = targets.double().reshape(len(targets), -1)
    if predictions.shape != targets.shape:
        return 0.0
    return float(((predictions - predictions.mean(0)) * (targets - targets.mean(0))).sum())
