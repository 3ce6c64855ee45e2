"""Losses that are recognised by their gradient at the outputs, and labels drawn for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from models import normal
from torch import Tensor

from blr_analysis.posterior.drawn import drawn_errors

B = 6
C = 3
T = 4
DRAWS = 4000
LABELS = torch.arange(B) % C
TOKENS = torch.arange(B * T).view(B, T) % C
BITS = (torch.arange(B * C).view(B, C) % 2).double()
Loss = Callable[[Tensor], Tensor]


def focal(f: Tensor) -> Tensor:
    losses = F.cross_entropy(f, LABELS, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def cross_entropy(**options: object) -> Loss:
    return lambda f: F.cross_entropy(f, LABELS, **options)  # type: ignore[arg-type]


RECOGNISED: dict[str, tuple[tuple[int, ...], Loss, str]] = {
    "mean": ((B, C), cross_entropy(), "cross-entropy"),
    "sum": ((B, C), cross_entropy(reduction="sum"), "cross-entropy"),
    "scaled": ((B, C), lambda f: 2.0**12 * cross_entropy()(f), "cross-entropy"),
    "tokens": (
        (B, T, C),
        lambda f: F.cross_entropy(f.flatten(0, 1), TOKENS.flatten()),
        "cross-entropy",
    ),
    "pixels": ((B, C, T), lambda f: F.cross_entropy(f, TOKENS), "cross-entropy"),
    "bits": (
        (B, C),
        lambda f: F.binary_cross_entropy_with_logits(f, BITS),
        "binary cross-entropy",
    ),
    "one bit": (
        (B,),
        lambda f: F.binary_cross_entropy_with_logits(f, BITS[:, 0]),
        "binary cross-entropy",
    ),
}
OTHERS: dict[str, Loss] = {
    "squares": lambda f: F.mse_loss(f, F.one_hot(LABELS, C).double()),
    "smoothed": cross_entropy(label_smoothing=0.1),
    "focal": focal,
    "margin": lambda f: F.multi_margin_loss(f, LABELS),
    "no gradient": lambda f: 0 * f.sum(),
}


def gradient(loss: Loss, f: Tensor) -> Tensor:
    leaf = f.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


@pytest.mark.parametrize("name", RECOGNISED)
def test_second_moments_are_the_hessian_of_the_summed_loss(name: str) -> None:
    shape, loss, kind = RECOGNISED[name]
    f = normal(*shape) * 1.5
    d = gradient(loss, f)
    total = torch.zeros(f.numel(), f.numel(), dtype=f.dtype)
    for seed in range(DRAWS // f.numel()):
        drawn = drawn_errors(f, d, seed)
        assert drawn is not None
        assert drawn.loss == kind
        errors = drawn.errors.flatten()
        total += torch.outer(errors, errors)
    hessian = torch.autograd.functional.hessian(loss, f).view_as(total) / drawn.weight
    mean = total / (DRAWS // f.numel())
    noise = (f.numel() / DRAWS) ** 0.5
    assert float((mean - hessian).diagonal().abs().max()) < 4 * noise


@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_are_not(name: str) -> None:
    f = normal(B, C) * 1.5
    assert drawn_errors(f, gradient(OTHERS[name], f), 0) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_learned_by_heart_is_recognised_and_what_is_ignored_stays_0(
    dtype: torch.dtype,
) -> None:
    f = (normal(B, C) + 12.0 * F.one_hot(LABELS, C)).to(dtype)
    labels = LABELS.clone()
    labels[0] = -100
    d = gradient(lambda f: F.cross_entropy(f, labels), f)
    drawn = drawn_errors(f, d, 0)
    assert drawn is not None
    assert drawn.loss == "cross-entropy"
    assert not drawn.errors[0].any()
    assert bool(drawn.errors[1:].any(1).all())


def test_weights_of_classes_are_parts_of_the_mean_weight() -> None:
    weights = torch.tensor([1.0, 2.0, 6.0]).double()
    f = normal(B, C)
    d = gradient(lambda f: F.cross_entropy(f, LABELS, weight=weights), f)
    drawn = drawn_errors(f, d, 0)
    assert drawn is not None
    relative_weights = weights[LABELS] / weights[LABELS].mean()
    residual = drawn.errors / relative_weights[:, None] - f.softmax(1)
    assert bool(((residual + 1).abs() < 1e-9).any(1).all())  # p − 1 of the drawn class alone
