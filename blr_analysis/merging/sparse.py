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

HALF = 2**16


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

    def ranked(counted: Tensor, k: int) -> tuple[int, int]:
        above = counted.flip(0).cumsum(0)
        at = int(torch.searchsorted(above, k))
        return len(counted) - 1 - at, k - (int(above[at - 1]) if at else 0)

    upper = [torch.zeros(HALF // 2, dtype=torch.int64) for _ in counts]
    for block in walk():
        for counted, size in zip(upper, block, strict=True):
            counted += torch.bincount(size >> 16, minlength=HALF // 2)
    found = [ranked(c, k) for c, k in zip(upper, counts, strict=True)]
    lower = [torch.zeros(HALF, dtype=torch.int64) for _ in counts]
    for block in walk():
        for counted, size, (high, _) in zip(lower, block, found, strict=True):
            counted += torch.bincount(size[size >> 16 == high] & (HALF - 1), minlength=HALF)
    return [
        (high << 16) + ranked(counted, rest)[0]
        for counted, (high, rest) in zip(lower, found, strict=True)
    ]


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
    pairs = zip(weights, precisions, strict=True)
    shares = [alpha * h if isinstance(h, Tensor) else alpha for alpha, h in pairs]
    for step, share in zip(steps, shares, strict=True):
        step *= share
    total, weight = torch.zeros_like(out), torch.zeros_like(out)
    signs = torch.stack(list(steps)).sum(0) if elect else out
    if elect:
        torch.ge(signs, 0, out=signs).mul_(2).sub_(1)
    for pull, share in zip(steps, shares, strict=True):
        counts = pull.sign().mul_(signs).clamp_min_(0) if elect else torch.ones_like(out)
        total.addcmul_(pull, counts)
        weight += counts.mul_(share)
    if normalize:
        there = torch.ge(weight.abs(), 1e-8, out=torch.empty_like(weight))
        total /= weight.mul_(there).add_(1 - there)  # 1 where nothing weighs
    torch.add(base, total, alpha=scale, out=out)


def blocks(start: int, stop: int) -> Iterable[tuple[int, int]]:
    """[start, stop) in pieces of BLOCK entries."""
    return ((low, min(low + BLOCK, stop)) for low in range(start, stop, BLOCK))
