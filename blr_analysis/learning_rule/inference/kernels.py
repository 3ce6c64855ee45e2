"""Kernels of Gaussian processes, and what a kernel must be.

A kernel k(x, z) is the prior covariance of f(x) and f(z): a function of two inputs, asked for many
of them at once, whose matrices are symmetric and positive semi-definite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import positive_number, tolerance
from blr_analysis.errors import BLRError, InputError

# (x [N, D], z [M, D]) → the covariances of f(x) and f(z), [N, M].
Kernel = Callable[[Tensor, Tensor], Tensor]


def rbf(
    x: Tensor, z: Tensor, *, lengthscale: float | Tensor = 1.0, variance: float = 1.0
) -> Tensor:
    """v exp(−½ Σ_d (x_d − z_d)² / ℓ_d²), the squared exponential kernel, ``[N, M]``.

    Args:
        x: ``[N, D]``.
        z: ``[M, D]``.
        lengthscale: ℓ, one number or one for each dimension ``[D]``.
        variance: v, the prior variance of f.

    Raises:
        InputError: a lengthscale or variance that is not positive and finite, or lengthscales for
            another number of dimensions.

    >>> rbf(torch.zeros(1, 2), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    tensor([[1.0000, 0.3679]])
    """
    positive_number("variance", variance)
    _check_lengthscale(lengthscale, x.shape[-1])
    squares = (x / lengthscale).unsqueeze(-2) - (z / lengthscale).unsqueeze(-3)
    return variance * torch.exp(-0.5 * squares.square().sum(-1))


def linear_kernel(x: Tensor, z: Tensor, *, variance: float = 1.0, bias: float = 0.0) -> Tensor:
    """bias + v xᵀz: f is linear, with weights N(0, v) and an intercept N(0, bias); ``[N, M]``.

    Args:
        x: ``[N, D]``.
        z: ``[M, D]``.
        variance: v, of each weight.
        bias: the variance of the intercept, 0 for none.

    Raises:
        InputError: a variance that is not positive, or a negative bias.

    >>> linear_kernel(torch.ones(1, 2), torch.tensor([[1.0, 2.0]]), bias=1.0)
    tensor([[4.]])
    """
    positive_number("variance", variance)
    tolerance("bias", bias)
    return bias + variance * (x @ z.mT)


def _check_lengthscale(lengthscale: Any, size: int) -> None:
    if not isinstance(lengthscale, Tensor) or lengthscale.numel() == 1:
        positive_number("lengthscale", lengthscale)
    elif lengthscale.shape != (size,):
        raise InputError(
            f"lengthscale must be one number or one for each of {size} columns, got a shape of "
            f"{tuple(lengthscale.shape)}"
        )
    elif not bool(((lengthscale > 0) & lengthscale.isfinite()).all()):
        raise InputError(f"lengthscale must be positive and finite, got {lengthscale.tolist()}")


def covariances(kernel: Kernel, x: Tensor, z: Tensor) -> Tensor:
    """k(x, z), or what is wrong with it."""
    wanted = f"the kernel must give a finite matrix [{len(x)}, {len(z)}]"
    try:
        found = kernel(x, z)
    except BLRError:
        raise
    except Exception as error:
        raise InputError(
            f"{wanted} from (x, z) of shapes {tuple(x.shape)} and {tuple(z.shape)}; it raised "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Tensor) or found.shape != (len(x), len(z)) or found.dtype != x.dtype:
        kind = (tuple(found.shape), found.dtype) if isinstance(found, Tensor) else type(found)
        raise InputError(f"{wanted} of {x.dtype} for the examples, got {kind}")
    bad = int((~torch.isfinite(found)).sum())
    if bad:
        raise InputError(f"{wanted}; {bad} entries are NaN or infinite")
    return found


def check_pairwise(kernel: Kernel, x: Tensor, matrix: Tensor) -> None:
    """Raise unless k(x_i, z_j) stays what it is among other examples."""
    few = min(len(x) - 1, 8)
    if few < 1:
        return
    apart = (covariances(kernel, x[1 : few + 1], x[:few]) - matrix[1 : few + 1, :few]).abs().max()
    if bool(apart > 10 * torch.finfo(x.dtype).eps ** 0.5 * matrix.abs().max()):
        raise InputError(
            "the kernel mixes examples: k(x_i, z_j) changes with the other rows of x and z (noise "
            "on the diagonal must look at whether x_i equals z_j, not at their places)"
        )
