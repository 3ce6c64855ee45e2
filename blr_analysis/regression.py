"""How far predictions of numbers are off, in the units of the targets."""

from __future__ import annotations

import math

from torch import Tensor


def rmse(predictions: Tensor, targets: Tensor) -> float:
    """The root of the mean squared error, √(mean (ŷ − y)²).

    >>> import torch
    >>> rmse(torch.tensor([1.0, 5.0]), torch.tensor([1.0, 2.0]))
    2.1213
    """
    return math.sqrt(float(_errors(predictions, targets).square().mean()))


def r2(predictions: Tensor, targets: Tensor) -> float:
    """The share of the targets' variance that is explained, 1 − Σ (ŷ − y)² / Σ (y − ȳ)².

    For several outputs it is the mean over them. It is NaN where the targets do not vary.

    >>> import torch
    >>> r2(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0]))
    0.5
    """
    errors = _errors(predictions, targets)
    y = targets.double().reshape(len(targets), -1)
    unexplained = errors.square().sum(0)
    total = (y - y.mean(0)).square().sum(0)
    shares = (1 - unexplained / total).where(total > 0, math.nan)
    return float(shares.mean())


def _errors(predictions: Tensor, targets: Tensor) -> Tensor:
    """ŷ − y, ``[N, C]`` in float64, also where targets are ``[N]`` and predictions ``[N, 1]``."""
    n = len(targets)
    return predictions.double().reshape(n, -1) - targets.double().reshape(n, -1)
