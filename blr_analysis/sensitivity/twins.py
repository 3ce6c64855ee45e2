"""Which examples are there twice, as the model sees them?

    closeness   1 − d_i,nearest / d_i,10th,    d_ij² = 2 − 2 corr(δf_i, δf_j)
                δf_i = J_i (θ_s − m),  θ_s ~ q,  s = 1 … S

δf_i is how example i's outputs move when the weights move as the posterior lets them: the
predictions of two copies always move together. For many samples corr is tr(J_i Σ J_jᵀ) scaled to 1
for an example with itself: likeness as the model sees it, for any kind of input, where pixels have
a distance and sentences have none. Of sequences δf_i is the change of the loss, one number for each
θ_s.

A twin must be nearer than chance has it. Around an example of a cloud of any local dimension m the
log spacings of its neighbours' distances, k log(d_k+1 / d_k), are independent and exponential with
mean 1/m (Rényi, 1953; Levina & Bickel, 2004), so that m cancels in

    P(spacing k > t · mean of the n farther ones) = (1 + t/n)⁻ⁿ
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from blr_analysis.backprop.engine import predict
from blr_analysis.backprop.loss import evaluated
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.progress import track
from blr_analysis.task import Task

SEED_OFFSET = 73_019  # added to the user's, which their data may have been drawn from
STEP = 0.05  # of a posterior standard deviation: δf by a difference, close to linear
WIDTH = 512  # numbers by which an example is known, at most
NEIGHBOURS = 10
AROUND = 33  # neighbours that tell how far apart examples are here
ALIKE = 4  # copies of an example, at most, that must stand out from its other neighbours
CHANCE = 0.01  # of a false twin anywhere in the data, where nearness is chance
BLOCK = 2**23  # numbers of the matrix of pairs that are held at a time
NEAR = 1 - 1e-3  # a correlation above which 2 − 2 corr is all rounding


def responses_of(
    task: Task, posterior: Posterior, *, samples: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """δf_i of every example, ``[N, S·C]``, with many outputs random mixtures of them, of sequences
    δℓ_i; and the distance, relative to ‖δf_i‖, that rounding leaves between two copies, ``[N]``."""
    generator = torch.Generator().manual_seed(seed + SEED_OFFSET)
    before = _observed(task, posterior.mean)
    n_outputs = before.shape[1]
    width = max(1, min(n_outputs, WIDTH // samples))
    columns = []
    for _ in track(range(samples), total=samples, label="twins", show=task.progress):
        draw = posterior.sample(generator=generator)
        near = {name: m + STEP * (draw[name] - m) for name, m in posterior.mean.items()}
        response = (_observed(task, near) - before) / STEP
        if width < n_outputs:
            mixture = torch.randn(n_outputs, width, generator=generator, dtype=torch.float64)
            response = response @ mixture.to(response.dtype)
        columns.append(response)
    responses = torch.cat(columns, 1)
    precision = torch.finfo(before.dtype)
    rounding = precision.eps * before.norm(dim=1) * (samples * width / n_outputs) ** 0.5 / STEP
    return responses, 4 * rounding / responses.norm(dim=1).clamp_min(precision.tiny)


def _observed(task: Task, params: Mapping[str, Tensor]) -> Tensor:
    """What is compared: the outputs ``[N, C]``, of sequences the losses ``[N, 1]``."""
    if task.likelihood.is_sequence:
        return evaluated(task, params)[0].losses.unsqueeze(1)
    return predict(task, params)[0]


def nearest(
    responses: Tensor, rounding: Tensor, *, progress: bool | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Closeness, nearest other row, and whether chance fails to explain it, ``[N]`` each.

    Closeness is 1 for copies and 0 where the nearest is no nearer than the tenth (the farthest
    where there are fewer). Examples that do not move at all have 0.

    Args:
        responses: ``[N, D]``.
        rounding: relative distances below it count as nothing, ``[N]``.
    """
    unit = F.normalize(responses, dim=1)
    n = len(unit)
    size = max(1, BLOCK // n)
    closeness = torch.empty(n, dtype=unit.dtype)
    twin = torch.empty(n, dtype=torch.long)
    stands_out = torch.zeros(n, dtype=torch.bool)
    starts = range(0, n, size)
    for start in track(starts, total=len(starts), label="pairs", show=progress):
        rows = torch.arange(start, min(start + size, n))
        distance, neighbour = _neighbours(unit, rows)
        distance[distance < rounding[rows, None]] = 0
        distance, order = distance.sort(1)
        first = distance[:, 0]
        tenth = distance[:, min(NEIGHBOURS, distance.shape[1]) - 1]
        close = torch.where(tenth > 0, 1 - first / tenth, (first == 0).to(unit.dtype))
        moves = torch.linalg.vector_norm(unit[rows], dim=1) > 0
        closeness[rows] = torch.where(moves, close, 0)
        twin[rows] = neighbour.gather(1, order[:, :1])[:, 0]
        stands_out[rows] = (first == 0) | (by_chance(distance) < CHANCE / n)
    return closeness, twin, stands_out


def _neighbours(unit: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Distances to the nearest other rows and which they are, ``[B, K]`` each."""
    likeness = unit[rows] @ unit.T
    likeness[torch.arange(len(rows)), rows] = -torch.inf
    top, index = likeness.topk(min(AROUND, len(unit) - 1), dim=1)
    distance = (2 - 2 * top).clamp_min(0).sqrt()
    for near in (top > NEAR).nonzero().split(BLOCK // unit.shape[1]):
        i, j = near.unbind(1)
        difference = unit[rows[i]] - unit[index[i, j]]
        distance[i, j] = torch.linalg.vector_norm(difference, dim=1)
    return distance, index


def by_chance(distance: Tensor) -> Tensor:
    """How likely nearest neighbours would stand out so by chance, from sorted distances
    ``[B, K]``: the least of the probabilities for the first few spacings, times their number."""
    tiny = torch.finfo(torch.float64).tiny
    logs = distance.double().clamp_min(tiny).log()
    spacing = logs.diff(dim=1) * torch.arange(1, distance.shape[1])
    least = torch.ones(len(distance), dtype=torch.float64)
    trials = min(ALIKE, spacing.shape[1] - 1)
    for k in range(trials):
        farther = spacing[:, k + 1 :]
        ratio = spacing[:, k] / farther.sum(1).clamp_min(tiny)
        least = torch.minimum(least, (1 + ratio) ** -float(farther.shape[1]))
    return trials * least
