"""Which examples are there twice: whose predictions move together, however the weights move.

    δf_i = J_i (θ_s − m),  θ_s ~ q, s = 1 … S;    corr(i, j) = ⟨δf_i, δf_j⟩ / ‖δf_i‖ ‖δf_j‖

For many samples that is tr(J_i Σ J_jᵀ) scaled to 1 for an example with itself: likeness as the
model sees it, for any kind of input, where pixels have a distance and sentences have none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from blr_analysis.backprop.engine import predict
from blr_analysis.errors import InputError
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.progress import track
from blr_analysis.task import Task

STEP = 0.05  # of a posterior standard deviation: δf by a difference, close to linear
WIDTH = 512  # numbers by which an example is known, at most
NEIGHBOURS = 10
BLOCK = 2**23  # numbers of the matrix of pairs that are held at a time


def twins(
    task: Task, q: Posterior, *, samples: int, seed: int = 0, progress: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Closeness and index of every example's nearest other, ``[N]`` each.

    Closeness 1 − d_nearest / d_10th (the farthest where there are fewer) is 1 for copies and
    0 where the nearest is no nearer than the tenth. Examples that do not move at all have 0.
    """
    if task.n_data < 3:
        raise InputError(
            f"twins are looked for among 3 examples or more, got {task.n_data}; pass "
            "duplicates=False"
        )
    moves = F.normalize(responses(task, q, samples=samples, seed=seed, progress=progress), dim=1)
    return nearest(moves, progress=progress)


def responses(
    task: Task, q: Posterior, *, samples: int, seed: int = 0, progress: bool | None = None
) -> Tensor:
    """δf_i of every example, ``[N, S·C]``; with many outputs random mixtures of them."""
    generator = torch.Generator().manual_seed(seed)
    before, _ = predict(task, q.mean, progress=False)
    c = before.shape[1]
    kept = max(1, min(c, WIDTH // samples))
    parts = []
    for _ in track(range(samples), total=samples, label="twins", show=progress):
        drawn = q.sample(generator=generator)
        near = {name: m + STEP * (drawn[name] - m) for name, m in q.mean.items()}
        moved = (predict(task, near, progress=False)[0] - before) / STEP
        if kept < c:
            mix = torch.randn(c, kept, generator=generator, dtype=torch.float64)
            moved = moved @ mix.to(moved.dtype)
        parts.append(moved)
    return torch.cat(parts, 1)


def nearest(unit: Tensor, *, progress: bool | None = None) -> tuple[Tensor, Tensor]:
    """Closeness and nearest other row of unit vectors ``[N, D]``."""
    n = len(unit)
    size = max(1, BLOCK // n)
    k = min(NEIGHBOURS, n - 1)
    closeness, twin = torch.empty(n, dtype=unit.dtype), torch.empty(n, dtype=torch.long)
    starts = range(0, n, size)
    for start in track(starts, total=len(starts), label="pairs", show=progress):
        rows = torch.arange(start, min(start + size, n))
        likeness = unit[rows] @ unit.T
        likeness[rows - start, rows] = -torch.inf
        top, index = likeness.topk(k, dim=1)
        gap = (2 - 2 * top).clamp_min(0).sqrt()
        # what rounding leaves between two copies counts as nothing
        gap[gap < 4 * torch.finfo(unit.dtype).eps ** 0.5] = 0
        far = gap[:, -1]
        found = torch.where(far > 0, 1 - gap[:, 0] / far, (gap[:, 0] == 0).to(unit.dtype))
        still = torch.linalg.vector_norm(unit[rows], dim=1) == 0
        closeness[rows], twin[rows] = torch.where(still, 0, found), index[:, 0]
    return closeness, twin
