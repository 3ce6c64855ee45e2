"""Merges that pick entries of the steps Δ_t = θ_t − θ_0: where models agree or changed most.

Each takes the steps of all models, stacked ``[T, …]``, and gives the step of the merge, entry by
entry; what it knows of a row or of a whole tensor is said there. Sources:

* :func:`nearswap`: alchemonaut, model card of QuartetAnemoi-70B-t0.0001, 2024;
* :func:`ram`, :func:`ramplus_tl`: Yuan et al., "Behavior knowledge merge in reinforced agentic
  models", 2026;
* :func:`sce`: Wan et al., "FuseChat: knowledge fusion of chat models", 2024;
* :func:`arcee_fusion`: Arcee AI, "Meet mergekit v0.1: Arcee Fusion", 2025;
* :func:`keep_probabilities`: Deep et al., "DELLA-Merging: reducing interference in model merging
  through magnitude-based sampling", 2024;
* :func:`middle`: Davari and Belilovsky, "Model breadcrumbs: scaling multi-task model merging with
  sparse masks", ECCV 2024.

The numbers are mergekit's 0.1.5, by its documented formulas.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

NO_WEIGHT = 1e-8  # no total is divided by a smaller sum of weights
OUTLIER = 1.5  # interquartile ranges above the median


@dataclass(frozen=True)
class Selection:
    """What these merges can be told beside the weights.

    Attributes:
        t: of nearswap, the largest change of an entry.
        epsilon: of RAM, the size from which a step counts as a change.
        select_topk: of SCE, the share of entries that stay.
        r, alpha: of RAM+, how much a task's own entries grow by its overlap, and up to which.
    """

    t: float | None = None
    epsilon: float = 1e-5
    select_topk: float = 1.0
    r: float = 0.1
    alpha: float = 0.2


def nearswap(base: Tensor, steps: Tensor, selection: Selection) -> Tensor:
    """Δ, but no entry further than t: what is near becomes the other model's.

    >>> nearswap(torch.zeros(3), torch.tensor([[0.1, -0.5, 2.0]]), Selection(t=0.2))
    tensor([ 0.1000, -0.2000,  0.2000])
    """
    assert selection.t is not None
    return steps[0].clamp(-selection.t, selection.t)


def ram(base: Tensor, steps: Tensor, selection: Selection) -> Tensor:
    """The mean over the models that changed an entry by more than ε; where one did, its own step.

    >>> steps = torch.tensor([[0.4, 0.4, 0.0], [0.2, 0.0, 0.0]])
    >>> ram(torch.zeros(3), steps, Selection())
    tensor([0.3000, 0.4000, 0.0000])
    """
    is_changed = (steps.abs() > selection.epsilon).to(steps)
    return (steps * is_changed).sum(0) / is_changed.sum(0).clamp_min(1)


def ramplus_tl(base: Tensor, steps: Tensor, selection: Selection) -> Tensor:
    """:func:`ram`, where an entry that one model alone changed is multiplied by 1 + r min(ρ, α).

    ρ is that model's number of entries that others changed too, by the number of its own, tensor by
    tensor: the more of a task is averaged away, the more its own entries grow.
    """
    is_changed = (steps.abs() > selection.epsilon).to(steps)
    count = is_changed.sum(0)
    is_own = is_changed * (count == 1)
    is_shared = is_changed * (count > 1)
    own_entries = is_own.reshape(len(steps), -1).sum(1).clamp_min(1)
    overlap = is_shared.reshape(len(steps), -1).sum(1) / own_entries
    growth = 1 + selection.r * overlap.clamp_max(selection.alpha)
    growth = growth.view(-1, *[1] * base.ndim)
    shared = (steps * is_shared).sum(0) / count.clamp_min(1)
    return shared + (steps * is_own * growth).sum(0)


def sce(base: Tensor, steps: Tensor, selection: Selection) -> Tensor:
    """Select, calculate, erase: the entries that vary most over the models, averaged by energy.

    Of a tensor, the ``select_topk`` share of entries with the largest variance over the models
    stays. A model's weight is the sum of its squares there; only steps of the sign that their sum
    has are averaged.
    """
    if selection.select_topk < 1:
        variance = steps.var(0, unbiased=False)
        count = max(1, int(selection.select_topk * variance.numel()))
        smallest = variance.flatten().topk(count).values[-1]
        steps = steps * (variance >= smallest)
    energy = steps.square().reshape(len(steps), -1).sum(1)
    weights = energy / energy.sum().clamp_min(torch.finfo(steps.dtype).tiny)
    weights = weights.view(-1, *[1] * base.ndim)
    sign = torch.where(steps.sum(0) >= 0, 1.0, -1.0)
    shares = weights * (steps * sign > 0)
    total = shares.sum(0)
    return (shares * steps).sum(0) / torch.where(total.abs() < NO_WEIGHT, 1.0, total)


def arcee_fusion(base: Tensor, steps: Tensor, selection: Selection) -> Tensor:
    """Δ where it matters most: |Δ| times the row's divergence is an outlier within the tensor.

    The divergence is that of softmax(θ_1) from softmax(θ_0) along the last axis, and an outlier is
    at least the median and 1.5 interquartile ranges.
    """
    step = steps[0]
    log_base = torch.log_softmax(base.double(), -1)  # float32 rounds small divergences away
    log_model = torch.log_softmax((base + step).double(), -1)
    divergence = (log_model.exp() * (log_model - log_base)).sum(-1, keepdim=True)
    importance = step.abs() * divergence
    first, median, third = _quartiles(importance)
    return step * (importance >= median + OUTLIER * (third - first))


def _quartiles(values: Tensor) -> list[Tensor]:
    """The values below which a quarter, half and three quarters lie, without interpolation."""
    ordered = values.flatten().sort().values
    return [ordered[int(share * (len(ordered) - 1))] for share in (0.25, 0.5, 0.75)]


def keep_probabilities(rows: Tensor, density: float, epsilon: float) -> Tensor:
    """DELLA: density − ε for the smallest entry of a row to density + ε for the largest, evenly.

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
    """Rows whose entries stay with :func:`keep_probabilities`; these are divided by them.

    The draws of a row depend on the key and the number of the row alone.
    """
    probabilities = keep_probabilities(rows, density, epsilon)
    draws = torch.stack(
        [_draws(f"{key}\0{first_row + row}", rows.shape[1]) for row in range(len(rows))]
    )
    thinned = rows * (draws.to(rows) < probabilities)
    return thinned / probabilities if rescale else thinned


def _draws(key: str, count: int) -> Tensor:
    """Uniform numbers of a row."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def middle(step: Tensor, density: float, gamma: float) -> Tensor:
    """Breadcrumbs: without the γ share of largest entries, and without the smallest, so that the
    ``density`` share stays.

    Where that cannot be, fewer of the largest go.

    >>> middle(torch.tensor([4.0, -3.0, 2.0, 1.0]), 0.5, 0.25)
    tensor([ 0., -3.,  2.,  0.])
    """
    count = step.numel()
    middle_count = int(density * count)
    largest_count = min(int(gamma * count), count - middle_count)
    order = step.abs().flatten().argsort(descending=True, stable=True)
    stays = torch.zeros(count, dtype=step.dtype)
    stays[order[largest_count : largest_count + middle_count]] = 1
    return step * stays.view_as(step)
