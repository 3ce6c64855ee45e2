"""Merges of task vectors of which a part is left out: TIES and DARE.

With δ_t = θ_t − θ_0, of which a share ``density`` stays (the largest, or as chance has it):

    θ = θ_0 + λ Σ_t α_t H_t δ_t s_t / Σ_t α_t H_t s_t,      H_t = 1 where no precisions weigh

over the models that stay; with signs elected, s_t is 1 where α_t H_t δ_t has the sign of the sum
over all of them, and 0 elsewhere. Without normalization there is no division. "The largest" is by
|δ|, or by |δ| √H: what the loss of the task rises by, were the entry left out.

Of a tensor of n entries all stay that are at least as large as the k-th largest, k = ⌊density · n⌋
and at least 1, as in the authors' code: which ones does not depend on their order. Between bfloat16
models many |δ| are equal, so that some more than k stay; mergekit keeps exactly k, by position
among equals, and differs at those entries (0.4 % of a small Llama's) and at no others.

Source: Yadav et al., "TIES-merging: resolving interference when merging models", NeurIPS 2023; Yu
et al., "Language models are super Mario", ICML 2024 (DARE).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from blr_analysis.merging.formula import BLOCK, PrecisionValue

HALF = 2**16  # the values of half of a float32's bits
NO_WEIGHT = 1e-8  # a sum of weights that nothing is divided by


def sizes(step: Tensor, precision: PrecisionValue) -> Tensor:
    """|δ| √H as whole numbers in the same order: the bits of a float32 that is not negative."""
    size = step.abs()
    if isinstance(precision, Tensor):
        size = size * precision.sqrt()
    return size.float().view(torch.int32)


def limits(walk: Callable[[], Iterable[Sequence[Tensor]]], counts: Sequence[int]) -> list[int]:
    """The k-th largest of each model's sizes, exactly, from two passes: the upper half of its bits,
    then the lower half among those that share the upper one.

    Args:
        walk: every call yields the sizes of all models, block by block.
        counts: k ≥ 1 of each model.

    >>> one = torch.tensor([3.0, 1.0, 2.0, 5.0]).view(torch.int32)
    >>> limit = limits(lambda: [[one[:2]], [one[2:]]], [2])
    >>> (one >= limit[0]).tolist()
    [True, False, False, True]
    """

    upper = [torch.zeros(HALF // 2, dtype=torch.int64) for _ in counts]
    for block in walk():
        for histogram, size in zip(upper, block, strict=True):
            histogram += torch.bincount(size >> 16, minlength=HALF // 2)
    upper_halves = [_ranked(histogram, k) for histogram, k in zip(upper, counts, strict=True)]
    lower = [torch.zeros(HALF, dtype=torch.int64) for _ in counts]
    for block in walk():
        for histogram, size, (high, _) in zip(lower, block, upper_halves, strict=True):
            among_equals = size[size >> 16 == high] & (HALF - 1)
            histogram += torch.bincount(among_equals, minlength=HALF)
    return [
        (high << 16) + _ranked(histogram, rank)[0]
        for histogram, (high, rank) in zip(lower, upper_halves, strict=True)
    ]


def _ranked(histogram: Tensor, rank: int) -> tuple[int, int]:
    """The value of the ``rank``-th largest, and its rank among those that have the same value."""
    at_least = histogram.flip(0).cumsum(0)  # of the largest value, the next, …
    place = int(torch.searchsorted(at_least, rank))
    larger = int(at_least[place - 1]) if place else 0
    return len(histogram) - 1 - place, rank - larger


def keep(step: Tensor, size: Tensor, limit: int) -> None:
    """Leave out of a step what is smaller than a limit of :func:`limits`."""
    least = torch.tensor(limit, dtype=torch.int32).view(torch.float32)
    step *= torch.ge(size.view(torch.float32), least.item(), out=torch.empty_like(step))


def drawn(density: float, count: int, seed: int, model: int, name: str, start: int) -> Tensor:
    """Which of the entries from ``start``, a multiple of BLOCK, on stay by chance: the same
    whatever the shards, pieces and threads.

    >>> one = drawn(0.5, 8, 0, 0, "w", 0)
    >>> torch.equal(one, drawn(0.5, 8, 0, 0, "w", 0)), torch.equal(one, drawn(0.5, 8, 1, 0, "w", 0))
    (True, False)
    """
    key = f"{seed}\0{model}\0{name}\0{start}".encode()
    number = int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1
    return torch.rand(count, generator=torch.Generator().manual_seed(number)) < density


def combine_sparse(
    out: Tensor,
    base: Tensor,
    steps: Sequence[Tensor],
    weights: Sequence[float],
    precisions: Sequence[PrecisionValue],
    *,
    elect: bool,
    normalize: bool,
    scale: float,
) -> None:
    """The module's formula for one block; the steps lack what does not stay, and are used up."""
    shares = [
        weight * precision if isinstance(precision, Tensor) else weight
        for weight, precision in zip(weights, precisions, strict=True)
    ]
    for step, share in zip(steps, shares, strict=True):
        step *= share
    signs = _elected_signs(steps) if elect else None
    total = torch.zeros_like(out)
    total_weight = torch.zeros_like(out)
    for step, share in zip(steps, shares, strict=True):
        if signs is None:
            counts = torch.ones_like(out)
        else:
            counts = step.sign().mul_(signs).clamp_min_(0)  # 1 where it has the elected sign
        total.addcmul_(step, counts)
        total_weight += counts.mul_(share)
    if normalize:
        weighs = torch.ge(total_weight.abs(), NO_WEIGHT, out=torch.empty_like(total_weight))
        total /= total_weight.mul_(weighs).add_(1 - weighs)  # 1 where nothing weighs
    torch.add(base, total, alpha=scale, out=out)


def _elected_signs(steps: Sequence[Tensor]) -> Tensor:
    """1 or −1, the sign of the steps' sum."""
    total = torch.stack(list(steps)).sum(0)
    return torch.ge(total, 0, out=total).mul_(2).sub_(1)


def blocks(start: int, stop: int) -> Iterable[tuple[int, int]]:
    """[start, stop) in pieces of BLOCK entries."""
    return ((low, min(low + BLOCK, stop)) for low in range(start, stop, BLOCK))
