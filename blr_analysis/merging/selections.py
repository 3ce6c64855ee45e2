"""Merges that pick entries of the steps Δ_t = θ_t − θ_0: where models agree or changed most.

Each function takes a tensor as :data:`Blocks`, reads it as often as it must to measure what depends
on the whole tensor, and returns a :data:`Select`: the function that gives the step of the merge for
a block of the base's entries and the models' steps, stacked ``[T, …]``. Sources:

* :func:`nearswap`: alchemonaut, model card of QuartetAnemoi-70B-t0.0001, 2024;
* :func:`ram`, :func:`ramplus_tl`: Yuan et al., "Behavior knowledge merge in reinforced agentic
  models", 2026;
* :func:`sce`: Wan et al., "FuseChat: knowledge fusion of chat models", 2024;
* :func:`arcee_fusion`: Arcee AI, "Meet mergekit v0.1: Arcee Fusion", 2025;
* :func:`keep_probabilities`: Deep et al., "DELLA-Merging: reducing interference in model merging
  through magnitude-based sampling", 2024.

The formulas are those that mergekit documents. Results agree with mergekit 0.1.5 but for
:func:`arcee_fusion`, where it rounds and samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.merging.sparse import draws, limits, sizes

NO_WEIGHT = 1e-8  # no total is divided by a smaller sum of weights
OUTLIER = 1.5  # an outlier is so many interquartile ranges above the median
POSITION_BITS = 32  # of a 64-bit integer that holds a size and a position

# A block of a tensor is the base's entries and the models' steps, [T, ...].
Select = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Blocks:
    """A tensor of the base and of all models, block by block.

    Attributes:
        read: yields the base's entries and the models' steps of one block after the other.
        numel: the number of entries of the tensor.
    """

    read: Callable[[], Iterator[tuple[Tensor, Tensor]]]
    numel: int


@dataclass(frozen=True)
class Selection:
    """The settings of these merges.

    Attributes:
        t: nearswap: the largest change of an entry.
        epsilon: RAM: a larger step counts as a change.
        select_topk: SCE: the share of entries that stay.
        r: RAM+: how much a task's own entries grow with its overlap.
        alpha: RAM+: a larger overlap lets them grow no further.
    """

    t: float | None = None
    epsilon: float = 1e-5
    select_topk: float = 1.0
    r: float = 0.1
    alpha: float = 0.2


def one_block(base: Tensor, steps: Tensor) -> Blocks:
    """A small tensor as a single block."""
    return Blocks(lambda: iter([(base, steps)]), base.numel())


def nearswap(blocks: Blocks, selection: Selection) -> Select:
    """Δ, cut to [−t, t]: entries that are near become the other model's.

    >>> base, steps = torch.zeros(3), torch.tensor([[0.1, -0.5, 2.0]])
    >>> nearswap(one_block(base, steps), Selection(t=0.2))(base, steps)
    tensor([ 0.1000, -0.2000,  0.2000])
    """
    largest = selection.t
    assert largest is not None

    def select(base: Tensor, steps: Tensor) -> Tensor:
        return steps[0].clamp(-largest, largest)

    return select


def ram(blocks: Blocks, selection: Selection) -> Select:
    """The mean of the steps that are larger than ε, entry by entry; 0 where there are none.

    >>> base, steps = torch.zeros(3), torch.tensor([[0.4, 0.4, 0.0], [0.2, 0.0, 0.0]])
    >>> ram(one_block(base, steps), Selection())(base, steps)
    tensor([0.3000, 0.4000, 0.0000])
    """

    def select(base: Tensor, steps: Tensor) -> Tensor:
        is_changed = _is_changed(steps, selection)
        n_changed = is_changed.sum(0)
        total = is_changed.mul_(steps).sum(0)
        return total.div_(n_changed.clamp_min_(1))

    return select


def ramplus_tl(blocks: Blocks, selection: Selection) -> Select:
    """:func:`ram`, but entries that one model alone changed are multiplied by 1 + r min(ρ, α).

    ρ is the overlap of that model in this tensor: the number of its changed entries that other
    models changed too, over the number of those that it alone changed. The more of a task is
    averaged away, the more the rest of it grows.
    """
    n_alone = torch.zeros((), dtype=torch.float64)
    n_shared = torch.zeros((), dtype=torch.float64)
    for _, steps in blocks.read():
        is_changed = _is_changed(steps, selection).flatten(1)
        n_changed = is_changed.sum(0)
        n_alone = n_alone + (is_changed * (n_changed == 1)).sum(1).double().cpu()
        n_shared = n_shared + (is_changed * (n_changed > 1)).sum(1).double().cpu()
    overlap = n_shared / n_alone.clamp_min(1)
    growth = 1 + selection.r * overlap.clamp_max(selection.alpha)

    def select(base: Tensor, steps: Tensor) -> Tensor:
        is_changed = _is_changed(steps, selection)
        n_changed = is_changed.sum(0)
        is_alone = is_changed * (n_changed == 1)
        is_shared = is_changed * (n_changed > 1)
        mean_of_shared = (steps * is_shared).sum(0) / n_changed.clamp_min(1)
        grown = (steps * is_alone * _by_model(growth, steps)).sum(0)
        return mean_of_shared + grown

    return select


def _is_changed(steps: Tensor, selection: Selection) -> Tensor:
    """1 where a step is larger than ε, else 0, in the dtype of the steps."""
    # As floats, because arithmetic with booleans takes several times as long.
    return torch.gt(steps.abs(), selection.epsilon, out=torch.empty_like(steps))


def _by_model(numbers: Tensor, steps: Tensor) -> Tensor:
    """A number for each model, ``[T]``, in the shape ``[T, 1, …]`` and the dtype of the steps."""
    return numbers.to(steps).view(-1, *[1] * (steps.ndim - 1))


def sce(blocks: Blocks, selection: Selection) -> Select:
    """Select, calculate, erase: the entries that vary most over the models, averaged by energy.

    The share ``select_topk`` of a tensor's entries stays, those with the largest variance over the
    models. A model's weight is its energy, the sum of squares of its entries that stay. Only steps
    that have the sign of the steps' sum are averaged.
    """
    smallest = 0  # of the variances of entries that stay, as sparse.sizes has them
    if selection.select_topk < 1:
        count = max(1, int(selection.select_topk * blocks.numel))

        def variances() -> Iterator[list[Tensor]]:
            for _, steps in blocks.read():
                yield [_variance(steps)]

        ((smallest,),) = limits(variances, [[count]])
    energy = torch.zeros((), dtype=torch.float64)
    for _, steps in blocks.read():
        kept = _varying(steps, smallest)
        energy = energy + kept.square_().flatten(1).sum(1, dtype=torch.float64).cpu()
    weights = energy / energy.sum().clamp_min(torch.finfo(torch.float64).tiny)

    def select(base: Tensor, steps: Tensor) -> Tensor:
        kept = _varying(steps, smallest)
        is_positive = torch.ge(kept.sum(0), 0, out=torch.empty_like(kept[0]))
        sign = is_positive.mul_(2).sub_(1)
        has_sign = torch.gt(kept * sign, 0, out=torch.empty_like(kept))
        weights_of_entries = has_sign.mul_(_by_model(weights, kept))
        total = kept.mul_(weights_of_entries).sum(0)
        total_weight = weights_of_entries.sum(0)
        return total / torch.where(total_weight.abs() < NO_WEIGHT, 1.0, total_weight)

    return select


def _variance(steps: Tensor) -> Tensor:
    """The :func:`sparse.sizes` of the variances over the models, a flat block of them."""
    gaps = steps - steps.mean(0)
    return sizes(gaps.square_().mean(0).flatten(), 1.0).cpu()


def _varying(steps: Tensor, smallest: int) -> Tensor:
    """A copy of the steps with 0 in entries whose variance is below a limit."""
    if smallest == 0:
        return steps.clone()
    varies = _variance(steps).to(steps.device).view(steps.shape[1:]) >= smallest
    return steps * varies.to(steps.dtype)


def arcee_fusion(blocks: Blocks, selection: Selection) -> Select:
    """Δ where its importance is an outlier in the tensor, 0 elsewhere.

    The importance of an entry is |Δ| times the divergence of its row: of softmax(θ_1) from
    softmax(θ_0) along the last axis. An outlier is at least 1.5 interquartile ranges above the
    median.

    The divergence is computed in float64, and the quartiles are those of all entries, in float32.
    Mergekit computes in the recipe's dtype: in float32, rounding changes an importance by some 3 %.
    For the quartiles of a tensor of more than a million entries it draws a million at random, so
    that two of its runs differ. Up to 1 % of the entries, those near the threshold, stay in one
    merge and not in the other.
    """

    divergences: list[Tensor] = []  # of the blocks that were read so far; a number for each row

    def importances() -> Iterator[list[Tensor]]:
        for k, (base, steps) in enumerate(blocks.read()):
            if k == len(divergences):
                divergences.append(_divergence(base, steps[0]))
            importance = steps[0].abs() * divergences[k]
            yield [sizes(importance.flatten(), 1.0).cpu()]

    last = blocks.numel - 1
    ranks = [blocks.numel - int(share * last) for share in (0.25, 0.5, 0.75)]
    (quartiles,) = limits(importances, [ranks])
    first, median, third = torch.tensor(quartiles, dtype=torch.int32).view(torch.float32).tolist()
    threshold = median + OUTLIER * (third - first)

    def select(base: Tensor, steps: Tensor) -> Tensor:
        importance = steps[0].abs() * _divergence(base, steps[0])
        return steps[0] * (importance.float() >= threshold)

    return select


def _divergence(base: Tensor, step: Tensor) -> Tensor:
    """The divergence of each row, in float64; float32 rounds small divergences away."""
    log_base = torch.log_softmax(base.double(), -1)
    log_model = torch.log_softmax((base + step).double(), -1)
    log_ratio = torch.sub(log_model, log_base, out=log_base)
    return log_model.exp_().mul_(log_ratio).sum(-1, keepdim=True)


def keep_probabilities(rows: Tensor, density: float, epsilon: float) -> Tensor:
    """DELLA's probabilities that entries stay, by the rank of their size in their row.

    They rise in equal steps from density − ε for the smallest entry to density + ε for the largest.

    >>> keep_probabilities(torch.tensor([[0.0, -3.0, 1.0]]), 0.5, 0.2)
    tensor([[0.3000, 0.7000, 0.5000]])
    """
    length = rows.shape[1]
    if length == 1:
        return torch.full_like(rows, density)
    step = 2 * epsilon / (length - 1)
    return _ranks(rows).mul_(step).add_(density - epsilon)


def _ranks(rows: Tensor) -> Tensor:
    """The rank of each entry's size in its row, from 0 on, in the dtype of the rows.

    Of equal sizes the first comes first. A size in its float32 bits and its position make one
    integer, because integers are sorted several times as fast as positions by their sizes.
    """
    positions = torch.arange(rows.shape[1], device=rows.device)
    keys = sizes(rows, 1.0).long().bitwise_left_shift_(POSITION_BITS).add_(positions)
    if keys.device.type == "cpu":
        keys.numpy().sort(axis=1)  # in place, and faster than torch's
    else:
        keys = keys.sort(dim=1).values
    order = keys.bitwise_and_(2**POSITION_BITS - 1)
    return torch.empty_like(rows).scatter_(1, order, positions.to(rows.dtype).expand_as(rows))


def drop_by_size(
    rows: Tensor, density: float, epsilon: float, *, rescale: bool, key: str, start: int
) -> Tensor:
    """Rows whose entries stay with :func:`keep_probabilities`; the others become 0.

    Args:
        rescale: whether entries that stay are divided by their probability.
        key: seeds the draws, together with the numbers of the entries alone.
        start: the number of the first entry of the rows in their tensor.
    """
    probabilities = keep_probabilities(rows, density, epsilon)
    drawn = draws(key, start, start + rows.numel()).view_as(rows).to(rows)
    stays = torch.lt(drawn, probabilities, out=torch.empty_like(rows))
    thinned = stays.mul_(rows)
    return thinned.div_(probabilities) if rescale else thinned
