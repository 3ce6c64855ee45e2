"""How well a task's model does at given weights: loss, accuracy, gradient of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.backprop.record import fetched
from blr_analysis.backprop.truth import not_differentiable
from blr_analysis.errors import ModelError
from blr_analysis.likelihoods import Likelihood
from blr_analysis.progress import track
from blr_analysis.task import Task


@dataclass(frozen=True)
class Measured:
    """Σ_i ℓ_i in nats, and the fraction of examples (of sequences: tokens) that are right."""

    loss: float
    n_data: int
    accuracy: float | None

    @property
    def nll(self) -> float:
        """The mean loss, in nats per example."""
        return self.loss / self.n_data


def measured(task: Task, params: Mapping[str, Tensor], *, progress: bool | None = None) -> Measured:
    """Loss and accuracy of a whole task at these parameters, batch by batch.

    Raises:
        ModelError, DataError: as :meth:`Task.run`.
    """
    tally, order = _Tally(task.likelihood), torch.arange(task.n_data).split(task.batch_size)
    with torch.no_grad(), task.evaluation():
        for indices in track(order, total=len(order), label="losses", show=progress):
            tally.add(*task.run(task.fetch(indices), params, indices))
    return tally.result(task.n_data)


def measured_gradient(
    task: Task, params: Mapping[str, Tensor], *, progress: bool | None = None
) -> tuple[Measured, dict[str, Tensor]]:
    """The same with Σ_i ∇ℓ_i, from one forward and one backward pass over the data.

    Raises:
        ModelError, DataError: as :meth:`Task.run`; outputs without a gradient.
    """
    tally, order = _Tally(task.likelihood), torch.arange(task.n_data).split(task.batch_size)
    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
    total = {n: torch.zeros_like(p, requires_grad=False) for n, p in leaves.items()}
    with torch.enable_grad(), task.evaluation():
        for indices in track(order, total=len(order), label="gradient", show=progress):
            f, y = task.run(fetched(task, indices), leaves, indices)
            if not f.requires_grad:
                raise ModelError(
                    "the outputs do not depend on the trainable parameters; check that the model "
                    "runs with gradients on (no torch.no_grad inside forward)"
                )
            error = task.likelihood.error(f.detach(), y)
            try:
                found = torch.autograd.grad(
                    f, list(leaves.values()), error, allow_unused=True, materialize_grads=True
                )
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as fault:
                raise not_differentiable(fault) from fault
            for whole, part in zip(total.values(), found, strict=True):
                whole += part
            tally.add(f.detach(), y)
    return tally.result(task.n_data), total


class _Tally:
    """Losses and hits, added up batch by batch."""

    def __init__(self, likelihood: Likelihood) -> None:
        self._likelihood = likelihood
        self._loss, self._right, self._counted = 0.0, 0.0, 0

    def add(self, f: Tensor, y: Tensor) -> None:
        self._loss += float(self._likelihood.nll(f, y).double().sum())
        hits, tokens = self._likelihood.correct(f, y), self._likelihood.counted(y)
        if hits is not None:
            each = torch.ones_like(hits) if tokens is None else tokens.flatten(1).sum(-1)
            self._right += float((hits.double() * each).sum())
            self._counted += int(each.sum())

    def result(self, n_data: int) -> Measured:
        accuracy = self._right / self._counted if self._counted else None
        return Measured(self._loss, n_data, accuracy)
