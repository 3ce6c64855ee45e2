"""TIES-merging, for comparison: trim, elect a sign, average those that agree."""

from __future__ import annotations

import torch
from torch import Tensor

Weights = dict[str, Tensor]


@torch.no_grad()
def ties_step(base: Weights, models: list[Weights], *, kept: float = 0.2) -> Weights:
    """The mean, entry by entry, of the task vectors that point the elected way.

    Of every task vector θ_t − θ_0 the ``kept`` part of its entries that are largest in size stays,
    counted over all tensors together; the others become 0. The elected sign of an entry is that of
    the sum of what stays, and the mean is over the task vectors that have this sign there. The
    merge is θ_0 + λ times this step.

    Source: Yadav et al., "TIES-Merging: Resolving Interference When Merging Models", NeurIPS 2023,
    Algorithm 1 (kept 20 %, λ = 1).
    """
    trimmed = [_trimmed({n: m[n] - base[n] for n in base}, kept) for m in models]
    step = {}
    for name in base:
        stack = torch.stack([t[name] for t in trimmed])
        agrees = (stack.sign() == stack.sum(0).sign()) & (stack != 0)
        step[name] = (stack * agrees).sum(0) / agrees.sum(0).clamp_min(1)
    return step


def _trimmed(step: Weights, kept: float) -> Weights:
    sizes = torch.cat([t.abs().flatten() for t in step.values()])
    count = max(1, round(kept * len(sizes)))
    limit = sizes.kthvalue(len(sizes) - count + 1).values
    return {n: torch.where(t.abs() >= limit, t, 0.0) for n, t in step.items()}
