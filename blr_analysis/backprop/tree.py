"""Sums over tensors by parameter name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from blr_analysis.errors import InputError

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


def lead_of(name: str, x: Tensor | None, shape: Sequence[int]) -> torch.Size:
    """The dimensions before those of the parameter.

    Raises:
        InputError: x is missing, or of another shape.
    """
    if x is None or tuple(x.shape[x.ndim - len(shape) :]) != tuple(shape):
        got = "nothing" if x is None else tuple(x.shape)
        raise InputError(
            f"a vector over these parameters needs {name!r} of shape {tuple(shape)} (leading batch "
            f"dimensions allowed), got {got}"
        )
    return x.shape[: x.ndim - len(shape)]
