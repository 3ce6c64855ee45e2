"""Functions of the Gamma family, exact for arguments from 1e-3 to 1e6.

Where two large terms would cancel, their difference is computed by Stirling's series.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LOG_2PI = math.log(2 * math.pi)
EULER = 0.5772157  # −ψ(1)
MINKA_SMALL = -2.22  # ψ(x) below which Minka's start is the one for small x
MINKA_STEPS = 6  # of Newton's method: enough for float64
NEWTON_STEPS = 60  # at most; a few are usual
LAST_STEPS = 2  # of Newton's method, which autograd records for the derivatives
SMALLEST_SHRINKAGE = 0.1  # the least factor of a Newton step, so that numbers stay positive
SERIES_FROM = 20.0  # from this argument on Stirling's series is more exact than the difference
SMALL_CHANGE = 0.5  # relative changes below it go through log1p
DIGAMMA_SERIES = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132)
"""c_k of log x − ψ(x) = 1/(2x) + Σ_k c_k / x^(2k+2)."""
TRIGAMMA_SERIES = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66)
"""c_k of ψ'(x) − 1/x = 1/(2x²) + Σ_k c_k / x^(2k+3)."""


def trigamma(x: Tensor) -> Tensor:
    """ψ'(x) = ζ(2, x)."""
    return torch.special.zeta(2.0, x)


def log_minus_digamma(x: Tensor) -> Tensor:
    """log x − ψ(x), which is close to 1/(2x) for large x, where the two terms nearly cancel."""
    small = x.clamp(max=SERIES_FROM)
    difference = small.log() - torch.digamma(small)
    reciprocal = 1 / x.clamp(min=SERIES_FROM)
    corrections = reciprocal * _polynomial(reciprocal.square(), DIGAMMA_SERIES)
    series = reciprocal * (0.5 + corrections)
    return torch.where(x < SERIES_FROM, difference, series)


def trigamma_excess(x: Tensor) -> Tensor:
    """ψ'(x) − 1/x, which is close to 1/(2x²) for large x, where the two terms nearly cancel."""
    small = x.clamp(max=SERIES_FROM)
    difference = trigamma(small) - 1 / small
    reciprocal = 1 / x.clamp(min=SERIES_FROM)
    corrections = reciprocal * _polynomial(reciprocal.square(), TRIGAMMA_SERIES)
    series = reciprocal.square() * (0.5 + corrections)
    return torch.where(x < SERIES_FROM, difference, series)


def _polynomial(z: Tensor, coefficients: Sequence[float]) -> Tensor:
    """c_0 + c_1 z + c_2 z² + …, by Horner's rule."""
    value = torch.zeros_like(z)
    for coefficient in reversed(coefficients):
        value = value * z + coefficient
    return value


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """log(x'/x) for x' = ``new``, x = ``old``; exact also where they are close, or one is tiny."""
    relative_change = (new - old) / old
    of_small_change = torch.log1p(relative_change.clamp(-SMALL_CHANGE, SMALL_CHANGE))
    of_large_change = (new / old).log()
    return torch.where(relative_change.abs() < SMALL_CHANGE, of_small_change, of_large_change)


def _minus_halves(x: Tensor, size: int) -> Tensor:
    """x − j/2 for j = 0 … size − 1, along a new last dimension."""
    copies = x.unsqueeze(-1).expand(*x.shape, size)
    return copies - _halves(copies)


def _halves(like: Tensor) -> Tensor:
    """0, ½, 1, …: j/2 for each entry j of the last dimension of ``like``."""
    return 0.5 * torch.arange(like.shape[-1], dtype=like.dtype, device=like.device)


def multivariate_digamma(x: Tensor, size: int) -> Tensor:
    """ψ_p(x) = Σ_j ψ(x − j/2), the derivative of log Γ_p."""
    return torch.digamma(_minus_halves(x, size)).sum(-1)


def excess_logarithm(x: Tensor, size: int) -> Tensor:
    """p log x − ψ_p(x), for p = ``size``.

    This is the log-determinant of the mean of a Wishart distribution with 2x degrees of freedom,
    less the mean of its draws' log-determinants.
    """
    parts = _minus_halves(x, size)
    log_gaps = torch.log1p(_halves(parts) / parts)  # log x − log(x − j/2)
    return (log_minus_digamma(parts) + log_gaps).sum(-1)


def invert_excess_logarithm(excess: Tensor, size: int = 1) -> Tensor:
    """x > (p − 1)/2 with p log x − ψ_p(x) = ``excess`` > 0, for p = ``size``; differentiable.

    Newton's method in u = 1/(x − (p−1)/2), in which the function is almost a straight line, finds
    half of the digits. Two further steps, which autograd records, give the other half and the
    derivatives up to the third order.
    """
    smallest_x = 0.5 * (size - 1)
    half_of_the_digits = torch.finfo(excess.dtype).eps ** 0.5
    with torch.no_grad():
        u = 4 * excess.detach() / (size * (size + 1))
        for _ in range(NEWTON_STEPS):
            newton = u - _excess_step(u, excess.detach(), size)
            next_u = torch.maximum(newton, SMALLEST_SHRINKAGE * u)
            has_converged = bool(((next_u - u).abs() <= half_of_the_digits * next_u).all())
            u = next_u
            if has_converged:
                break
    for _ in range(LAST_STEPS):
        u = u - _excess_step(u, excess, size)
    return 1 / u + smallest_x


def _excess_step(u: Tensor, excess: Tensor, size: int) -> Tensor:
    """The step in u that Newton's method subtracts."""
    x = 1 / u + 0.5 * (size - 1)
    parts = _minus_halves(x, size)
    slopes = trigamma_excess(parts) + _halves(parts) / (x.unsqueeze(-1) * parts)
    slope_in_u = slopes.sum(-1) / u.square()
    return (excess_logarithm(x, size) - excess) / slope_in_u


def inverse_digamma(y: Tensor) -> Tensor:
    """x > 0 with ψ(x) = y, by Newton's method from Minka's start; not differentiable."""
    with torch.no_grad():
        if_large = y.clamp(min=MINKA_SMALL).exp() + 0.5
        if_small = -1 / (y.clamp(max=MINKA_SMALL) + EULER)
        x = torch.where(y >= MINKA_SMALL, if_large, if_small)
        for _ in range(MINKA_STEPS):
            newton = x - (torch.digamma(x) - y) / trigamma(x)
            x = torch.maximum(newton, SMALLEST_SHRINKAGE * x)
        return x
