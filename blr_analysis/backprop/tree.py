"""Vectors over parameters, as tensors by parameter name: inner products, sums and shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from blr_analysis.errors import InputError

Tree = dict[str, Tensor]


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """⟨a, b⟩, summed in float64."""
    products = (x.double() * b[name].double() for name, x in a.items())
    return sum(float(product.sum()) for product in products)


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
    """The batch dimensions of ``x``, which stand before the parameter's ``shape``.

    Raises:
        InputError: x is missing, or of another shape.
    """
    if x is not None:
        n_batch = x.ndim - len(shape)
        if x.shape[n_batch:] == tuple(shape):
            return x.shape[:n_batch]
    actual = "nothing" if x is None else tuple(x.shape)
    raise InputError(
        f"a vector over these parameters needs {name!r} of shape {tuple(shape)} (leading batch "
        f"dimensions allowed), got {actual}"
    )
