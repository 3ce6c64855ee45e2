"""Symmetric positive definite matrices ``[..., P, P]``, one for each copy of a distribution."""

# pyright: reportPrivateImportUsage=false
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
    factor = torch.linalg.cholesky(matrix)
    return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def outer(left: Tensor, right: Tensor) -> Tensor:
    """u vᵀ of vectors ``[..., P]``."""
    return left.unsqueeze(-1) * right.unsqueeze(-2)


def quadratic(vector: Tensor, matrix: Tensor) -> Tensor:
    """vᵀ M v of a vector ``[..., P]``, one number per copy."""
    return (vector * times(matrix, vector)).sum(-1)


def solve(matrix: Tensor, vector: Tensor) -> Tensor:
    """M⁻¹ v of a vector ``[..., P]``, by Cholesky's factor."""
    return solve_by_factor(torch.linalg.cholesky(matrix), vector)


def solve_by_factor(factor: Tensor, vector: Tensor) -> Tensor:
    """(L Lᵀ)⁻¹ v of a vector ``[..., P]``."""
    return torch.cholesky_solve(vector.unsqueeze(-1), factor).squeeze(-1)


def inverse_root_times(matrix: Tensor, vector: Tensor) -> Tensor:
    """L⁻ᵀ v with M = L Lᵀ: of standard normal numbers v, a draw of covariance M⁻¹."""
    upper = torch.linalg.cholesky(matrix).mT
    columns = vector.unsqueeze(-1)
    return torch.linalg.solve_triangular(upper, columns, upper=True).squeeze(-1)


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """M v of a vector ``[..., P]``."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def compare(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """tr(M⁻¹(M' − M)) and log|M⁻¹M'| for M' = ``new``, M = ``old``; exact also where M' ≈ M.

    >>> compare(torch.eye(2) * 2, torch.eye(2))
    (tensor(2.), tensor(1.3863))
    """
    factor = torch.linalg.cholesky(old)
    half_whitened = torch.linalg.solve_triangular(factor, new - old, upper=False)
    whitened_gap = torch.linalg.solve_triangular(factor, half_whitened.mT, upper=False)
    size = whitened_gap.shape[-1]
    identity = torch.eye(size, dtype=whitened_gap.dtype, device=whitened_gap.device)
    trace = whitened_gap.diagonal(dim1=-2, dim2=-1).sum(-1)
    _, log_determinant = torch.linalg.slogdet(whitened_gap + identity)
    return trace, log_determinant
