"""What the tests of optimizers read from a model."""

from __future__ import annotations

from torch import Tensor, nn


def values(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [p.detach().clone() for p in model.parameters()]


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    """The largest difference of two lists of tensors."""
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))
