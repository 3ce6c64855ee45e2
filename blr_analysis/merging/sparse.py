"""Merges of task vectors that set a part of their entries to 0: TIES, DARE and Breadcrumbs.

A share ``density`` of the entries of every δ_t = θ_t − θ_0 stays: the largest (TIES), random ones
(DARE), or those of middle size (Breadcrumbs): the largest but for the share γ of still larger ones,
of which fewer are left out where too few would stay. The others become 0. The merge is, entry by
entry,

    θ = θ_0 + λ Σ_t α_t H_t δ_t s_t / Σ_t α_t H_t s_t,      H_t = 1 where no precisions weigh

Without an election of signs, s_t is 1. With an election, s_t is 1 for the models whose α_t H_t δ_t
has the sign of Σ_t α_t H_t δ_t, and 0 for the other models and where δ_t is 0. Without
normalization there is no division.

The size of an entry is |δ|. With precisions it is |δ| √H, because dropping the entry raises the
task's loss by ½ H δ². A tensor of n entries keeps every entry that is at least as large as the k-th
largest, with k = max(1, ⌊density · n⌋). Between bfloat16 models many |δ| are equal, so that a few
more than k stay. Mergekit keeps exactly k, by position among equals, and differs at these entries
alone (0.4 % of a small Llama's). The authors' code, and FusionBench, keep the k + 1 largest of the
whole model, so that some tensors keep more and others less.

Source: Yadav et al., "TIES-merging: resolving interference when merging models", NeurIPS 2023; Yu
et al., "Language models are super Mario", ICML 2024 (DARE); Davari and Belilovsky, "Model
breadcrumbs: scaling multi-task model merging with sparse masks", ECCV 2024.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blr_analysis.merging.formula import BLOCK, PrecisionValue

VALUES_OF_HALF = 2**16  # the number of values of 16 bits, half of a float32
NO_LIMIT = 0x7F800000  # the bits of inf: no entry is as large
NO_WEIGHT = 1e-8  # a smaller sum of weights divides nothing


def sizes(step: Tensor, precision: PrecisionValue) -> Tensor:
    """|δ| √H as whole numbers (int32) that have the same order.

    They are the bits of a float32. The bits of floats from 0 on, read as integers, are in the order
    of the floats.
    """
    size = step.abs()
    if isinstance(precision, Tensor):
        size = size * precision.sqrt()
    return size.float().view(torch.int32)


def limits(
    sizes_by_block: Callable[[], Iterable[Sequence[Tensor]]], ranks: Sequence[Sequence[int]]
) -> list[list[int]]:
    """The :func:`sizes` of some ranks, counted from the largest, of each model, exactly.

    The first pass finds the upper 16 bits of the sizes. The second pass finds the lower 16 bits,
    among the sizes with the same upper bits.

    Args:
        sizes_by_block: yields the sizes of all models, block by block; it is called twice.
        ranks: of each model, 1 for the largest.

    >>> size = torch.tensor([3.0, 1.0, 2.0, 5.0]).view(torch.int32)
    >>> limit = limits(lambda: [[size[:2]], [size[2:]]], [[2]])
    >>> (size >= limit[0][0]).tolist()
    [True, False, False, True]
    """
    n_upper = VALUES_OF_HALF // 2  # the sign's bit is 0
    upper_histograms = [torch.zeros(n_upper, dtype=torch.int64) for _ in ranks]
    for block in sizes_by_block():
        for histogram, size in zip(upper_histograms, block, strict=True):
            histogram += torch.bincount(size >> 16, minlength=n_upper)
    upper_halves = [
        [_ranked(histogram, rank) for rank in ranks_of_model]
        for histogram, ranks_of_model in zip(upper_histograms, ranks, strict=True)
    ]
    lower_histograms = [
        [torch.zeros(VALUES_OF_HALF, dtype=torch.int64) for _ in halves] for halves in upper_halves
    ]
    for block in sizes_by_block():
        for histograms, size, halves in zip(lower_histograms, block, upper_halves, strict=True):
            upper_bits = size >> 16
            for histogram, half in zip(histograms, halves, strict=True):
                lower_bits = size[upper_bits == half.value] & (VALUES_OF_HALF - 1)
                histogram += torch.bincount(lower_bits, minlength=VALUES_OF_HALF)
    return [
        [
            (half.value << 16) + _ranked(histogram, half.rank_among_equals).value
            for histogram, half in zip(histograms, halves, strict=True)
        ]
        for histograms, halves in zip(lower_histograms, upper_halves, strict=True)
    ]


class _Ranked(NamedTuple):
    """The number at some rank, counted from the largest.

    Attributes:
        value: the number's value.
        rank_among_equals: its rank among the numbers of the same value.
    """

    value: int
    rank_among_equals: int


def _ranked(histogram: Tensor, rank: int) -> _Ranked:
    """The ``rank``-th largest of the numbers in a histogram."""
    largest_first = histogram.flip(0)
    n_at_least = largest_first.cumsum(0)  # of each value, how many numbers are as large or larger
    position = int(torch.searchsorted(n_at_least, rank))
    n_larger = 0
    if position > 0:
        n_larger = int(n_at_least[position - 1])
    value = len(histogram) - 1 - position
    return _Ranked(value, rank - n_larger)


def zero_outside(step: Tensor, size: Tensor, smallest: int, largest: int) -> None:
    """Set the entries of a step to 0 that are smaller or larger than limits of :func:`limits`."""
    values = size.view(torch.float32)
    bounds = torch.tensor([smallest, largest], dtype=torch.int32).view(torch.float32).tolist()
    step *= torch.ge(values, bounds[0], out=torch.empty_like(step))
    if largest != NO_LIMIT:
        step *= torch.le(values, bounds[1], out=torch.empty_like(step))


def draws(key: str, start: int, stop: int) -> Tensor:
    """Numbers from 0 to 1 for the entries ``[start, stop)`` of a tensor.

    They depend on the key and the number of the entry alone, and not on shards, pieces or threads:
    every :data:`BLOCK` of entries has a seed of its own.

    >>> torch.equal(draws("w", 0, 9)[5:], draws("w", 5, 9))
    True
    """
    pieces = []
    for block in range(start - start % BLOCK, stop, BLOCK):
        digest = hashlib.sha256(f"{key}\0{block}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big") >> 1  # 63 bits, as torch takes them
        numbers = torch.rand(BLOCK, generator=torch.Generator().manual_seed(seed))
        pieces.append(numbers[max(start - block, 0) : stop - block])
    return torch.cat(pieces)


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
    """The module's formula for one block, written into ``out``.

    Args:
        steps: δ_t; entries that do not stay are 0 already. The steps are overwritten.
        elect: whether signs are elected.
        normalize: whether the sum is divided by the weights.
        scale: λ.
    """
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
            has_vote = torch.ones_like(out)
        else:
            has_vote = step.sign().mul_(signs).clamp_min_(0)  # 1 where it has the elected sign
        total.addcmul_(step, has_vote)
        total_weight += has_vote.mul_(share)
    if normalize:
        total /= _divisors(total_weight)
    torch.add(base, total, alpha=scale, out=out)


def _divisors(weights: Tensor) -> Tensor:
    """The weights, and 1 where a weight is too small to divide by; in place."""
    # 1 or 0 as floats, because writing through a boolean mask takes twice as long.
    is_divisor = torch.ge(weights.abs(), NO_WEIGHT, out=torch.empty_like(weights))
    return weights.mul_(is_divisor).add_(1 - is_divisor)


def _elected_signs(steps: Sequence[Tensor]) -> Tensor:
    """1 or −1, the sign of the steps' sum."""
    total = torch.stack(list(steps)).sum(0)
    is_positive = torch.ge(total, 0, out=total)  # 1 or 0, in the memory of the total
    return is_positive.mul_(2).sub_(1)


def blocks(start: int, stop: int) -> Iterable[tuple[int, int]]:
    """[start, stop) in pieces of BLOCK entries."""
    return ((low, min(low + BLOCK, stop)) for low in range(start, stop, BLOCK))
