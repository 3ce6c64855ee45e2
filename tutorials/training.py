"""The training of tutorials 1 and 4: IVON, in minibatches, with a cosine schedule."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blr_analysis as blr


def train_ivon(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    epochs: int,
    batch_size: int,
    start: float,
    fading: float,
    prior_precision: float,
) -> blr.IVON:
    """Train a classifier; what is returned holds its posterior.

    Every weight's precision is ``start`` at first; during the run that fades by a factor
    ``e**-fading`` in favour of the precision that the data give.
    """
    n = len(x)
    steps = epochs * math.ceil(len(x) / batch_size)
    optimizer = blr.IVON(
        model.parameters(),
        lr=0.2,
        ess=n,
        hess_init=start / n,
        beta2=math.exp(-fading / steps),
        weight_decay=prior_precision / n,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for batch in torch.randperm(n).split(batch_size):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            schedule.step()
    return optimizer
