"""What the tests of optimizers do to a model and read from it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def look(optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """One draw of the weights and the gradient of the cross-entropy there."""
    with optimizer.sampled_params(train=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()


def values(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [p.detach().clone() for p in model.parameters()]


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    """The largest difference of two lists of tensors."""
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))
