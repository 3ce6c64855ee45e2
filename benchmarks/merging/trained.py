"""A base, and models that are trained on from it, each on data of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Trained:
    """Models and their data.

    Attributes:
        base: the model that all started from.
        models: by the name of the task.
        data: by task, what is called "train", "validate" and "test".
    """

    base: nn.Module
    models: dict[str, nn.Module]
    data: dict[str, dict[str, Data]]


def fitted(
    model: nn.Module,
    data: Data,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor],
    *,
    epochs: int,
    seed: int,
    rate: float = 1e-3,
) -> nn.Module:
    """A copy, trained by AdamW in batches of 32."""
    model = copy.deepcopy(model).train()
    x, y = data
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=rate)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(32):
            optimizer.zero_grad()
            loss(model, x[batch], y[batch]).backward()
            optimizer.step()
    return model.eval()


def joined(data: list[Data]) -> Data:
    """The examples of several tasks."""
    x, y = zip(*data, strict=True)
    return torch.cat(x), torch.cat(y)
