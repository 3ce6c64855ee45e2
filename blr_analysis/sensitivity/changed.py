"""The data after a change, and the objective that a model retrained on them would minimise.

F(θ) = Σ_{i kept, added, relabelled} ℓ_i(θ) + ½ θᵀ diag(δ) θ
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.loss import loss_and_gradient
from blr_analysis.backprop.products import Curvature
from blr_analysis.errors import DataError, InputError
from blr_analysis.posterior.prior import Prior
from blr_analysis.posterior.structures import Tree
from blr_analysis.sensitivity.curvature import Operator
from blr_analysis.sensitivity.shares import as_target
from blr_analysis.task import Task


class Relabelled(Task):
    """Some examples of a task with other targets, in the order given."""

    def __init__(self, task: Task, labels: Mapping[int, Any]) -> None:
        chosen = list(labels)
        part = task.subset(chosen)
        super().__init__(
            task.model,
            part.examples,
            likelihood=task.likelihood,
            forward=task.forward,
            batch_size=task.batch_size,
            device=task.device,
        )
        try:
            self._labels = torch.stack([as_target(labels[i]) for i in chosen])
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"relabel must map indices to targets: {error}") from error

    def run(
        self, batch: Any, params: Mapping[str, Tensor], indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outputs at these parameters, and the new targets, checked."""
        if indices is None:
            raise InputError("relabelled examples are known by their indices; pass them to run")
        outputs, _ = super().run(batch, params, indices)
        targets = self._labels[indices].to(outputs.device)
        return outputs, self.likelihood.prepare_targets(targets, outputs)


@dataclass(frozen=True)
class Changed:
    """What is left, new and relabelled: pairs of a task and the examples of it that count."""

    parts: tuple[tuple[Task, Tensor], ...]
    prior: Prior

    @property
    def n_data(self) -> int:
        return sum(len(indices) for _, indices in self.parts)

    def at(self, params: Tree) -> Point:
        """F and its gradient at these weights: one forward and backward pass over the data.

        Raises:
            ModelError, DataError: as :meth:`Task.run`.
        """
        gradient = self.prior.times(params)
        squares = self.prior.times({n: p.double().square() for n, p in params.items()})
        loss = 0.5 * sum(float(s.sum()) for s in squares.values())
        for task, indices in self.parts:
            slope, part = loss_and_gradient(task, params, indices)
            gradient = {n: g + slope[n] for n, g in gradient.items()}
            loss += part
        return Point(params, loss, gradient)

    def precision(self, params: Tree, *, memory_budget: int | None = None) -> Operator:
        """v ↦ S v at these weights, S = Σ J_iᵀ Λ_i J_i + diag(δ) of the changed data."""
        curvatures = [
            Curvature(task, params, indices=indices, memory_budget=memory_budget)
            for task, indices in self.parts
        ]

        def times(v: Tree) -> Tree:
            found = self.prior.times(v)
            for curvature in curvatures:
                product = curvature.product(v, progress=False)
                found = {n: x + product[n] for n, x in found.items()}
            return found

        return times


@dataclass(frozen=True)
class Point:
    """F at some weights: its value in nats and its gradient."""

    params: Tree
    value: float
    gradient: Tree


def changed(
    task: Task,
    prior: Prior,
    *,
    leaving: Tensor,
    added: Task | None = None,
    labels: Mapping[int, Any] | None = None,
) -> Changed:
    """The data of a task without ``leaving``, with ``added``, with other labels for some."""
    labels = labels or {}
    stays = torch.ones(task.n_data, dtype=torch.bool)
    stays[leaving] = False
    stays[torch.tensor(list(labels), dtype=torch.long)] = False
    parts: list[tuple[Task, Tensor]] = []
    if bool(stays.any()):
        parts.append((task, stays.nonzero().flatten()))
    if added is not None:
        parts.append((added, torch.arange(added.n_data)))
    if labels:
        parts.append((Relabelled(task, labels), torch.arange(len(labels))))
    return Changed(tuple(parts), prior)
