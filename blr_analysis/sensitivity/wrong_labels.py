"""How likely each label is wrong: labels against predictions that have not learned them by heart.

    P(y_i | x_i) = (1 − ε) p_i + ε (1 − p_i) / (C − 1),     p_i = softmax(β f_i)[y_i]

    P(y_i is wrong) = ε (1 − p_i) / (C − 1) / P(y_i | x_i)

A share ε of the labels, at most a half, is drawn from the other classes. ε and β, how sure the
predictions f_i ought to be, are those of the largest likelihood of all labels. Class weights of the
training, which shift the predictions by log w_c, are taken out. Where the predictions explain the
labels no better than the classes' shares do, by the Bayesian information criterion, nothing is
known. Several binary outputs are labels of their own, and an example is as wrong as its worst.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from blr_analysis.likelihoods import Bernoulli, Likelihood

MAX_WRONG_SHARE = 0.5  # of the labels; if more are wrong, nothing tells which
HALVINGS = 30
SURENESS = (-5.0, 3.0)  # log β that is searched
CLOSE = 0.02  # in log β


def chance_of_wrong_labels(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """P(y_i is wrong) from left-out outputs, ``[N]``; 0 where nothing is known.

    Args:
        likelihood: of classes, without weights of examples.
        outputs: logits ``[N, C]``. targets: as that likelihood takes them.

    Example:
        >>> from blr_analysis.likelihoods import Categorical
        >>> y = torch.arange(100) % 2
        >>> outputs = 4.0 * torch.nn.functional.one_hot(y, 2)
        >>> y[:5] = 1 - y[:5]
        >>> chances = chance_of_wrong_labels(Categorical(), outputs, y)
        >>> (chances > 0.5).nonzero().flatten().tolist()
        [0, 1, 2, 3, 4]
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


def _log_weights(likelihood: Likelihood, classes: int) -> Tensor:
    """By what class weights shift the outputs; 0 where a class has none."""
    weights = getattr(likelihood.kind, "weight", None)
    if weights is None:
        return torch.zeros(classes, dtype=torch.float64)
    shift = torch.tensor(weights, dtype=torch.float64).log()
    return shift.where(shift.isfinite(), 0.0)


def _chances(logits: Tensor, labels: Tensor) -> Tensor:
    """P(label is wrong) under the most likely ε and β, ``[N]``."""
    from scipy.optimize import minimize_scalar  # 0.3 s: not every import of the package pays for it

    if len(labels) == 0:
        return torch.zeros(0, dtype=torch.float64)
    counts = torch.bincount(labels, minlength=logits.shape[1])
    others = max(1, int((counts > 0).sum()) - 1)

    def believed(log_sureness: float) -> Tensor:
        p = (logits * math.exp(log_sureness)).softmax(1)
        return p.gather(1, labels[:, None]).squeeze(1)

    def surprise(log_sureness: float) -> float:
        return -_likeliest_rate(believed(log_sureness), others)[1]

    minimum: Any = minimize_scalar(
        surprise, SURENESS, bounds=SURENESS, method="bounded", options={"xatol": CLOSE}
    )
    p = believed(float(minimum.x))
    rate, log_likelihood = _likeliest_rate(p, others)
    shares = counts.double() / len(labels)
    by_shares = float(shares[labels].log().sum())
    if log_likelihood <= by_shares + math.log(len(labels)):
        return torch.zeros_like(p)
    wrong = rate * (1 - p) / others
    return wrong / ((1 - rate) * p + wrong).clamp_min(torch.finfo(p.dtype).tiny)


def _likeliest_rate(p: Tensor, others: int) -> tuple[float, float]:
    """ε and the log likelihood there, which is concave in ε, of labels with probabilities p."""
    low = 0.0
    high = MAX_WRONG_SHARE
    if_drawn = (1 - p) / others

    def mixed(rate: float) -> Tensor:
        return ((1 - rate) * p + rate * if_drawn).clamp_min(torch.finfo(p.dtype).tiny)

    for _ in range(HALVINGS):
        middle = (low + high) / 2
        rises = float(((if_drawn - p) / mixed(middle)).sum()) > 0
        if rises:
            low = middle
        else:
            high = middle
    rate = (low + high) / 2
    return rate, float(mixed(rate).log().sum())
