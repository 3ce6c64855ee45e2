"""Integrals over Gaussian numbers, as accurate where a Gaussian is wide as where it is narrow.

    E_q[g(f)] = ∫ g(m + √v z) φ(z) dz ≈ h Σ_k g(m + √v z_k) φ(z_k),      z_k = k h

The trapezoidal rule on the whole line converges geometrically for analytic g (Trefethen & Weideman,
SIAM Review 2014), so that the number of nodes is doubled until two results agree. The nodes of
Gauss–Hermite quadrature, √v apart, miss what happens between them where v is large; here they
begin no farther apart than 1 in f. The line ends where the integrand has fallen by e³⁰.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian

MOST = 2**16
BLOCK = 2**18
SPAN, WIDER, WIDENINGS, DROP = 9.0, 1.5, 14, 30.0
Function = Callable[[Tensor], Tensor]
"""Places ``[K, N]`` → as many values, element by element."""


class Inaccurate(UserWarning):
    """An integral that the most nodes do not settle."""


def expected(f: DiagonalGaussian, function: Function) -> Tensor:
    """E_q[function(f_i)] of each number, ``[N]``, to 1e-9 (1e-5 in single precision).

    Derivatives in the mean and the precision of ``f`` are those of the sum, and as accurate.

    Args:
        f: N Gaussian numbers.
        function: places ``[K, N]`` → values ``[K, N]``, element by element.

    Warns:
        Inaccurate: the result still changes at the most nodes that are taken, about 2¹⁶.

    >>> expected(DiagonalGaussian(torch.zeros(2), torch.tensor([1.0, 0.01])), torch.square)
    tensor([  1., 100.])
    """
    with torch.no_grad():
        reach = _reach(f, lambda z: function(_places(f, z)).abs().log1p())

        def sums(nodes: Tensor) -> Tensor:
            z = _across(nodes, reach)
            terms = function(_places(f, z)) * _density(z)
            return torch.stack([terms.sum(0), terms.abs().sum(0)])

        def finish(total: Tensor, intervals: int) -> Tensor:
            return total * (2 * reach / intervals)

        def gap(before: Tensor, now: Tensor) -> Tensor:
            return (now[0] - before[0]).abs() / (1 + now[1])

        integrals, intervals = _settled(f, reach, sums, torch.add, finish, gap)
    if not (torch.is_grad_enabled() and (f.mean.requires_grad or f.precision.requires_grad)):
        return integrals[0]

    def share(nodes: Tensor) -> Tensor:
        z = _across(nodes, reach)
        return (function(_places(f, z)) * _density(z)).sum(0)

    nodes = torch.linspace(-1, 1, intervals + 1, dtype=torch.float64)
    blocks = _blocks(nodes.to(f.mean), f)
    if len(blocks) == 1:
        return share(blocks[0]) * (2 * reach / intervals)
    shares = [checkpoint(share, b, use_reentrant=False, preserve_rng_state=False) for b in blocks]
    return sum(shares[1:], start=shares[0]) * (2 * reach / intervals)


def log_expected(f: DiagonalGaussian, log_function: Function) -> Tensor:
    """log E_q[exp(log_function(f_i))] of each number, ``[N]``; safe where the integral underflows.

    Accurate to 1e-9 (1e-5 in single precision) relative to 1 + |the logarithm|, also where the
    integrand's mass lies far from q's.

    Args:
        f: N Gaussian numbers.
        log_function: places ``[K, N]`` → logarithms ``[K, N]``, element by element.

    Warns:
        Inaccurate: the result still changes at the most nodes that are taken, about 2¹⁶.

    >>> log_expected(DiagonalGaussian(torch.zeros(1), torch.ones(1)), lambda t: 2 * t)
    tensor([2.])
    """
    with torch.no_grad():
        reach = _reach(f, lambda z: log_function(_places(f, z)))

        def sums(nodes: Tensor) -> Tensor:
            z = _across(nodes, reach)
            return (log_function(_places(f, z)) - 0.5 * z.square()).logsumexp(0)

        def finish(total: Tensor, intervals: int) -> Tensor:
            return total + (2 * reach / intervals).log() - 0.5 * math.log(2 * math.pi)

        def gap(before: Tensor, now: Tensor) -> Tensor:
            return (now - before).abs() / (1 + now.abs())

        return _settled(f, reach, sums, torch.logaddexp, finish, gap)[0]


def _places(f: DiagonalGaussian, z: Tensor) -> Tensor:
    return f.mean + z * f.precision.rsqrt()


def _across(nodes: Tensor, reach: Tensor) -> Tensor:
    """z ``[K, N]`` at nodes ``[K]`` of [−1, 1]."""
    return nodes.view(-1, *[1] * reach.ndim) * reach


def _density(z: Tensor) -> Tensor:
    return (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)


def _blocks(nodes: Tensor, f: DiagonalGaussian) -> tuple[Tensor, ...]:
    """So few nodes at once that memory stays bounded."""
    return nodes.split(max(1, BLOCK // max(1, f.mean.numel())))


def _reach(f: DiagonalGaussian, log_size: Function) -> Tensor:
    """How far z must go to either side: until log_size(z) − z²/2 has fallen by DROP."""
    nodes = torch.linspace(-1, 1, 33).to(f.mean)
    reach = torch.full_like(f.mean, SPAN)
    for _ in range(WIDENINGS):
        z = _across(nodes, reach)
        heights = log_size(z) - 0.5 * z.square()
        ends, most = torch.maximum(heights[0], heights[-1]), heights.amax(0)
        short = (ends > most - DROP) & most.isfinite()
        if not bool(short.any()):
            break
        reach = torch.where(short, WIDER * reach, reach)
    return reach


def _settled(
    f: DiagonalGaussian,
    reach: Tensor,
    sums: Callable[[Tensor], Tensor],
    join: Callable[[Tensor, Tensor], Tensor],
    finish: Callable[[Tensor, int], Tensor],
    gap: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, int]:
    """The sum at so many intervals that it agrees with that at half as many, and their number."""

    def whole(nodes: Tensor) -> Tensor:
        first, *rest = (sums(part) for part in _blocks(nodes.to(f.mean), f))
        for part in rest:
            first = join(first, part)
        return first

    tolerance = max(1e-9, 64 * torch.finfo(f.mean.dtype).eps)
    std = f.precision.rsqrt()
    wanted = math.ceil(float((2 * reach * std.clamp_min(2)).amax())) if f.mean.numel() else 1
    intervals = min(wanted, MOST // 2)
    total = whole(torch.linspace(-1, 1, intervals + 1, dtype=torch.float64))
    integrals = finish(total, intervals)
    while True:
        middles = (2 * torch.arange(intervals, dtype=torch.float64) + 1) / intervals - 1
        total, intervals = join(total, whole(middles)), 2 * intervals
        before, integrals = integrals, finish(total, intervals)
        gaps = gap(before, integrals)
        worst = float(gaps[gaps.isfinite()].amax()) if bool(gaps.isfinite().any()) else 0.0
        if worst <= tolerance:
            return integrals, intervals
        if 2 * intervals > MOST:
            break
    if worst > 100 * tolerance:
        warnings.warn(
            f"integrals over f are uncertain by {worst:.0e} of their size at {intervals + 1} "
            "nodes, the most that are taken, for standard deviations of f up to "
            f"{float(std.amax()):.0e}: "
            "scale the inputs, take a narrower prior, or a likelihood without steps",
            Inaccurate,
            stacklevel=3,
        )
    return integrals, intervals
