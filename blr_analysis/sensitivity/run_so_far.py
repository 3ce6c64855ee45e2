"""Leave-one-out estimates of a training that still goes on, from its errors and its path so far.

    f_i^{\\i} ≈ f_i + V_i ē_i,    ē_i = mean_{s ≤ t} e_i(s),    V_i = J_i (H + δ_t)⁻¹ J_iᵀ

    δ_t = (L(θ₀) − L(θ_t)) / ‖θ_t − θ₀‖²

* The errors e_i(s) of example i are averaged over the epochs s up to the present epoch t, because
  the present errors of memorised labels are small.
* The damping δ_t takes the place of the prior. A gradient flow that is stopped after a time T moves
  about as far as the damping 1/T permits. The fall of the loss along the path gives 1/T ≤ δ_t.

With both, no temperature has to be guessed. The estimate is for new data that have as many wrong
labels as the training data.
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

# How the scale of the posterior was measured, as its calibration says it.
MEASURED_BY = "how far the loss fell on the way from the first weights"


class RunSoFar:
    """The errors of a training since its first weights, and the distance from these weights.

    Each epoch calls :meth:`begin`, then :meth:`errors` for every chunk, then :meth:`finish`.

    Args:
        task: the model at its first weights, and its data.
        indices: the examples that are watched, in rising order.
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
        """Whether the damping δ_t is a better scale than the scale of the posterior's fit.

        It is better if the fit is off the minimum, chose its prior itself, and did not measure a
        temperature.
        """
        has_chosen_prior = "prior_choice" in q.record and None in q.prior.entries
        is_off_minimum = q.source == "laplace" and q.at_minimum is False
        is_uncalibrated = q.calibration is None and not q.earlier
        return is_off_minimum and has_chosen_prior and is_uncalibrated

    def damped(self, q: Posterior) -> Posterior | None:
        """The posterior with δ_t in place of its prior; None if the loss has not fallen."""
        fall = self._loss_at_first() - self._loss({**q.mean, **q.buffers})
        squared_distance = self._squared_distance(q.mean)
        has_moved = squared_distance > 0
        if not (fall > 0 and has_moved):
            return None
        delta = fall / squared_distance
        change_of_prior = Prior({None: delta - q.prior.entries[None]})
        return q.changed(
            form=q.form.plus_prior(change_of_prior),
            prior=Prior({None: delta}, q.prior.mean),
            calibration=Calibration(1.0, how=MEASURED_BY),
        )

    def _squared_distance(self, weights: Mapping[str, Tensor]) -> float:
        """‖θ_t − θ₀‖² of all weights."""
        total = 0.0
        for name, first in self.first_weights.items():
            weight = weights[name]
            difference = weight - first.to(weight)
            total += float(difference.square().sum(dtype=torch.float64))
        return total

    def _loss_at_first(self) -> float:
        """L(θ₀), computed once."""
        if self.first_loss is None:
            self.first_loss = self._loss({**self.first_weights, **self._first_buffers})
        return self.first_loss

    def _loss(self, state: Mapping[str, Tensor]) -> float:
        """L = Σ_i ℓ_i over all data, estimated from the watched examples."""
        total = 0.0
        for indices in self._indices.split(self._task.batch_size):
            outputs, targets = self._task.at(state).run(indices)
            losses = self._task.likelihood.at(indices).nll(outputs, targets)
            total += float(losses.sum(dtype=torch.float64))
        return total * self._task.n_data / len(self._indices)

    def errors(self, task: Task, chunk: Chunk) -> Tensor:
        """ē_i over all epochs including this one, for the next chunk of watched examples.

        ``task`` is not needed; the caller passes it to all functions of this kind.
        """
        error = chunk.likelihood.error(chunk.outputs, chunk.targets)
        n_before = sum(len(chunk_error) for chunk_error in self._errors)
        self._errors.append(error.cpu())
        if self.error_sum is None:
            return error
        sum_before = self.error_sum[n_before : n_before + len(error)].to(error)
        return (sum_before + error) / (self.epochs + 1)

    def begin(self) -> None:
        """Start an epoch. Errors of an epoch that was not finished are dropped."""
        self._errors = []

    def finish(self) -> None:
        """End an epoch: add its errors to the sum."""
        epoch_errors = torch.cat(self._errors)
        if self.error_sum is None:
            self.error_sum = epoch_errors
        else:
            self.error_sum = self.error_sum + epoch_errors
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        """The state from which :meth:`load_state_dict` resumes."""
        return {
            "first_weights": self.first_weights,
            "first_buffers": self._first_buffers,
            "first_loss": self.first_loss,
            "error_sum": self.error_sum,
            "epochs": self.epochs,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of :meth:`state_dict`."""
        self.first_weights = _as_tensors(state["first_weights"])
        self._first_buffers = _as_tensors(state["first_buffers"])
        self.first_loss = state["first_loss"]
        error_sum = state["error_sum"]
        self.error_sum = None if error_sum is None else torch.as_tensor(error_sum)
        self.epochs = int(state["epochs"])


def _as_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The entries of a state, which may be lists, as tensors."""
    return {name: torch.as_tensor(values) for name, values in state.items()}
