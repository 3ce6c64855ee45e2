"""What parameters must be before a family takes them."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from blr_analysis.errors import InputError

HALF = (torch.float16, torch.bfloat16)
STEP = ": a smaller learning rate keeps a step inside of the family"


def _refuse(name: str, expected: str, value: Any) -> NoReturn:
    kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
    raise InputError(f"{name} must be {expected}, got {kind}")


def finite(name: str, value: Any, rank: int = 0, *, half: bool = False) -> None:
    """Raise unless ``value`` is a real tensor of at least ``rank`` dimensions without NaN or ∞.

    Half precision passes only where ``half`` says so: for families that need no special functions
    and no matrices.
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


def above(name: str, value: Any, least: float = 0.0, rank: int = 0, *, advice: str = STEP) -> None:
    """Raise unless every entry is finite and above ``least``."""
    finite(name, value, rank)
    if not bool((value > least).all()):
        smallest = float(value.min())
        raise InputError(f"{name} must lie above {least:g} everywhere, got {smallest:g}{advice}")


def positive_definite(name: str, value: Any, *, advice: str = STEP) -> None:
    """Raise unless ``value`` is a finite, symmetric, positive definite matrix (per copy)."""
    finite(name, value, rank=2)
    if value.shape[-1] != value.shape[-2]:
        raise InputError(f"{name} must be a square matrix, got a shape of {tuple(value.shape)}")
    matrix = value.detach()
    slack = torch.finfo(matrix.dtype).eps ** 0.5 * matrix.abs().amax((-2, -1), keepdim=True)
    asymmetry = (matrix - matrix.mT).abs()
    if bool((asymmetry > slack).any()):
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
    """Raise unless θ are points where a parameter is ``like``, ``rank`` dimensions for one copy.

    The last ``rank`` dimensions of both agree, and those before go together as copies do: nothing
    is broadcast within a point. θ may be of lower precision, or of integers.
    """
    if not isinstance(theta, Tensor) or theta.is_complex():
        _refuse(name, "a tensor of real numbers", theta)
    if theta.ndim < rank or not go_together(theta.shape, like.shape, rank):
        event_sizes = [str(size) for size in like.shape[like.ndim - rank :]]
        shape = ", ".join(["...", *event_sizes])
        raise InputError(f"{name} must be a tensor [{shape}], got {tuple(theta.shape)}")
    if torch.promote_types(theta.dtype, like.dtype) != like.dtype:
        raise InputError(f"{name} are {theta.dtype}, the parameters {like.dtype}: convert one")


def derivatives(mean: Tensor, gradient: Tensor, hessian: Any, rank: int) -> None:
    """Raise unless a gradient ``[..., P]`` and its Hessian, or the diagonal, fit the mean."""
    points(gradient, mean, 1, "the gradient")
    size = mean.shape[-1]
    expected = (*gradient.shape, size) if rank == 2 else (*gradient.shape,)
    shape = getattr(hessian, "shape", ())
    if len(shape) != len(expected) or tuple(shape[-rank:]) != (size,) * rank:
        name = "diagonal of the Hessian" if rank == 1 else "Hessian"
        raise InputError(f"the {name} must be {expected}, got {tuple(shape)}")


def go_together(left: torch.Size, right: torch.Size, rank: int) -> bool:
    """Whether the last ``rank`` dimensions are the same, and those before can be broadcast."""
    is_same_point = left[len(left) - rank :] == right[len(right) - rank :]
    sizes = zip(reversed(left), reversed(right), strict=False)
    can_be_broadcast = all(
        size == other_size or 1 in (size, other_size) for size, other_size in sizes
    )
    return is_same_point and can_be_broadcast


def expectation_inside(family: str, inside: Tensor, rule: str) -> None:
    """Raise unless these expectation parameters are ones that a member of the family has."""
    if not bool(inside.all()):
        raise InputError(f"no {family} has these expectation parameters: {rule}")
