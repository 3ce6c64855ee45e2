"""A base, and models that are trained on from it, each on data of its own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import blr_analysis as blr

Data = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
BATCH = 32


@dataclass(frozen=True)
class Trained:
    """Models and their data.

    Attributes:
        base: the model that all started from.
        models: by the name of the task.
        data: by task, what is called "train", "validate" and "test".
        recorded: by task, the Kronecker factors that its training left behind; empty for adapters.
    """

    base: nn.Module
    models: dict[str, nn.Module]
    data: dict[str, dict[str, Data]]
    recorded: Mapping[str, blr.Posterior] = field(default_factory=dict)


def fitted(
    model: nn.Module, data: Data, loss: Loss, *, epochs: int, seed: int, rate: float = 1e-3
) -> nn.Module:
    """A copy, trained by AdamW in batches of 32."""
    model = copy.deepcopy(model)
    return _trained(model, data, loss, epochs, seed, rate, after_step=lambda: None)


def fine_tuned(
    base: nn.Module,
    data: dict[str, dict[str, Data]],
    loss: Loss,
    *,
    epochs: int,
    seed: int,
    rate: float = 1e-3,
) -> Trained:
    """A copy of the base for each task, trained as by :func:`fitted`, with factors recorded."""
    models = {}
    recorded = {}
    for task, parts in data.items():
        count = len(parts["train"][0])
        model = copy.deepcopy(base)
        steps = epochs * math.ceil(count / BATCH)
        checkpoints = blr.Checkpoints(model, steps=steps, structure="kron")
        models[task] = _trained(
            model, parts["train"], loss, epochs, seed, rate, after_step=checkpoints.step
        )
        recorded[task] = checkpoints.posterior(n_data=count)
    return Trained(base, models, data, recorded)


def _trained(
    model: nn.Module,
    data: Data,
    loss: Loss,
    epochs: int,
    seed: int,
    rate: float,
    after_step: Callable[[], None],
) -> nn.Module:
    """The model itself, trained."""
    model.train()
    x, y = data
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=rate)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(BATCH):
            optimizer.zero_grad()
            loss(model, x[batch], y[batch]).backward()
            optimizer.step()
            after_step()
    return model.eval()


def joined(data: list[Data]) -> Data:
    """The examples of several tasks."""
    x, y = zip(*data, strict=True)
    return torch.cat(x), torch.cat(y)
