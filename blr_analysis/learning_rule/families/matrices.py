"""Symmetric positive definite matrices, one for each copy."""

from __future__ import annotations

import torch
from torch import Tensor

from blr_analysis.errors import InputError


def symmetric(matrix: Tensor) -> Tensor:
    """½ (M + Mᵀ).

    Raises:
        InputError: a matrix that is not square.
    """
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise InputError(f"a matrix must be square, got a shape of {tuple(matrix.shape)}")
    return 0.5 * (matrix + matrix.mT)


def inverse(matrix: Tensor) -> Tensor:
    """M⁻¹, by Cholesky's factor."""
    return torch.cholesky_inverse(torch.linalg.cholesky(matrix))


def logdet(matrix: Tensor) -> Tensor:
    """log|M|, by Cholesky's factor."""
    return 2 * torch.linalg.cholesky(matrix).diagonal(dim1=-2, dim2=-1).log().sum(-1)


def outer(left: Tensor, right: Tensor) -> Tensor:
    """u vᵀ."""
    return left.unsqueeze(-1) * right.unsqueeze(-2)


def quadratic(vector: Tensor, matrix: Tensor) -> Tensor:
    """vᵀ M v."""
    return (vector * (matrix @ vector.unsqueeze(-1)).squeeze(-1)).sum(-1)


def compare(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """tr(M⁻¹(M' − M)) and log|M⁻¹M'|, exact also where M' ≈ M.

    >>> compare(torch.eye(2) * 2, torch.eye(2))
    (tensor(2.), tensor(1.3863))
    """
    factor = torch.linalg.cholesky(old)
    half = torch.linalg.solve_triangular(factor, new - old, upper=False)
    gap = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    unit = torch.eye(gap.shape[-1], dtype=gap.dtype, device=gap.device)
    return gap.diagonal(dim1=-2, dim2=-1).sum(-1), torch.linalg.slogdet(gap + unit)[1]
