"""Checks of parameters and points: each raises :class:`InputError`, and returns nothing.

The first argument, ``name``, is what the error calls the value.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from blr_analysis.errors import InputError

HALF = (torch.float16, torch.bfloat16)
SMALLER_STEPS = ": a smaller learning rate keeps a step inside of the family"


def _refuse(name: str, expected: str, value: Any) -> NoReturn:
    """Raise the error that says what the value must be, and which type or dtype it has."""
    kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
    raise InputError(f"{name} must be {expected}, got {kind}")


def finite(name: str, value: Any, rank: int = 0, *, half: bool = False) -> None:
    """Raise unless ``value`` is a real tensor of at least ``rank`` dimensions without NaN or ∞.

    Args:
        half: whether half precision is allowed, as for families that need neither special functions
            nor matrices.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point():
        _refuse(name, "a tensor of floating-point numbers", value)
    if value.dtype in HALF and not half:
        _refuse(name, "in single or double precision", value)
    if value.ndim < rank:
        raise InputError(f"{name} needs at least {rank} dimensions, got {tuple(value.shape)}")
    is_finite = torch.isfinite(value)
    if not bool(is_finite.all()):
        count = int((~is_finite).sum())
        raise InputError(f"{name} must be finite; {count} of {value.numel()} entries are not")


def above(
    name: str, value: Any, least: float = 0.0, rank: int = 0, *, advice: str = SMALLER_STEPS
) -> None:
    """Raise unless every entry is finite and above ``least``.

    Args:
        rank: the least number of dimensions.
        advice: the end of the error, on what to do about it.
    """
    finite(name, value, rank)
    if not bool((value > least).all()):
        smallest = float(value.min())
        raise InputError(f"{name} must lie above {least:g} everywhere, got {smallest:g}{advice}")


def positive_definite(name: str, value: Any, *, advice: str = SMALLER_STEPS) -> None:
    """Raise unless ``value`` is a finite, symmetric, positive definite matrix (per copy)."""
    finite(name, value, rank=2)
    if value.shape[-1] != value.shape[-2]:
        raise InputError(f"{name} must be a square matrix, got a shape of {tuple(value.shape)}")
    matrix = value.detach()
    largest = matrix.abs().amax((-2, -1), keepdim=True)
    tolerance = torch.finfo(matrix.dtype).eps ** 0.5 * largest
    asymmetry = (matrix - matrix.mT).abs()
    if bool((asymmetry > tolerance).any()):
        raise InputError(f"{name} must be symmetric: it differs from its transpose")
    _, failures = torch.linalg.cholesky_ex(matrix)
    if bool((failures != 0).any()):
        raise InputError(f"{name} must be positive definite{advice}")


def same_shape(**tensors: Tensor) -> None:
    """Raise unless all of these tensors have one shape, one dtype and one device."""
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise InputError(f"{' and '.join(shapes)} must agree in shape, got {shapes}")
    same_dtype(**tensors)


def same_dtype(**tensors: Tensor) -> None:
    """Raise unless all of these tensors have one dtype and one device."""
    kinds = {name: f"{value.dtype} on {value.device}" for name, value in tensors.items()}
    if len(set(kinds.values())) > 1:
        raise InputError(f"{' and '.join(tensors)} must agree in dtype and device, got {kinds}")


def points(theta: Any, like: Tensor, rank: int, name: str = "points") -> None:
    """Raise unless θ can be points of a distribution that has the parameter ``like``.

    The last ``rank`` dimensions, which belong to one point, must be the same. The dimensions before
    them are copies, which must be broadcastable. θ may be in lower precision, or integers.
    """
    if not isinstance(theta, Tensor) or theta.is_complex():
        _refuse(name, "a tensor of real numbers", theta)
    if theta.ndim < rank or not go_together(theta.shape, like.shape, rank):
        sizes_of_point = [str(size) for size in like.shape[like.ndim - rank :]]
        shape = ", ".join(["...", *sizes_of_point])
        raise InputError(f"{name} must be a tensor [{shape}], got {tuple(theta.shape)}")
    common_dtype = torch.promote_types(theta.dtype, like.dtype)
    if common_dtype != like.dtype:
        raise InputError(f"{name} are {theta.dtype}, the parameters {like.dtype}: convert one")


def derivatives(mean: Tensor, gradient: Tensor, hessian: Any, rank: int) -> None:
    """Raise unless a gradient ``[..., P]`` and a Hessian go with the mean ``[..., P]``.

    Args:
        hessian: ``[..., P, P]``, or its diagonal ``[..., P]``.
        rank: 2 for the whole Hessian, 1 for its diagonal.
    """
    points(gradient, mean, 1, "the gradient")
    size = mean.shape[-1]
    expected = (*gradient.shape, size) if rank == 2 else (*gradient.shape,)
    shape = getattr(hessian, "shape", ())
    expected_end = (size,) * rank
    if len(shape) != len(expected) or tuple(shape[-rank:]) != expected_end:
        name = "diagonal of the Hessian" if rank == 1 else "Hessian"
        raise InputError(f"the {name} must be {expected}, got {tuple(shape)}")


def go_together(left: torch.Size, right: torch.Size, rank: int) -> bool:
    """Whether the last ``rank`` dimensions are the same, and those before can be broadcast."""
    is_same_point = left[len(left) - rank :] == right[len(right) - rank :]
    from_the_end = zip(reversed(left), reversed(right), strict=False)
    can_be_broadcast = all(
        left_size == right_size or 1 in (left_size, right_size)
        for left_size, right_size in from_the_end
    )
    return is_same_point and can_be_broadcast


def expectation_inside(family: str, inside: Tensor, rule: str) -> None:
    """Raise unless ``inside`` is true everywhere: some member of the family has these μ.

    ``rule`` says in words what must hold for them.
    """
    if not bool(inside.all()):
        raise InputError(f"no {family} has these expectation parameters: {rule}")
