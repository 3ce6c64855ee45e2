"""Merges that pick entries of the steps Δ_t = θ_t − θ_0: where models agree or changed most.

Each function takes the steps of all models, stacked ``[T, …]``, and returns the step of the merge.
It works entry by entry; some also look at rows or at the whole tensor. Sources:

* :func:`nearswap`: alchemonaut, model card of QuartetAnemoi-70B-t0.0001, 2024;
* :func:`ram`, :func:`ramplus_tl`: Yuan et al., "Behavior knowledge merge in reinforced agentic
  models", 2026;
* :func:`sce`: Wan et al., "FuseChat: knowledge fusion of chat models", 2024;
* :func:`arcee_fusion`: Arcee AI, "Meet mergekit v0.1: Arcee Fusion", 2025;
* :func:`keep_probabilities`: Deep et al., "DELLA-Merging: reducing interference in model merging
  through magnitude-based sampling", 2024;
* :func:`middle`: Davari and Belilovsky, "Model breadcrumbs: scaling multi-task model merging with
  sparse masks", ECCV 2024.

The formulas are those that mergekit documents. Results agree with mergekit 0.1.5 but for
:func:`arcee_fusion`, where it rounds and samples.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

NO_WEIGHT = 1e-8  # no total is divided by a smaller sum of weights
OUTLIER = 1.5  # an outlier is so many interquartile ranges above the median


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


def nearswap(base: Tensor, steps: Tensor, selection: Selection) -> Tensor:
    """Δ, cut to [−t, t]: entries that are near become the other model's.

    >>> nearswap(torch.zeros(3), torch.tensor([[0.1, -0.5, 2.0]]), Selection(t=0.2))
    tensor([ 0.1000, -0.2000,  0.2000])
    """
    assert selection.t is not None
    return steps[0].clamp(-selection.t, selection.t)


def ram(base: Tensor, steps: Tensor, selection: Selection) -> Tensor:
    """The mean of the steps that are larger than ε, entry by entry; 0 where there are none.

    >>> steps = torch.tensor([[0.4, 0.4, 0.0], [0.2, 0.0, 0.0]])
    >>> ram(torch.zeros(3), steps, Selection())
    tensor([0.3000, 0.4000, 0.0000])
    """
    is_changed = (steps.abs() > selection.epsilon).to(steps)
    n_changed = is_changed.sum(0)
    total = (steps * is_changed).sum(0)
    return total / n_changed.clamp_min(1)


def ramplus_tl(base: Tensor, steps: Tensor, selection: Selection) -> Tensor:
    """:func:`ram`, but entries that one model alone changed are multiplied by 1 + r min(ρ, α).

    ρ is the overlap of that model in this tensor: the number of its changed entries that other
    models changed too, over the number of those that it alone changed. The more of a task is
    averaged away, the more the rest of it grows.
    """
    n_models = len(steps)
    is_changed = (steps.abs() > selection.epsilon).to(steps)
    n_changed = is_changed.sum(0)
    is_alone = is_changed * (n_changed == 1)
    is_shared = is_changed * (n_changed > 1)
    n_alone = is_alone.reshape(n_models, -1).sum(1)
    n_shared = is_shared.reshape(n_models, -1).sum(1)
    overlap = n_shared / n_alone.clamp_min(1)
    growth = 1 + selection.r * overlap.clamp_max(selection.alpha)
    mean_of_shared = (steps * is_shared).sum(0) / n_changed.clamp_min(1)
    grown = (steps * is_alone * _by_model(growth, base)).sum(0)
    return mean_of_shared + grown


def _by_model(numbers: Tensor, base: Tensor) -> Tensor:
    """A number for each model, ``[T]``, in the shape ``[T, 1, …]`` of stacked steps."""
    return numbers.view(-1, *[1] * base.ndim)


def sce(base: Tensor, steps: Tensor, selection: Selection) -> Tensor:
    """Select, calculate, erase: the entries that vary most over the models, averaged by energy.

    The share ``select_topk`` of a tensor's entries stays, those with the largest variance over the
    models. A model's weight is its energy, the sum of squares of its entries that stay. Only steps
    that have the sign of the steps' sum are averaged.
    """
    if selection.select_topk < 1:
        variance = steps.var(0, unbiased=False)
        count = max(1, int(selection.select_topk * variance.numel()))
        smallest = variance.flatten().topk(count).values[-1]
        steps = steps * (variance >= smallest)
    energy = steps.square().reshape(len(steps), -1).sum(1)
    weights = energy / energy.sum().clamp_min(torch.finfo(steps.dtype).tiny)
    sign = torch.where(steps.sum(0) >= 0, 1.0, -1.0)
    has_sign = steps * sign > 0
    weights_of_entries = _by_model(weights, base) * has_sign
    total = (weights_of_entries * steps).sum(0)
    total_weight = weights_of_entries.sum(0)
    return total / torch.where(total_weight.abs() < NO_WEIGHT, 1.0, total_weight)


def arcee_fusion(base: Tensor, steps: Tensor, selection: Selection) -> Tensor:
    """Δ where its importance is an outlier in the tensor, 0 elsewhere.

    The importance of an entry is |Δ| times the divergence of its row: of softmax(θ_1) from
    softmax(θ_0) along the last axis. An outlier is at least 1.5 interquartile ranges above the
    median.

    The divergence is computed in float64, and the quartiles are those of all entries. Mergekit
    computes in the recipe's dtype: in float32, rounding changes an importance by some 3 %. For the
    quartiles of a tensor of more than a million entries it draws a million at random, so that two
    of its runs differ. Up to 1 % of the entries, those near the threshold, stay in one merge and
    not in the other.
    """
    step = steps[0]
    log_base = torch.log_softmax(base.double(), -1)  # float32 rounds small divergences away
    log_model = torch.log_softmax((base + step).double(), -1)
    divergence = (log_model.exp() * (log_model - log_base)).sum(-1, keepdim=True)
    importance = step.abs() * divergence
    first, median, third = _quartiles(importance)
    threshold = median + OUTLIER * (third - first)
    return step * (importance >= threshold)


def _quartiles(values: Tensor) -> list[Tensor]:
    """The first quartile, the median and the third quartile, each one of the values."""
    ordered = values.flatten().sort().values
    last = len(ordered) - 1
    return [ordered[int(share * last)] for share in (0.25, 0.5, 0.75)]


def keep_probabilities(rows: Tensor, density: float, epsilon: float) -> Tensor:
    """DELLA's probabilities that entries stay, by the rank of their size in their row.

    They rise in equal steps from density − ε for the smallest entry to density + ε for the largest.

    >>> keep_probabilities(torch.tensor([[0.0, -3.0, 1.0]]), 0.5, 0.2)
    tensor([[0.3000, 0.7000, 0.5000]])
    """
    length = rows.shape[1]
    if length == 1:
        return torch.full_like(rows, density)
    ranks = rows.abs().argsort(dim=1, stable=True).argsort(dim=1, stable=True)
    return (density - epsilon) + 2 * epsilon * ranks.to(rows) / (length - 1)


def drop_by_size(
    rows: Tensor, density: float, epsilon: float, *, rescale: bool, key: str, first_row: int
) -> Tensor:
    """Rows whose entries stay with :func:`keep_probabilities`; the others become 0.

    Args:
        rescale: whether entries that stay are divided by their probability.
        key: seeds the draws, together with the number of the row alone.
        first_row: the number of the first of the rows.
    """
    n_rows, length = rows.shape
    probabilities = keep_probabilities(rows, density, epsilon)
    draws = torch.stack([_draws(f"{key}\0{first_row + row}", length) for row in range(n_rows)])
    thinned = rows * (draws.to(rows) < probabilities)
    return thinned / probabilities if rescale else thinned


def _draws(key: str, count: int) -> Tensor:
    """``count`` numbers from 0 to 1 that depend on the key alone."""
    digest = hashlib.sha256(key.encode()).digest()
    seed = int.from_bytes(digest[:8], "big") >> 1  # 63 bits, as torch takes them
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def middle(step: Tensor, density: float, gamma: float) -> Tensor:
    """Breadcrumbs: the share ``density`` of entries stays, those of middle size.

    The share γ of largest entries becomes 0, and so do the smallest. Where too few would stay,
    fewer of the largest become 0.

    >>> middle(torch.tensor([4.0, -3.0, 2.0, 1.0]), 0.5, 0.25)
    tensor([ 0., -3.,  2.,  0.])
    """
    n_entries = step.numel()
    n_middle = int(density * n_entries)
    n_largest = min(int(gamma * n_entries), n_entries - n_middle)
    largest_first = step.abs().flatten().argsort(descending=True, stable=True)
    mask = torch.zeros(n_entries, dtype=step.dtype)
    mask[largest_first[n_largest : n_largest + n_middle]] = 1
    return step * mask.view_as(step)
