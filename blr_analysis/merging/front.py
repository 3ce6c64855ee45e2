"""A Pareto front before anything is run: what weights α would lose by surrogates of the tasks.

    L_t(θ) ≈ −log Σ_k exp(−L_tk − ½ (θ − θ_tk)ᵀ H_tk (θ − θ_tk))

over the checkpoints k of task t, L_tk the loss of each and H_tk its precision: the mixture of their
Laplace approximations, each with the evidence that it has (whose determinant is that of its
Gaussian). One checkpoint is the quadratic of its posterior, right near it alone; several follow a
loss that is not one, and a front that is curved otherwise than theirs. A merge minimises
Σ_t α_t L_t, by EM: merged under the weights α_t ρ_tk, with ρ_tk the share of component k there.

Source: Monzón et al., "How to weight multitask finetuning? Fast previews via Bayesian model
merging", 2024.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from blr_analysis.merging.precisions import StoredPrecision

ROUNDS = 30  # of EM
STARTS = 16  # choices of one component for each task that it starts from, at most
SETTLED = 1e-4  # of a share
State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Preview:
    """A merge that was not run: the weights of all components, and L_t by task."""

    weights: tuple[float, ...]
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Surrogates:
    """The tasks' losses, by components in the order of their tasks.

    Attributes:
        states: θ_tk.
        held: H_tk.
        tasks: t of each.
        own: L_tk, sums over the examples that H_tk is of; one that all have may be left out.
    """

    states: Sequence[State]
    held: Sequence[StoredPrecision]
    tasks: Sequence[int]
    own: Sequence[float]

    @property
    def mixed(self) -> bool:
        """Whether a task has several components."""
        return len(set(self.tasks)) < len(self.tasks)

    def preview(self, make: Callable[[list[float]], State], alphas: Sequence[float]) -> Preview:
        """The merge under α, ``make`` from the weights of all components, and what it loses."""
        found: list[Preview] = []
        for start in self.starts:
            shares, apart = start, math.inf
            for _ in range(ROUNDS):
                weights = [alphas[t] * float(s) for t, s in zip(self.tasks, shares, strict=True)]
                new, losses = self._at(make(weights))
                found.append(Preview(tuple(weights), tuple(losses.tolist())))
                apart, shares = float((new - shares).abs().max()), new
                if apart < SETTLED:
                    break

        def weighted(preview: Preview) -> float:
            return sum(a * loss for a, loss in zip(alphas, preview.losses, strict=True))

        return min(found, key=weighted)

    def _at(self, state: State) -> tuple[Tensor, Tensor]:
        """ρ of every component, and L of every task."""
        triples = zip(self.own, self.held, self.states, strict=True)
        rises = torch.tensor([own + h.gap(state, s) for own, h, s in triples], dtype=torch.float64)
        tasks = torch.tensor(self.tasks)
        losses = torch.stack([-torch.logsumexp(-rises[tasks == t], 0) for t in tasks.unique()])
        return (losses[tasks] - rises).exp(), losses

    @cached_property
    def starts(self) -> list[Tensor]:
        """ρ alike within each task; and all of one component each, while those are few."""
        tasks = torch.tensor(self.tasks)
        counts = tasks.bincount()
        found = [(1 / counts[tasks]).double()]
        if self.mixed and math.prod(counts.tolist()) <= STARTS:
            places = [(tasks == t).nonzero().flatten().tolist() for t in range(len(counts))]
            for chosen in itertools.product(*places):
                found.append(torch.zeros(len(tasks), dtype=torch.float64))
                found[-1][list(chosen)] = 1.0
        return found


def undominated(losses: Tensor) -> list[int]:
    """The rows of ``[n, T]`` that no other row is below in one column and nowhere above.

    >>> undominated(torch.tensor([[1.0, 3.0], [2.0, 2.0], [2.0, 3.0], [1.0, 3.0]]))
    [0, 1]
    """
    kept: list[int] = []
    for k, row in enumerate(losses):
        below = (losses <= row).all(1) & (losses < row).any(1)
        twin = any(torch.equal(losses[j], row) for j in kept)
        if not twin and not bool(below.any()):
            kept.append(k)
    return kept


def far_apart(losses: Tensor, budget: int) -> list[int]:
    """Of the undominated rows, the middle one and then whatever is farthest from all that are
    taken, on axes from the least loss of each task."""
    kept = undominated(losses)
    rises = losses - losses.amin(0)
    places = (rises / rises.amax(0).clamp_min(1e-300))[kept].sqrt()
    chosen = [int(places.square().sum(1).argmin())]
    while len(chosen) < min(budget, len(kept)):
        apart = torch.cdist(places, places[chosen]).amin(1)
        chosen.append(int(apart.argmax()))
    return [kept[k] for k in sorted(chosen)]
