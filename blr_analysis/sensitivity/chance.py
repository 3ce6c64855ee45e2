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
    answers = _labels(predictions)[counts]
    truth = _labels(classes)[counts]
    by_chance = []
    for label in range(answers.shape[1]):
        by_chance.append(_chance_of_agreement(answers[:, label], truth[:, label]))
    agreement = (answers == truth).double().mean()
    return float(agreement - torch.stack(by_chance).mean())


def _labels(values: Tensor) -> Tensor:
    """Whole numbers, a column for each label, ``[N, L]``."""
    return values.long().reshape(len(values), -1)


def _chance_of_agreement(answers: Tensor, truth: Tensor) -> Tensor:
    """Σ_c of the shares of class c in both."""
    n_classes = int(max(answers.max(), truth.max())) + 1
    answer_shares = torch.bincount(answers, minlength=n_classes) / len(answers)
    true_shares = torch.bincount(truth, minlength=n_classes) / len(truth)
    return (answer_shares * true_shares).sum()


def _covariance(predictions: Tensor, targets: Tensor) -> float:
    """Σ_i of the products of their distances from their means; 0 where shapes differ."""
    answers = predictions.double().reshape(len(predictions), -1)
    truth = targets.double().reshape(len(targets), -1)
    if answers.shape != truth.shape:
        return 0.0
    products = (answers - answers.mean(0)) * (truth - truth.mean(0))
    return float(products.sum())
