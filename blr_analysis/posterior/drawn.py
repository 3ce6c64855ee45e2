"""Labels drawn from a model's predictions in a training whose loss nobody has named.

A training shows the model's outputs f and the gradient d of its loss at them. The gradient tells
which loss it is, whatever the labels are, and whatever number w multiplies the loss (1/B of a mean,
1/k of accumulated microbatches, the factor of a gradient scaler, the weight of an example or of its
class):

    cross-entropy           d = w (softmax(f) − 1_y)
    binary cross-entropy    d = w (σ(f) − y),  y = 0 or 1

For these two losses a label is drawn from the prediction, ŷ ~ p(y | f). Its gradient is
softmax(f) − 1_ŷ or σ(f) − ŷ, and the second moment of that gradient is Λ, the Hessian of the loss
at f. So drawn labels give the true Fisher's factor, also after the model has learned its own labels
by heart, where their gradients vanish.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blr_analysis.half import working

ROUNDINGS_OF_PREDICTION = 8  # so many times its precision a gradient may be off
FEWEST_NUMBERS = 4  # of a gradient: fewer look like binary cross-entropy by chance


@dataclass(frozen=True)
class Drawn:
    """Gradients of drawn labels at the outputs.

    Attributes:
        loss: the loss that the gradient was recognised as.
        errors: shaped as the outputs; 0 where the loss has no gradient. Examples of classes with
            unequal weights are scaled by their weight over the mean weight.
        weight: the mean of w.
        all_counted: whether every row of the outputs has a label.
    """

    loss: str
    errors: Tensor
    weight: float
    all_counted: bool


def drawn_errors(outputs: Tensor, gradient: Tensor, seed: int) -> Drawn | None:
    """The gradients of labels that are drawn from the predictions; None for another loss.

    Args:
        outputs: f, examples first: ``[B]``, ``[B, C]``, ``[B, T, C]`` or ``[B, C, H, W]``.
        gradient: d, of the same shape.
        seed: of the random labels.

    >>> f = torch.tensor([[2.0, 0.0, 1.0], [0.0, 0.0, 3.0]], requires_grad=True)
    >>> loss = torch.nn.functional.cross_entropy(f, torch.tensor([0, 1]))
    >>> (d,) = torch.autograd.grad(loss, f)
    >>> drawn = drawn_errors(f.detach(), d, seed=0)
    >>> drawn.loss, drawn.errors.sum(1).abs().max() < 1e-6
    ('cross-entropy', tensor(True))
    >>> drawn_errors(f.detach(), f.detach(), seed=0) is None  # as of a squared error
    True
    """
    f = outputs.to(working(outputs.dtype))
    d = gradient.to(f.dtype)
    eps = max(torch.finfo(outputs.dtype).eps, torch.finfo(gradient.dtype).eps)
    for axis in _possible_class_axes(f):
        drawn = _from_cross_entropy(f.movedim(axis, -1), d.movedim(axis, -1), eps, seed)
        if drawn is not None:
            return replace(drawn, errors=drawn.errors.movedim(-1, axis))
    return _from_binary_cross_entropy(f, d, eps, seed)


def _possible_class_axes(f: Tensor) -> list[int]:
    """The axes that may hold the classes: the last one, and the second one as of images."""
    if f.ndim == 1:
        return []
    last_axis = f.ndim - 1
    return [last_axis] if last_axis == 1 else [last_axis, 1]


def _from_cross_entropy(f: Tensor, d: Tensor, eps: float, seed: int) -> Drawn | None:
    """Labels drawn from logits ``[..., C]``; None unless d is the gradient of a cross-entropy."""
    n_classes = f.shape[-1]
    if n_classes < 2:
        return None
    logits = f.reshape(-1, n_classes)
    gradients = d.reshape(-1, n_classes)
    counted = _counted_rows(gradients)
    if counted is not None:
        if not bool(counted.any()):
            return None
        logits = logits[counted]
        gradients = gradients[counted]
    probabilities = logits.softmax(1)
    weights = _weights_of_cross_entropy(gradients, probabilities, eps)
    if weights is None:
        return None
    errors = _residuals(probabilities, _drawn_labels(probabilities, seed))
    if isinstance(weights, Tensor):
        mean_weight = float(weights.mean())
        errors = errors * (weights / mean_weight)
    else:
        mean_weight = weights
    if counted is not None:
        errors = torch.zeros_like(d).view(-1, n_classes).index_put((counted,), errors)
    return Drawn(
        loss="cross-entropy",
        errors=errors.view(f.shape),
        weight=mean_weight,
        all_counted=counted is None,
    )


def _counted_rows(gradients: Tensor) -> Tensor | None:
    """Which rows have a label: an ignored one has no gradient. None: all rows.

    A row with a label has a number below 0, w (p − 1) at the label.
    """
    if float(gradients.amin(1).max()) < 0:
        return None
    return gradients.any(1)


def _weights_of_cross_entropy(
    gradients: Tensor, probabilities: Tensor, eps: float
) -> Tensor | float | None:
    """w of a cross-entropy with these gradients ``[B, C]``: one number for all, or ``[B, 1]`` where
    each class has its own; None where it is another loss."""
    smallest, labels = gradients.min(1, keepdim=True)  # w (p − 1) < 0 at the label, else w p ≥ 0
    residuals = _residuals(probabilities, labels)
    largest = -smallest  # w (1 − p) is the sum of the other numbers
    weight = _common_weight(gradients, residuals)
    if _agrees(gradients, residuals, weight, largest, eps):
        return weight
    weights = _weights_by_class(gradients, residuals, labels.flatten())
    if _agrees(gradients, residuals, weights, largest, eps):
        return weights
    return None


def _residuals(probabilities: Tensor, labels: Tensor) -> Tensor:
    """softmax(f) − 1_y, ``[B, C]``, for labels ``[B, 1]``."""
    return probabilities.scatter(1, labels, -1.0, reduce="add")


def _drawn_labels(probabilities: Tensor, seed: int) -> Tensor:
    """A class for each row, ``[B, 1]``: with E_c ~ Exp(1), p_c / E_c is largest with probability
    p_c.

    It takes half of the time of ``torch.multinomial``.
    """
    waits = torch.empty_like(probabilities)
    waits.exponential_(generator=_generator(probabilities, seed))
    return torch.div(probabilities, waits, out=waits).argmax(1, keepdim=True)


def _from_binary_cross_entropy(f: Tensor, d: Tensor, eps: float, seed: int) -> Drawn | None:
    """Labels drawn from logits of any shape; None unless d is of a binary cross-entropy."""
    counted = d.ne(0)
    if int(counted.sum()) < FEWEST_NUMBERS:
        return None
    gradients = d[counted].unsqueeze(1)
    probabilities = f[counted].sigmoid().unsqueeze(1)
    residuals = torch.where(gradients > 0, probabilities, probabilities - 1)
    weight = _common_weight(gradients, residuals)
    if not _agrees(gradients, residuals, weight, gradients.abs(), eps):
        return None
    labels = torch.bernoulli(probabilities, generator=_generator(f, seed))
    errors = torch.zeros_like(d)
    errors[counted] = (probabilities - labels).squeeze(1)
    return Drawn(
        loss="binary cross-entropy",
        errors=errors,
        weight=weight,
        all_counted=len(gradients) == d.numel(),
    )


def _common_weight(gradients: Tensor, residuals: Tensor) -> float:
    """One w for all rows: Σ|d| / Σ|residual|, so that large residuals decide; NaN without any."""
    gradient_sum = float(torch.linalg.vector_norm(gradients, 1))
    residual_sum = float(torch.linalg.vector_norm(residuals, 1))
    return gradient_sum / residual_sum if residual_sum > 0 else math.nan


def _weights_by_class(gradients: Tensor, residuals: Tensor, labels: Tensor) -> Tensor:
    """One w for all rows of a class, ``[B, 1]``.

    NaN where every row has a class of its own: with one weight for each row any gradient that
    depends on the label's probability would pass for a cross-entropy's.
    """
    n_rows, n_classes = gradients.shape
    if len(labels.unique()) == n_rows:
        return gradients.new_full((n_rows, 1), torch.nan)
    zeros = gradients.new_zeros(n_classes)
    gradient_sums = zeros.index_add(0, labels, gradients.abs().sum(1))
    residual_sums = zeros.index_add(0, labels, residuals.abs().sum(1))
    weights = gradient_sums / residual_sums
    return weights[labels].unsqueeze(1)


def _agrees(
    gradients: Tensor, residuals: Tensor, weights: Tensor | float, largest: Tensor, eps: float
) -> bool:
    """Whether every gradient is w times its residual up to rounding: the gradient's own, and that
    of the prediction which it was computed from.

    Args:
        weights: w.
        largest: the largest absolute value of each row of the gradients, ``[B, 1]``.
    """
    rounding_of_gradients = eps**0.5 * largest
    rounding_of_predictions = ROUNDINGS_OF_PREDICTION * eps * weights
    gaps = (gradients - weights * residuals).abs_().sub_(rounding_of_gradients)
    return bool((gaps <= rounding_of_predictions).all())


def _generator(like: Tensor, seed: int) -> torch.Generator:
    """A seeded generator on the device of ``like``."""
    return torch.Generator(like.device).manual_seed(seed)
