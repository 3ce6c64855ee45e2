"""Labels drawn from a model's predictions in a training whose loss nobody has named.

The gradient d of a loss at the model's outputs f tells what loss it is, whatever the labels are and
whatever number w the loss is multiplied with (1/B of a mean, 1/k of accumulated microbatches, the
factor of a gradient scaler, the weight of an example or of its class):

    cross-entropy           d = w (softmax(f) − 1_y)
    binary cross-entropy    d = w (σ(f) − y),  y = 0 or 1

Where it is one of these, ŷ ~ p(y | f) gives the gradient of a drawn label, softmax(f) − 1_ŷ or
σ(f) − ŷ, whose second moment is Λ, the Hessian of the loss at f: the true Fisher's factor, where
that of the labels as they are vanishes once these are learned by heart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blr_analysis.half import working

ROUNDINGS = 8  # of a prediction, in its gradient
FEWEST = 4  # numbers of a gradient that tell binary cross-entropy from chance


@dataclass(frozen=True)
class Drawn:
    """Gradients of drawn labels at the outputs.

    Attributes:
        loss: what the gradient was recognised as.
        errors: shaped as the outputs; 0 where the loss has no gradient. An example's weight is in
            them, as a part of the mean weight.
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
        seed: by which labels are drawn.

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
    class_axes = dict.fromkeys((f.ndim - 1, 1)) if f.ndim > 1 else {}
    for axis in class_axes:
        drawn = _of_classes(f.movedim(axis, -1), d.movedim(axis, -1), eps, seed)
        if drawn is not None:
            return replace(drawn, errors=drawn.errors.movedim(-1, axis))
    return _of_bits(f, d, eps, seed)


def _of_classes(f: Tensor, d: Tensor, eps: float, seed: int) -> Drawn | None:
    """Of logits ``[..., C]``, where d is that of a cross-entropy."""
    n_classes = f.shape[-1]
    rows = d.reshape(-1, n_classes)
    logits = f.reshape(-1, n_classes)
    counts = rows.any(1)
    all_count = bool(counts.all())
    if n_classes < 2 or not (all_count or bool(counts.any())):
        return None
    gradients = rows if all_count else rows[counts]
    shares = (logits if all_count else logits[counts]).softmax(1)
    targets = gradients.argmin(1)
    residuals = _residuals(shares, targets)
    weight = _common_weight(gradients, residuals)
    weights: Tensor | None = None
    if not _agrees(gradients, weight * residuals, weight, eps):
        weights = _weights_by_class(gradients, residuals, targets)
        weight = weights.mean()
        if not _agrees(gradients, weights * residuals, weights, eps):
            return None
    labels = torch.multinomial(shares, 1, generator=_generator(f, seed)).squeeze(1)
    errors = _residuals(shares, labels)
    if weights is not None:
        errors = errors * (weights / weight)
    if not all_count:
        errors = torch.zeros_like(rows).index_put((counts,), errors)
    return Drawn("cross-entropy", errors.view(f.shape), float(weight))


def _residuals(shares: Tensor, labels: Tensor) -> Tensor:
    """softmax(f) − 1_y, ``[B, C]``."""
    ones = shares.new_ones(()).expand(len(labels), 1)
    return shares.scatter_add(1, labels.unsqueeze(1), -ones)


def _of_bits(f: Tensor, d: Tensor, eps: float, seed: int) -> Drawn | None:
    """Of logits of any shape, where d is that of a binary cross-entropy."""
    counts = d.ne(0)
    if int(counts.sum()) < FEWEST:
        return None
    gradients = d[counts].unsqueeze(1)
    chances = f[counts].sigmoid().unsqueeze(1)
    residuals = torch.where(gradients > 0, chances, chances - 1)
    weight = _common_weight(gradients, residuals)
    if not _agrees(gradients, weight * residuals, weight, eps):
        return None
    labels = torch.bernoulli(chances, generator=_generator(f, seed))
    errors = torch.zeros_like(d)
    errors[counts] = (chances - labels).squeeze(1)
    return Drawn("binary cross-entropy", errors, float(weight))


def _common_weight(gradients: Tensor, residuals: Tensor) -> Tensor:
    """The one w of all rows, by those of large residuals most."""
    return gradients.abs().sum() / residuals.abs().sum().clamp_min(_tiny(residuals))


def _weights_by_class(gradients: Tensor, residuals: Tensor, targets: Tensor) -> Tensor:
    """One w for all rows of a class, ``[B, 1]``; NaN where no class has several rows, since any
    function of the target's share has some w for each row."""
    n_classes = gradients.shape[1]
    if len(targets.unique()) == len(targets):
        return gradients.new_full((len(targets), 1), torch.nan)
    zeros = gradients.new_zeros(n_classes)
    sizes = zeros.index_add(0, targets, gradients.abs().sum(1))
    residual_sizes = zeros.index_add(0, targets, residuals.abs().sum(1))
    by_class = sizes / residual_sizes.clamp_min(_tiny(residuals))
    return by_class[targets].unsqueeze(1)


def _agrees(gradients: Tensor, expected: Tensor, weights: Tensor, eps: float) -> bool:
    """Row by row, up to rounding: of the gradient, and of the predictions that it was made of."""
    rounding = eps**0.5 * gradients.abs().amax(1, keepdim=True) + ROUNDINGS * eps * weights
    return bool(((gradients - expected).abs() <= rounding).all())


def _generator(like: Tensor, seed: int) -> torch.Generator:
    return torch.Generator(like.device).manual_seed(seed)


def _tiny(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny
