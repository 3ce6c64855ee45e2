"""A training that still goes on, as what it has done so far: its errors, and how far it went.

    f_i^{\\i} ≈ f_i + V_i ē_i,    ē_i = mean_{s ≤ t} e_i(s),    V_i = J_i (H + δ_t)⁻¹ J_iᵀ

    δ_t = (L(θ₀) − L(θ_t)) / ‖θ_t − θ₀‖²

A gradient flow that is stopped after a time T has gone as far as the damping 1/T lets it go, and
1/T ≤ δ_t: so far as the loss has fallen, so far it has moved. Errors of the end alone see no label
that is learned by heart by then. With both there is no temperature left to be guessed. The estimate
is of data like the training's, with as many wrong labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunk
from blr_analysis.posterior.facts import Calibration
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.prior import Prior
from blr_analysis.snapshots import buffers_of
from blr_analysis.task import Task

HOW = "how far the loss fell on the way from the first weights"


class RunSoFar:
    """What a training has done since it was first looked at.

    Args:
        task: the model at its first weights, and its data.
        indices: the examples that are watched, sorted.
    """

    def __init__(self, task: Task, indices: Tensor) -> None:
        self._task = task
        self._indices = indices
        self.first_weights = {name: p.clone() for name, p in task.parameters().items()}
        self._first_buffers = {name: b.clone() for name, b in buffers_of(task.model).items()}
        self.first_loss: float | None = None
        self.error_sum: Tensor | None = None
        self.epochs = 0
        self._errors: list[Tensor] = []

    def applies_to(self, q: Posterior) -> bool:
        """Whether the run says more of a posterior's scale than its fit, which found a prior off
        the minimum and has a temperature that nobody measured."""
        is_found = "prior_choice" in q.record and None in q.prior.entries
        is_off = q.source == "laplace" and q.at_minimum is False
        return is_off and is_found and q.calibration is None and not q.earlier

    def damped(self, q: Posterior) -> Posterior | None:
        """The posterior with δ_t in place of its prior; None where the loss has not fallen."""
        fall = self._loss_at_first() - self._loss({**q.mean, **q.buffers})
        squares = [(q.mean[n] - w.to(q.mean[n])).square() for n, w in self.first_weights.items()]
        distance = sum(float(square.sum(dtype=torch.float64)) for square in squares)
        if not fall > 0 or not distance > 0:
            return None
        delta = fall / distance
        difference = Prior({None: delta - q.prior.entries[None]})
        return q.changed(
            form=q.form.plus_prior(difference),
            prior=Prior({None: delta}, q.prior.mean),
            calibration=Calibration(1.0, how=HOW),
        )

    def _loss_at_first(self) -> float:
        if self.first_loss is None:
            self.first_loss = self._loss({**self.first_weights, **self._first_buffers})
        return self.first_loss

    def _loss(self, state: Mapping[str, Tensor]) -> float:
        """Σ_i ℓ_i over all data, from the watched ones."""
        total = 0.0
        for indices in self._indices.split(self._task.batch_size):
            outputs, targets = self._task.at(state).run(indices)
            losses = self._task.likelihood.at(indices).nll(outputs, targets)
            total += float(losses.sum(dtype=torch.float64))
        return total * self._task.n_data / len(self._indices)

    def errors(self, task: Task, chunk: Chunk) -> Tensor:
        """ē_i of a chunk of the watched examples, in their order; this epoch's count with it."""
        error = chunk.likelihood.error(chunk.outputs, chunk.targets)
        start = sum(map(len, self._errors))
        self._errors.append(error.cpu())
        if self.error_sum is None:
            return error
        earlier = self.error_sum[start : start + len(error)].to(error)
        return (earlier + error) / (self.epochs + 1)

    def begin(self) -> None:
        """Before an epoch's errors; an epoch that failed does not count."""
        self._errors = []

    def keep(self) -> None:
        """After them."""
        error = torch.cat(self._errors)
        self.error_sum = error if self.error_sum is None else self.error_sum + error
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        """What a run that is resumed must know."""
        return {
            "first_weights": self.first_weights,
            "first_loss": self.first_loss,
            "error_sum": self.error_sum,
            "epochs": self.epochs,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.first_weights = {n: torch.as_tensor(w) for n, w in state["first_weights"].items()}
        self.first_loss = state["first_loss"]
        error_sum = state["error_sum"]
        self.error_sum = None if error_sum is None else torch.as_tensor(error_sum)
        self.epochs = int(state["epochs"])
