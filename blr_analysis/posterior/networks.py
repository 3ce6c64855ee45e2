"""The networks whose answers a prediction averages: one for each draw θ_s of the weights.

    at the draw    f_θₛ(x)                        where the training drew its weights, as IVON's
    linearised     f_m(x) + √τ J(x) (θ_s − m)     where the precision is a curvature at the mean m

A curvature is that of the network made linear in its weights at m. Directions that the data leave
open have draws far from m. There the network itself predicts badly, and the linear one as at m
(Immer, Korzepa & Bauer, "Improving predictions of Bayesian neural nets via local linearization",
AISTATS 2021). τ is the temperature. J (θ_s − m) is a difference quotient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from blr_analysis.half import narrow
from blr_analysis.task import Task

NUMBERS_LIMIT = 2**27  # outputs at the mean that are stored between draws; 512 MiB in float32
Answer = tuple[Tensor, Tensor | None]  # outputs and targets of a batch


class Network(Protocol):
    """What answers for one draw of the weights."""

    def predicted(self, task: Task, indices: Tensor) -> Answer:
        """Outputs and targets of these examples, as :meth:`Task.predicted` gives them."""
        ...


class NetworkAt:
    """The network at some weights.

    Args:
        params: weights and buffers by name.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.params = params

    def predicted(self, task: Task, indices: Tensor) -> Answer:
        return task.predicted(task.fetch(indices), self.params, indices)


class NetworkAtMean(NetworkAt):
    """The network at a posterior's mean; it stores its answers for the draws that follow."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        super().__init__(params)
        self._answers: dict[int, Answer] = {}  # by the first example of the batch
        self._n_numbers = 0  # that are stored

    def predicted(self, task: Task, indices: Tensor) -> Answer:
        first = int(indices[0])
        if first in self._answers:
            return self._answers[first]
        answer = super().predicted(task, indices)
        self._n_numbers += answer[0].numel()
        if self._n_numbers <= NUMBERS_LIMIT:
            self._answers[first] = answer
        return answer


class LinearisedNetwork:
    """The network that is linear in its weights around the mean, at one draw.

    Args:
        at_mean: the network at m.
        near: the network at m + ε (θ_s − m).
        factor: √τ / ε.
    """

    def __init__(self, at_mean: Network, near: Network, factor: float) -> None:
        self._at_mean = at_mean
        self._near = near
        self._factor = factor

    def predicted(self, task: Task, indices: Tensor) -> Answer:
        outputs, targets = self._at_mean.predicted(task, indices)
        outputs_near, _ = self._near.predicted(task, indices)
        step = self._factor * (outputs_near - outputs)
        moved = task.likelihood.moved(outputs, step)
        if targets is not None:
            task.likelihood.check_moved(moved, targets)
        return moved, targets


def linearised(
    at_mean: NetworkAtMean,
    mean: Mapping[str, Tensor],
    draw: Mapping[str, Tensor],
    temperature: float,
) -> LinearisedNetwork:
    """The linearised network at one draw of the weights; buffers are those at the mean."""
    near, step = near_mean(mean, draw)
    network_near = NetworkAt({**at_mean.params, **near})
    return LinearisedNetwork(at_mean, network_near, temperature**0.5 / step)


def near_mean(
    mean: Mapping[str, Tensor], draw: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], float]:
    """The weights m + ε (θ_s − m) of a difference quotient, and its ε.

    ε is the cube root of the weights' rounding. For a draw that is farther from the mean than the
    mean is from 0, it is shorter in proportion. A longer step meets the network's curvature, a
    shorter one the rounding of its outputs.

    >>> weights, step = near_mean({"w": torch.ones(2)}, {"w": torch.tensor([101.0, -99.0])})
    >>> weights["w"], round(100 * step, 4)
    (tensor([1.0049, 0.9951]), 0.0049)
    """
    moves = {name: draw[name] - m for name, m in mean.items()}
    rounding = max(torch.finfo(m.dtype).eps for m in narrow(mean).values())
    step = rounding ** (1 / 3)
    size_of_mean = _norm(mean)
    size_of_move = _norm(moves)
    if 0 < size_of_mean < size_of_move:
        step *= size_of_mean / size_of_move
    return {name: m + step * moves[name] for name, m in mean.items()}, step


def _norm(tensors: Mapping[str, Tensor]) -> float:
    """The Euclidean norm of all tensors together."""
    norms = [float(torch.linalg.vector_norm(tensor)) for tensor in tensors.values()]
    return math.hypot(*norms)
