"""What parameters must be before a family takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import InputError


def finite(name: str, value: Any, rank: int = 0) -> None:
    """Raise unless ``value`` is a real tensor of at least ``rank`` dimensions without NaN or ∞."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        found = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{name} must be a tensor of floating-point numbers, got {found}")
    if value.ndim < rank:
        raise InputError(
            f"{name} needs at least {rank} dimension{'s' * (rank > 1)}, got a shape of "
            f"{tuple(value.shape)}"
        )
    if not bool(torch.isfinite(value).all()):
        bad = int((~torch.isfinite(value)).sum())
        raise InputError(f"{name} must be finite; {bad} of {value.numel()} entries are not")


STEP = ": a smaller learning rate keeps a step inside of the family"


def above(name: str, value: Any, least: float = 0.0, rank: int = 0, *, advice: str = STEP) -> None:
    """Raise unless every entry is finite and above ``least``."""
    finite(name, value, rank)
    if not bool((value > least).all()):
        raise InputError(
            f"{name} must lie above {least:g} everywhere, got {float(value.min()):g}{advice}"
        )


def positive_definite(name: str, value: Any, *, advice: str = STEP) -> None:
    """Raise unless ``value`` is a matrix (per copy), symmetric and positive definite."""
    finite(name, value, rank=2)
    if value.shape[-1] != value.shape[-2]:
        raise InputError(f"{name} must be a square matrix, got a shape of {tuple(value.shape)}")
    matrix = value.detach()
    gap, size = (matrix - matrix.mT).abs().amax(), matrix.abs().amax()
    if bool(gap > torch.finfo(matrix.dtype).eps ** 0.5 * size):
        raise InputError(f"{name} must be symmetric; it differs from its transpose by {gap:g}")
    if bool((torch.linalg.cholesky_ex(matrix)[1] != 0).any()):
        raise InputError(f"{name} must be positive definite{advice}")


def same_shape(**given: Tensor) -> None:
    """Raise unless all of these tensors have one shape."""
    shapes = {name: tuple(value.shape) for name, value in given.items()}
    if len(set(shapes.values())) > 1:
        raise InputError(f"{' and '.join(shapes)} must agree in shape, got {shapes}")


def expectation_inside(family: str, inside: Tensor, rule: str) -> None:
    """Raise unless these expectation parameters are ones that a member of the family has."""
    if not bool(inside.all()):
        raise InputError(f"no {family} has these expectation parameters: {rule}")
