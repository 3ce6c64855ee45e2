"""The probability that each label is wrong, from predictions that have not memorised the labels.

    P(y_i | x_i) = (1 − ε) p_i + ε (1 − p_i) / (C − 1),     p_i = softmax(β f_i)[y_i]

    P(y_i is wrong) = ε (1 − p_i) / (C − 1) / P(y_i | x_i)

The model of labels: a share ε of them, at most a half, is wrong and drawn from the other classes. β
scales the logits f_i. ε and β maximise the likelihood of all labels. Class weights of the training
shift the logits by log w_c, and this shift is subtracted. All probabilities are 0 if a simpler
model explains the labels as well, by the Bayesian information criterion: the frequencies of
classes, or predictions without wrong labels (ε = 0, with a β of its own), as when a weak model
errs often. With several binary outputs every output has its label, and an example takes its
largest probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blr_analysis.likelihoods import Bernoulli, Likelihood

MAX_WRONG_SHARE = 0.5  # of the labels; if more are wrong, nothing tells which
HALVINGS = 30  # of the interval of ε
LOG_SCALES = (-5.0, 3.0)  # the interval of log β that is searched
LOG_SCALE_TOLERANCE = 0.02


def chance_of_wrong_labels(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """P(y_i is wrong) of every example, ``[N]``; 0 for targets that do not count.

    Args:
        likelihood: a likelihood of classes, without weights of examples.
        outputs: logits ``[N, C]``, predicted without the example.
        targets: in the form that the likelihood takes.

    Example:
        >>> from blr_analysis.likelihoods import Categorical
        >>> y = torch.arange(100) % 4
        >>> sureness = torch.linspace(1, 10, 100)[:, None]
        >>> outputs = sureness * torch.nn.functional.one_hot(y, 4)
        >>> y[-5:] = (y[-5:] + 1) % 4
        >>> chances = chance_of_wrong_labels(Categorical(), outputs, y)
        >>> (chances > 0.5).nonzero().flatten().tolist()
        [95, 96, 97, 98, 99]
    """
    if isinstance(likelihood.kind, Bernoulli):
        logits = torch.stack([torch.zeros_like(outputs), outputs], -1).flatten(0, 1)
        labels = (targets > 0.5).long().flatten()
        return _chances(logits.double(), labels).view(outputs.shape).amax(1)
    counts = ~likelihood.correct(outputs, targets).isnan()  # type: ignore[union-attr]
    labels = targets if targets.ndim == 1 else targets.argmax(1)
    logits = outputs.double() - _log_weights(likelihood, outputs.shape[1])
    chances = torch.zeros(len(outputs), dtype=torch.float64)
    chances[counts] = _chances(logits[counts], labels[counts])
    return chances


def _log_weights(likelihood: Likelihood, n_classes: int) -> Tensor:
    """log w_c ``[C]``, by which class weights shift the logits; 0 of a class without weight."""
    weights = getattr(likelihood.kind, "weight", None)
    if weights is None:
        return torch.zeros(n_classes, dtype=torch.float64)
    shift = torch.tensor(weights, dtype=torch.float64).log()
    return shift.where(shift.isfinite(), 0.0)


def _chances(logits: Tensor, labels: Tensor) -> Tensor:
    """P(label is wrong) under the most likely ε and β, ``[N]``, from logits ``[N, C]``."""
    n_labels = len(labels)
    if n_labels == 0:
        return torch.zeros(0, dtype=torch.float64)
    counts = torch.bincount(labels, minlength=logits.shape[1])
    n_occurring = int((counts > 0).sum())
    n_other_classes = max(1, n_occurring - 1)

    def label_probabilities(log_scale: float) -> Tensor:
        probabilities = (math.exp(log_scale) * logits).softmax(1)
        return probabilities.gather(1, labels[:, None]).squeeze(1)

    def with_wrong_labels(log_scale: float) -> float:
        return _likeliest_rate(label_probabilities(log_scale), n_other_classes)[1]

    def without_wrong_labels(log_scale: float) -> float:
        return _log_likelihood(label_probabilities(log_scale))

    log_scale = _likeliest_log_scale(with_wrong_labels)
    p = label_probabilities(log_scale)
    rate, log_likelihood = _likeliest_rate(p, n_other_classes)
    frequencies = counts.double() / n_labels
    penalty = 0.5 * math.log(n_labels)  # for each parameter that a simpler model does without
    best_of_simpler_models = max(
        _log_likelihood(frequencies[labels]) + 2 * penalty,
        without_wrong_labels(_likeliest_log_scale(without_wrong_labels)) + penalty,
    )
    if log_likelihood <= best_of_simpler_models:
        return torch.zeros_like(p)
    wrong = rate * (1 - p) / n_other_classes
    right = (1 - rate) * p
    return wrong / (right + wrong).clamp_min(torch.finfo(p.dtype).tiny)


def _log_likelihood(p: Tensor) -> float:
    """Σ log p_i; finite where some p_i are 0."""
    return float(p.clamp_min(torch.finfo(p.dtype).tiny).log().sum())


def _likeliest_log_scale(log_likelihood: Callable[[float], float]) -> float:
    """The log β of the largest log likelihood."""
    from scipy.optimize import minimize_scalar  # takes 0.3 s to import

    minimum: Any = minimize_scalar(
        lambda log_scale: -log_likelihood(log_scale),
        bounds=LOG_SCALES,
        method="bounded",
        options={"xatol": LOG_SCALE_TOLERANCE},
    )
    return float(minimum.x)


def _likeliest_rate(p: Tensor, n_other_classes: int) -> tuple[float, float]:
    """The ε of the largest log likelihood, and this log likelihood, from p_i ``[N]``.

    The log likelihood is concave in ε, so that the sign of its derivative shows the side.
    """
    p_if_wrong = (1 - p) / n_other_classes

    def mixture(rate: float) -> Tensor:
        return ((1 - rate) * p + rate * p_if_wrong).clamp_min(torch.finfo(p.dtype).tiny)

    low = 0.0
    high = MAX_WRONG_SHARE
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        derivative = float(((p_if_wrong - p) / mixture(middle)).sum())
        if derivative > 0:
            low = middle
        else:
            high = middle
    rate = (low + high) / 2
    return rate, _log_likelihood(mixture(rate))
