"""Which examples are duplicates, judged by the model?

    closeness   1 − d_i,nearest / d_i,10th,    d_ij² = 2 − 2 corr(δf_i, δf_j)
                δf_i = J_i (θ_s − m),  θ_s ~ q,  s = 1 … S

The response δf_i is how the outputs of example i move when the weights are drawn from the
posterior. Two copies of an example always move together. With many draws corr is tr(J_i Σ J_jᵀ),
scaled so that an example has 1 with itself. This likeness exists for every kind of input, also for
sentences, which have no distance of their own. For sequences δf_i is the change of the loss, one
number for each θ_s.

A twin must be nearer than chance would put it. Around an example in a cloud of local dimension m,
the log spacings of its neighbours' distances, k log(d_k+1 / d_k), are independent and exponential
with mean 1/m (Rényi, 1953; Levina & Bickel, 2004). m cancels in

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

SEED_OFFSET = 73_019  # the user's seed alone may be the one that drew their data
STEP = 0.05  # of a draw's distance from the mean; so short that outputs change almost linearly
RESPONSE_NUMBERS = 512  # at most, of an example's response
CLOSENESS_NEIGHBOUR = 10  # closeness compares the nearest neighbour with this one
NEIGHBOURS = 33  # their distances show how far apart examples are in this part of the data
MOST_COPIES = 4  # of an example; so many neighbours may stand out together
FALSE_TWINS = 0.01  # probability of any false twin in data without twins
BLOCK = 2**23  # numbers of the matrix of pairs that are held at a time
NEAR = 1 - 1e-3  # a correlation above which 2 − 2 corr is mostly rounding error
ROUNDING_MARGIN = 4  # times the expected rounding error of a response


def responses_of(
    task: Task, posterior: Posterior, *, samples: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """The responses δf_i of all examples (of sequences: δℓ_i), and their rounding errors.

    Returns:
        δf ``[N, S·C]``, or random mixtures of the outputs where C is large; and the distance,
        relative to ‖δf_i‖, that rounding leaves between two copies ``[N]``.
    """
    generator = torch.Generator().manual_seed(seed + SEED_OFFSET)
    before = _outputs_or_losses(task, posterior.mean)
    n_outputs = before.shape[1]
    n_mixtures = max(1, min(n_outputs, RESPONSE_NUMBERS // samples))
    columns = []
    for _ in track(range(samples), total=samples, label="twins", show=task.progress):
        draw = posterior.sample(generator=generator)
        near = {name: m + STEP * (draw[name] - m) for name, m in posterior.mean.items()}
        response = (_outputs_or_losses(task, near) - before) / STEP
        if n_mixtures < n_outputs:
            mixture = torch.randn(n_outputs, n_mixtures, generator=generator, dtype=torch.float64)
            response = response @ mixture.to(response.dtype)
        columns.append(response)
    responses = torch.cat(columns, 1)
    dtype = torch.finfo(before.dtype)
    rounding_of_one_draw = dtype.eps * before.norm(dim=1) / STEP
    rounding = rounding_of_one_draw * (samples * n_mixtures / n_outputs) ** 0.5
    sizes = responses.norm(dim=1).clamp_min(dtype.tiny)
    return responses, ROUNDING_MARGIN * rounding / sizes


def _outputs_or_losses(task: Task, params: Mapping[str, Tensor]) -> Tensor:
    """The numbers that are compared: the outputs ``[N, C]``, of sequences the losses ``[N, 1]``."""
    if task.likelihood.is_sequence:
        return evaluated(task, params)[0].losses.unsqueeze(1)
    return predict(task, params)[0]


def nearest(
    responses: Tensor, rounding: Tensor, *, progress: bool | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Closeness, the nearest other example, and whether chance fails to explain it, ``[N]`` each.

    Closeness is 1 for copies, and 0 where the nearest neighbour is no nearer than the tenth (with
    fewer neighbours: the last). It is 0 for an example whose outputs do not move.

    Args:
        responses: ``[N, D]``.
        rounding: relative distances that count as 0, ``[N]``.
        progress: whether to show a bar.
    """
    directions = F.normalize(responses, dim=1)
    n_examples = len(directions)
    closeness = torch.empty(n_examples, dtype=directions.dtype)
    twin = torch.empty(n_examples, dtype=torch.long)
    stands_out = torch.zeros(n_examples, dtype=torch.bool)
    blocks = torch.arange(n_examples).split(max(1, BLOCK // n_examples))
    for rows in track(blocks, total=len(blocks), label="pairs", show=progress):
        distances, neighbours = _neighbours(directions, rows)
        distances[distances < rounding[rows, None]] = 0
        distances, order = distances.sort(1)
        nearest_distance = distances[:, 0]
        closeness[rows] = _closeness(directions[rows], distances)
        twin[rows] = neighbours.gather(1, order[:, :1])[:, 0]
        is_copy = nearest_distance == 0
        is_no_chance = chance_of_spacing(distances) < FALSE_TWINS / n_examples
        stands_out[rows] = is_copy | is_no_chance
    return closeness, twin, stands_out


def _closeness(directions: Tensor, distances: Tensor) -> Tensor:
    """1 − d_nearest / d_10th ``[B]`` of directions ``[B, D]`` with sorted distances ``[B, K]``."""
    place = min(CLOSENESS_NEIGHBOUR, distances.shape[1]) - 1
    nearest_distance = distances[:, 0]
    reference = distances[:, place]
    are_all_copies = (nearest_distance == 0).to(directions.dtype)
    closeness = torch.where(reference > 0, 1 - nearest_distance / reference, are_all_copies)
    moves = torch.linalg.vector_norm(directions, dim=1) > 0
    return torch.where(moves, closeness, 0)


def _neighbours(directions: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Distances of these rows to their K nearest other rows, and which these are, ``[B, K]``."""
    correlations = directions[rows] @ directions.T
    correlations[torch.arange(len(rows)), rows] = -torch.inf
    n_neighbours = min(NEIGHBOURS, len(directions) - 1)
    largest, neighbours = correlations.topk(n_neighbours, dim=1)
    distances = (2 - 2 * largest).clamp_min(0).sqrt()
    for near_pairs in (largest > NEAR).nonzero().split(BLOCK // directions.shape[1]):
        i, j = near_pairs.unbind(1)
        differences = directions[rows[i]] - directions[neighbours[i, j]]
        distances[i, j] = torch.linalg.vector_norm(differences, dim=1)
    return distances, neighbours


def chance_of_spacing(distances: Tensor) -> Tensor:
    """The probability that chance alone lets the nearest neighbours stand out as they do, ``[B]``.

    It is the smallest probability of the first few spacings, times their number.

    Args:
        distances: sorted distances ``[B, K]``.
    """
    tiny = torch.finfo(torch.float64).tiny
    log_distances = distances.double().clamp_min(tiny).log()
    spacings = log_distances.diff(dim=1) * torch.arange(1, distances.shape[1])
    smallest = torch.ones(len(distances), dtype=torch.float64)
    n_trials = min(MOST_COPIES, spacings.shape[1] - 1)
    for k in range(n_trials):
        farther = spacings[:, k + 1 :]
        ratio = spacings[:, k] / farther.sum(1).clamp_min(tiny)
        probability = (1 + ratio) ** -float(farther.shape[1])
        smallest = torch.minimum(smallest, probability)
    return n_trials * smallest
