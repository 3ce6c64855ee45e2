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
    """

    loss: str
    errors: Tensor
    weight: float


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
    rows = d.reshape(-1, n_classes)
    counted = rows.any(1)  # an ignored label has no gradient
    if n_classes < 2 or not bool(counted.any()):
        return None
    all_counted = bool(counted.all())
    logits = f.reshape(-1, n_classes)
    gradients = rows if all_counted else rows[counted]
    probabilities = (logits if all_counted else logits[counted]).softmax(1)
    weights = _weights_of_cross_entropy(gradients, probabilities, eps)
    if weights is None:
        return None
    labels = _drawn_labels(probabilities, seed)
    errors = _residuals(probabilities, labels)
    mean_weight = weights.mean()
    has_one_weight = weights.ndim == 0
    if not has_one_weight:
        errors = errors * (weights / mean_weight)
    if not all_counted:
        errors = torch.zeros_like(rows).index_put((counted,), errors)
    return Drawn("cross-entropy", errors.view(f.shape), float(mean_weight))


def _weights_of_cross_entropy(
    gradients: Tensor, probabilities: Tensor, eps: float
) -> Tensor | None:
    """w of a cross-entropy with these gradients ``[B, C]``: one number for all, or ``[B, 1]`` where
    each class has its own; None where it is another loss."""
    labels = gradients.argmin(1)  # w (p − 1) < 0 at the label, w p ≥ 0 elsewhere
    residuals = _residuals(probabilities, labels)
    weight = _common_weight(gradients, residuals)
    if _agrees(gradients, weight * residuals, weight, eps):
        return weight
    weights = _weights_by_class(gradients, residuals, labels)
    if _agrees(gradients, weights * residuals, weights, eps):
        return weights
    return None


def _residuals(probabilities: Tensor, labels: Tensor) -> Tensor:
    """softmax(f) − 1_y, ``[B, C]``."""
    return probabilities.scatter(1, labels.unsqueeze(1), -1.0, reduce="add")


def _drawn_labels(probabilities: Tensor, seed: int) -> Tensor:
    """A class for each row, ``[B]``: with E_c ~ Exp(1), p_c / E_c is largest with probability p_c.

    It takes half of the time of ``torch.multinomial``.
    """
    waits = torch.empty_like(probabilities)
    waits.exponential_(generator=_generator(probabilities, seed))
    return (probabilities / waits).argmax(1)


def _from_binary_cross_entropy(f: Tensor, d: Tensor, eps: float, seed: int) -> Drawn | None:
    """Labels drawn from logits of any shape; None unless d is of a binary cross-entropy."""
    counted = d.ne(0)
    if int(counted.sum()) < FEWEST_NUMBERS:
        return None
    gradients = d[counted].unsqueeze(1)
    probabilities = f[counted].sigmoid().unsqueeze(1)
    residuals = torch.where(gradients > 0, probabilities, probabilities - 1)
    weight = _common_weight(gradients, residuals)
    if not _agrees(gradients, weight * residuals, weight, eps):
        return None
    labels = torch.bernoulli(probabilities, generator=_generator(f, seed))
    errors = torch.zeros_like(d)
    errors[counted] = (probabilities - labels).squeeze(1)
    return Drawn("binary cross-entropy", errors, float(weight))


def _common_weight(gradients: Tensor, residuals: Tensor) -> Tensor:
    """One w for all rows, a scalar: Σ|d| / Σ|residual|, so that large residuals decide."""
    return gradients.abs().sum() / residuals.abs().sum().clamp_min(_tiny(residuals))


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
    weights = gradient_sums / residual_sums.clamp_min(_tiny(residuals))
    return weights[labels].unsqueeze(1)


def _agrees(gradients: Tensor, expected: Tensor, weights: Tensor, eps: float) -> bool:
    """Whether every gradient is the expected one up to rounding: the gradient's own, and that of
    the prediction which it was computed from."""
    largest = gradients.abs().amax(1, keepdim=True)
    rounding = eps**0.5 * largest + ROUNDINGS_OF_PREDICTION * eps * weights
    return bool(((gradients - expected).abs() <= rounding).all())


def _generator(like: Tensor, seed: int) -> torch.Generator:
    """A seeded generator on the device of ``like``."""
    return torch.Generator(like.device).manual_seed(seed)


def _tiny(like: Tensor) -> float:
    """The smallest normal number of the dtype of ``like``, in place of a denominator of 0."""
    return torch.finfo(like.dtype).tiny
