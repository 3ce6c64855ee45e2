"""Functions of the Gamma family, from 1e-3 to 1e6, and symmetric positive definite matrices.

Differences of large terms are taken by Stirling's series where the terms would cancel. Of matrices
there is one for each copy.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from blr_analysis.errors import InputError

LOG_2PI = math.log(2 * math.pi)
EULER = 0.5772157
MINKAS_BORDER = -2.22
SERIES_FROM = 20.0
DIGAMMA_SERIES = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132)
"""log x − ψ(x) = 1/(2x) + Σ_k c_k / x^(2k+2)."""
TRIGAMMA_SERIES = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66)
"""ψ'(x) − 1/x = 1/(2x²) + Σ_k c_k / x^(2k+3)."""


def trigamma(x: Tensor) -> Tensor:
    """ψ'(x) = ζ(2, x)."""
    return torch.special.zeta(2.0, x)


def log_minus_digamma(x: Tensor) -> Tensor:
    """log x − ψ(x), which is ≈ 1/(2x) where the two terms nearly cancel."""
    small = x.clamp(max=SERIES_FROM)
    direct = small.log() - torch.digamma(small)
    y = 1 / x.clamp(min=SERIES_FROM)
    series = y * (0.5 + y * _polynomial(y.square(), DIGAMMA_SERIES))
    return torch.where(x < SERIES_FROM, direct, series)


def trigamma_excess(x: Tensor) -> Tensor:
    """ψ'(x) − 1/x, which is ≈ 1/(2x²) where the two terms nearly cancel."""
    small = x.clamp(max=SERIES_FROM)
    direct = trigamma(small) - 1 / small
    y = 1 / x.clamp(min=SERIES_FROM)
    series = y.square() * (0.5 + y * _polynomial(y.square(), TRIGAMMA_SERIES))
    return torch.where(x < SERIES_FROM, direct, series)


def _polynomial(z: Tensor, coefficients: Sequence[float]) -> Tensor:
    """c_0 + c_1 z + c_2 z² + …, by Horner's rule."""
    value = torch.zeros_like(z)
    for coefficient in reversed(coefficients):
        value = value * z + coefficient
    return value


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """log(x'/x), exact also where x' ≈ x or one of them is tiny."""
    change = (new - old) / old
    near = torch.log1p(change.clamp(-0.5, 0.5))
    return torch.where(change.abs() < 0.5, near, (new / old).log())


def _minus_halves(x: Tensor, size: int) -> Tensor:
    """x − j/2 for j = 0 … size − 1, along a new last dimension."""
    copies = x.unsqueeze(-1).expand(*x.shape, size)
    return copies - _halves(copies)


def _halves(parts: Tensor) -> Tensor:
    """j/2 for each of the entries along the last dimension."""
    return 0.5 * torch.arange(parts.shape[-1], dtype=parts.dtype, device=parts.device)


def multivariate_digamma(x: Tensor, size: int) -> Tensor:
    """ψ_p(x) = Σ_j ψ(x − j/2), the derivative of log Γ_p."""
    return torch.digamma(_minus_halves(x, size)).sum(-1)


def excess_logarithm(x: Tensor, size: int) -> Tensor:
    """p log x − ψ_p(x): what log-determinants of Wishart draws lack to that of their mean."""
    parts = _minus_halves(x, size)
    log_gaps = torch.log1p(_halves(parts) / parts)  # log x − log(x − j/2)
    return (log_minus_digamma(parts) + log_gaps).sum(-1)


def invert_excess_logarithm(excess: Tensor, size: int = 1) -> Tensor:
    """x > (p − 1)/2 with p log x − ψ_p(x) = ``excess`` > 0, differentiable.

    Newton's method in u = 1/(x − (p−1)/2), in which the function is almost a straight line, to
    half of the digits. Two further steps, which are recorded, give the other half and the
    derivatives: right to third order.
    """
    smallest = 0.5 * (size - 1)
    half_of_the_digits = torch.finfo(excess.dtype).eps ** 0.5
    with torch.no_grad():
        u = 4 * excess.detach() / (size * (size + 1))
        for _ in range(60):
            before = u
            u = torch.maximum(u - _excess_step(u, excess.detach(), size), 0.1 * u)
            if bool(((u - before).abs() <= half_of_the_digits * u).all()):
                break
    for _ in range(2):
        u = u - _excess_step(u, excess, size)
    return 1 / u + smallest


def _excess_step(u: Tensor, excess: Tensor, size: int) -> Tensor:
    """Newton's step in u."""
    x = 1 / u + 0.5 * (size - 1)
    parts = _minus_halves(x, size)
    slopes = trigamma_excess(parts) + _halves(parts) / (x.unsqueeze(-1) * parts)
    slope_in_u = slopes.sum(-1) / u.square()
    return (excess_logarithm(x, size) - excess) / slope_in_u


def inverse_digamma(y: Tensor) -> Tensor:
    """x > 0 with ψ(x) = y, by Newton's method from Minka's start; not differentiable."""
    with torch.no_grad():
        of_large = y.clamp(min=MINKAS_BORDER).exp() + 0.5
        of_small = -1 / (y.clamp(max=MINKAS_BORDER) + EULER)
        x = torch.where(y >= MINKAS_BORDER, of_large, of_small)
        for _ in range(6):
            newton = x - (torch.digamma(x) - y) / trigamma(x)
            x = torch.maximum(newton, 0.1 * x)
        return x


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
    """u vᵀ."""
    return left.unsqueeze(-1) * right.unsqueeze(-2)


def quadratic(vector: Tensor, matrix: Tensor) -> Tensor:
    """vᵀ M v."""
    product = (matrix @ vector.unsqueeze(-1)).squeeze(-1)
    return (vector * product).sum(-1)


def compare(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """tr(M⁻¹(M' − M)) and log|M⁻¹M'|, exact also where M' ≈ M.

    >>> compare(torch.eye(2) * 2, torch.eye(2))
    (tensor(2.), tensor(1.3863))
    """
    factor = torch.linalg.cholesky(old)
    half = torch.linalg.solve_triangular(factor, new - old, upper=False)
    gap = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    identity = torch.eye(gap.shape[-1], dtype=gap.dtype, device=gap.device)
    trace = gap.diagonal(dim1=-2, dim2=-1).sum(-1)
    _, log_determinant = torch.linalg.slogdet(gap + identity)
    return trace, log_determinant
