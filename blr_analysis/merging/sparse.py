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
from typing import NamedTuple

import torch
from torch import Tensor

from blr_analysis.merging.formula import BLOCK, PrecisionValue

HALF = 2**16  # the number of values that half of a float32's bits can have
NO_WEIGHT = 1e-8  # no total is divided by a smaller sum of weights


def sizes(step: Tensor, precision: PrecisionValue) -> Tensor:
    """|δ| √H as whole numbers in the same order.

    These are the bits of a float32: those of floats from 0 on have the order of their values.
    """
    size = step.abs()
    if isinstance(precision, Tensor):
        size = size * precision.sqrt()
    return size.float().view(torch.int32)


def limits(walk: Callable[[], Iterable[Sequence[Tensor]]], counts: Sequence[int]) -> list[int]:
    """The k-th largest of each model's sizes, exactly.

    The first pass finds the upper half of its bits, the second pass the lower half, among the sizes
    that have this upper half.

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
    ranked = [_ranked(histogram, count) for histogram, count in zip(upper, counts, strict=True)]
    lower = [torch.zeros(HALF, dtype=torch.int64) for _ in counts]
    for block in walk():
        for histogram, size, place in zip(lower, block, ranked, strict=True):
            candidates = size[size >> 16 == place.value]
            histogram += torch.bincount(candidates & (HALF - 1), minlength=HALF)
    return [
        (place.value << 16) + _ranked(histogram, place.rank_among_equals).value
        for histogram, place in zip(lower, ranked, strict=True)
    ]


class _Ranked(NamedTuple):
    """A number at a rank of many.

    Attributes:
        value: of the number.
        rank_among_equals: its rank among the numbers of the same value.
    """

    value: int
    rank_among_equals: int


def _ranked(histogram: Tensor, rank: int) -> _Ranked:
    """The ``rank``-th largest number that was counted."""
    at_least = histogram.flip(0).cumsum(0)  # how many are at least the largest value, the next, …
    position = int(torch.searchsorted(at_least, rank))
    larger = 0
    if position > 0:
        larger = int(at_least[position - 1])
    return _Ranked(len(histogram) - 1 - position, rank - larger)


def zero_below(limit: int, step: Tensor, size: Tensor) -> None:
    """Set the entries of a step to 0 whose size is below a limit of :func:`limits`."""
    float_limit = torch.tensor(limit, dtype=torch.int32).view(torch.float32).item()
    mask = torch.ge(size.view(torch.float32), float_limit, out=torch.empty_like(step))
    step *= mask


def random_mask(density: float, count: int, seed: int, model: int, name: str, start: int) -> Tensor:
    """Which of the ``count`` entries from ``start`` on, a multiple of BLOCK, stay by chance.

    Shards, pieces and threads do not change them.

    >>> mask = random_mask(0.5, 8, 0, 0, "w", 0)
    >>> torch.equal(mask, random_mask(0.5, 8, 0, 0, "w", 0))
    True
    >>> torch.equal(mask, random_mask(0.5, 8, 1, 0, "w", 0))
    False
    """
    key = f"{seed}\0{model}\0{name}\0{start}".encode()
    digest = hashlib.sha256(key).digest()
    block_seed = int.from_bytes(digest[:8], "big") >> 1  # 63 bits, as torch takes them
    generator = torch.Generator().manual_seed(block_seed)
    return torch.rand(count, generator=generator) < density


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
            has_vote = torch.ones_like(out)
        else:
            has_vote = step.sign().mul_(signs).clamp_min_(0)  # 1 where it has the elected sign
        total.addcmul_(step, has_vote)
        total_weight += has_vote.mul_(share)
    if normalize:
        # 1 or 0 as floats, because writing through a boolean mask takes twice as long
        is_divisor = torch.ge(total_weight.abs(), NO_WEIGHT, out=torch.empty_like(total_weight))
        total_weight.mul_(is_divisor).add_(1 - is_divisor)  # now 1 where nothing is divided
        total /= total_weight
    torch.add(base, total, alpha=scale, out=out)


def _elected_signs(steps: Sequence[Tensor]) -> Tensor:
    """1 or −1, the sign of the steps' sum."""
    total = torch.stack(list(steps)).sum(0)
    is_positive = torch.ge(total, 0, out=total)  # 1 or 0, in the memory of the total
    return is_positive.mul_(2).sub_(1)


def blocks(start: int, stop: int) -> Iterable[tuple[int, int]]:
    """[start, stop) in pieces of BLOCK entries."""
    return ((low, min(low + BLOCK, stop)) for low in range(start, stop, BLOCK))
