"""Whether predictions agree with their targets more often than chance would."""

from __future__ import annotations

import torch
from torch import Tensor

from blr_analysis.backprop.loss import Evaluation


def agreement_beyond_chance(evaluation: Evaluation, predictions: Tensor, targets: Tensor) -> float:
    """The excess of agreement over chance; about 0 if predictions know nothing of the targets.

    For classes it is the share of examples whose prediction is the target, less the share expected
    of shuffled targets. For regression it is the sum of covariances of predictions and targets.
    """
    if evaluation.correct is None:
        return _covariance(predictions, targets)
    is_probability_targets = targets.ndim == 2 and targets.shape[1] > 1 and predictions.ndim == 1
    classes = targets.argmax(1) if is_probability_targets else targets
    counts = ~evaluation.correct.isnan()
    predicted_labels = _label_columns(predictions)[counts]
    true_labels = _label_columns(classes)[counts]
    agreement = (predicted_labels == true_labels).double().mean()
    by_chance = []
    for predicted, true in zip(predicted_labels.T, true_labels.T, strict=True):
        by_chance.append(_chance_of_agreement(predicted, true))
    return float(agreement - torch.stack(by_chance).mean())


def _label_columns(values: Tensor) -> Tensor:
    """Whole numbers ``[N, L]``, with a column for each of L labels of an example."""
    return values.long().reshape(len(values), -1)


def _chance_of_agreement(predicted: Tensor, true: Tensor) -> Tensor:
    """Σ_c of (share of predictions of class c) · (share of targets of class c)."""
    n_classes = int(max(predicted.max(), true.max())) + 1
    predicted_shares = torch.bincount(predicted, minlength=n_classes) / len(predicted)
    true_shares = torch.bincount(true, minlength=n_classes) / len(true)
    return (predicted_shares * true_shares).sum()


def _covariance(predictions: Tensor, targets: Tensor) -> float:
    """Σ_i (prediction − mean prediction) · (target − mean target); 0 where shapes differ."""
    predictions = predictions.double().reshape(len(predictions), -1)
    targets = targets.double().reshape(len(targets), -1)
    if predictions.shape != targets.shape:
        return 0.0
    products = (predictions - predictions.mean(0)) * (targets - targets.mean(0))
    return float(products.sum())
