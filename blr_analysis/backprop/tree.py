"""Sums over tensors by parameter name."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

Tree = dict[str, Tensor]


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """⟨a, b⟩, summed in float64."""
    return sum(float((x.double() * b[n].double()).sum()) for n, x in a.items())


def norm(a: Mapping[str, Tensor]) -> float:
    """√⟨a, a⟩."""
    return math.sqrt(max(0.0, dot(a, a)))


def add(a: Mapping[str, Tensor], scale: float, b: Mapping[str, Tensor]) -> Tree:
    """a + scale · b."""
    return {n: torch.add(x, b[n], alpha=scale) for n, x in a.items()}


def scaled(a: Mapping[str, Tensor], scale: float) -> Tree:
    """scale · a."""
    return {n: scale * x for n, x in a.items()}
