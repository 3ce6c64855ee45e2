"""The temperature τ of a posterior, measured: the one scale that no formula at the weights tells.

    Σ_{i∈B} ℓ(y_i, f_i^{\\i}(τ)) = Σ_{i∈B} ℓ(y_i, f_i of a model without B)

Off a minimum B is a random tenth of the data, left out of one training by the run's own recipe, and
f_i^{\\i}(τ) = f_i + τ V_i ē_i. At a minimum B is a probe of examples, each left out by a descent on
all others. The losses are unweighted. The standard error of log τ comes from the spread over B: of
the differences between the two sides, and, where the truth is one training of many, of the rises
themselves, because another training has others. python -m benchmarks.field tells how often the
cross-validated loss lies inside.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.engine import chunks
from blr_analysis.checks import at_least, positive_int
from blr_analysis.errors import PosteriorWarning
from blr_analysis.posterior.facts import Calibration
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.predictive import scored_by
from blr_analysis.sensitivity.corrections import (
    bound_of,
    left_out_by,
    prediction_variances,
    self_influence,
    taken,
)
from blr_analysis.sensitivity.door import checked_runs
from blr_analysis.sensitivity.endings import ending_note
from blr_analysis.sensitivity.removal import UNTIL_REST, descended_removals
from blr_analysis.sensitivity.training import recipe_of, trained
from blr_analysis.sensitivity.training_errors import losses_at, mean_errors, widest
from blr_analysis.snapshots import State
from blr_analysis.task import Task

TENTH = 0.1  # of the data, that one training leaves out
LOWEST = -14.0  # log τ that is searched
HIGHEST = 5.0
NEARBY = 0.01  # in log τ: over which slopes are taken
HALVINGS = 60

Losses = Callable[[float], Tensor]  # τ ↦ the left-out losses of some examples


@torch.inference_mode(False)  # also where the caller switched it on
def calibrate(
    task: Task, posterior: Posterior | Sequence[Posterior], *, probe: int = 32, seed: int = 0
) -> Any:
    """The same posterior with a measured ``temperature`` and ``temperature_error``.

    Off a minimum it costs one training by the task's recipe, at one a descent of at most 40 passes
    for each example of the probe. τ multiplies V in sensitivity, leave-one-out and influence.

    Args:
        task: the model, the data it was trained on, and its recipe.
        posterior: learned on those data; of a list each is calibrated, and a list comes back.
        probe: examples left out at a minimum; those with a larger estimated rise are likelier.
        seed: of the tenth or the probe, and of the training.

    Returns:
        The posterior; unchanged, with a warning, where there is neither a minimum nor a recipe, or
        where no temperature agrees with what was measured. ``temperature_error`` is the standard
        error of log τ.

    Warns:
        PosteriorWarning: why nothing was measured.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(80, 2), torch.randint(3, (80,))
        >>> recipe = blr.Recipe("adam", lr=1e-2, epochs=5, batch_size=20)
        >>> task = blr.Task(torch.nn.Linear(2, 3), (X, y), recipe=recipe)
        >>> (model,) = blr.rerun(task, seeds=1)
        >>> better = calibrate(task, model)
        >>> better.temperature > 0
        True
    """
    positive_int("probe", probe)
    at_least(0, "seed", seed)
    are_several = isinstance(posterior, list | tuple)
    posteriors: Any = posterior if are_several else [posterior]
    calibrated = []
    for given, (where, checked) in zip(posteriors, checked_runs(task, posterior), strict=True):
        calibrated.append(_calibrated(where, checked, given, probe, seed))
    return calibrated if are_several else calibrated[0]


@dataclass(frozen=True)
class Measurement:
    """What left-out losses are compared with.

    Attributes:
        losses: of some examples, by temperature.
        truth: their losses without them, ``[B]``; NaN where nothing was found out.
        weight: how much each counts, ``[B]``.
        how: in words.
        is_exact: whether the truth is a descent's, and not one training of many.
        ending: whether that training ended elsewhere than the model, in one line; "" if not.
    """

    losses: Losses
    truth: Tensor
    weight: Tensor
    how: str
    is_exact: bool
    ending: str = ""

    @property
    def usable(self) -> Tensor:
        """Where something was found out, ``[B]``."""
        return self.truth.isfinite()

    def gaps(self, log_temperature: float) -> Tensor:
        """By how much each estimate is above the truth, times its weight; 0 where unknown."""
        estimates = self.losses(math.exp(log_temperature))
        return (self.weight * (estimates - self.truth)).where(self.usable, 0.0)

    def log_temperature(self) -> float | None:
        """log τ at which both sides agree in total; None where none does."""
        low = LOWEST
        high = HIGHEST
        are_apart = float(self.gaps(low).sum()) < 0 < float(self.gaps(high).sum())
        if not are_apart:
            return None
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if float(self.gaps(middle).sum()) < 0:
                low = middle
            else:
                high = middle
        return high

    def error(self, log_temperature: float) -> float | None:
        """The standard error of log τ; None where the estimates do not rise with τ."""
        above = self.gaps(log_temperature + NEARBY).sum()
        below = self.gaps(log_temperature - NEARBY).sum()
        slope = float(above - below) / (2 * NEARBY)
        if slope <= 0:
            return None
        usable = self.usable
        spread = float(self.gaps(log_temperature)[usable].std())
        if not self.is_exact:
            rises = self.weight * (self.truth - self.losses(0.0))
            spread = math.hypot(spread, float(rises[usable].std()))
        return math.sqrt(int(usable.sum())) * spread / slope


def _calibrated(task: Task, q: Posterior, given: Posterior, probe: int, seed: int) -> Posterior:
    """The user's posterior with what was measured of ``q``, which is the same on the task."""
    measurement = _measured(task, q, probe, seed)
    if measurement is None:
        return _unchanged(given, "neither at a minimum nor with a recipe: give Task(recipe=)")
    log_temperature = measurement.log_temperature()
    if log_temperature is None:
        why = f"no temperature agrees with {measurement.how}"
        return _unchanged(given, why, measurement.ending)
    calibration = Calibration(
        temperature=math.exp(log_temperature),
        error=measurement.error(log_temperature),
        how=measurement.how,
        examples=int(measurement.usable.sum()),
        ending=measurement.ending,
    )
    return given.changed(
        calibration=calibration,
        ending=measurement.ending or given.ending,
        stationarity=q.stationarity,
        saturated=q.saturated,
        fingerprint=q.fingerprint,
        frozen_values=q.frozen_values,
        input_ranges=q.input_ranges,
    )


def _measured(task: Task, q: Posterior, probe: int, seed: int) -> Measurement | None:
    """Exact solves at a minimum, else a training by the recipe; None without either."""
    if q.at_minimum:
        chosen, weight = _probe(task, q, probe, seed)
        return Measurement(
            losses=left_out_losses(task, q, chosen),
            truth=_solved(task, q, chosen),
            weight=weight,
            how="exact solves",
            is_exact=True,
        )
    if not recipe_known(task, q):
        return None
    chosen = _tenth(task, seed)
    truth, ending = _retrained(task, q, chosen, seed)
    return Measurement(
        losses=left_out_losses(task, q, chosen),
        truth=truth,
        weight=torch.ones(len(chosen), dtype=torch.float64),
        how="a training without a tenth",
        is_exact=False,
        ending=ending,
    )


def recipe_known(task: Task, q: Posterior) -> bool:
    """Whether the task or the posterior's record tells the run's own recipe."""
    return task.recipe is not None or bool(q.record.get("recipe"))


def _unchanged(posterior: Posterior, why: str, ending: str = "") -> Posterior:
    """The posterior without a temperature; its note says where the recipe is another training's."""
    because = f"{why}; {ending}" if ending else why
    warnings.warn(f"not calibrated: {because}", PosteriorWarning, stacklevel=5)
    if not ending:
        return posterior
    return posterior.changed(ending=ending)


def _tenth(task: Task, seed: int) -> Tensor:
    """A random tenth of the examples, sorted."""
    order = torch.randperm(task.n_data, generator=torch.Generator().manual_seed(seed))
    return order[: max(2, round(TENTH * task.n_data))].sort().values


def left_out_losses(task: Task, q: Posterior, chosen: Tensor) -> Losses:
    """τ ↦ ℓ(y_i, f_i^{\\i}(τ)), unweighted, in float64."""
    if task.likelihood.is_sequence:
        return _of_sequences(task, q, chosen)
    scored = scored_by(task.likelihood)
    likelihood = task.likelihood.at(chosen)
    method = taken(q, "auto")
    bound = bound_of(q)
    outputs, targets, errors, variances = _left_out_parts(task, q, chosen)

    def losses(temperature: float) -> Tensor:
        scaled = temperature * variances
        move, *_ = left_out_by(method, outputs, targets, errors, scaled, likelihood, bound)
        return scored.nll(likelihood.moved(outputs, move), targets)

    return losses


def _left_out_parts(
    task: Task, q: Posterior, chosen: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """f, y, ē and V of these examples on the CPU, real numbers in float64."""
    errors = mean_errors(task, q)
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for chunk in chunks(task.quiet, q.mean, by_parts=True, indices=chosen):
        error = errors(task, chunk)
        for rows, variance in prediction_variances(q, chunk):
            outputs = widest(chunk.outputs[rows])
            targets = widest(chunk.targets[rows])
            parts.append((outputs, targets, widest(error[rows]), widest(variance)))
    outputs, targets, errors_of_run, variances = (
        torch.cat(column) for column in zip(*parts, strict=True)
    )
    return outputs, targets, errors_of_run, variances


def _of_sequences(task: Task, q: Posterior, chosen: Tensor) -> Losses:
    """The same to first order: ℓ_i + τ ē_iᵀ V_i ē_i."""
    errors = mean_errors(task, q)
    before: list[Tensor] = []
    rises: list[Tensor] = []
    for chunk in chunks(task.quiet, q.mean, columns=1, indices=chosen):
        before.append(widest(chunk.likelihood.nll(chunk.outputs, chunk.targets)))
        rises.append(widest(self_influence(q, chunk, errors(task, chunk))))
    losses = torch.cat(before)
    rise = torch.cat(rises)
    return lambda temperature: losses + temperature * rise


def _retrained(task: Task, q: Posterior, chosen: Tensor, seed: int) -> tuple[Tensor, str]:
    """The losses of examples that one training by the recipe leaves out, and a line where it ended
    elsewhere than the model's own."""
    stays = torch.ones(task.n_data, dtype=torch.bool)
    stays[chosen] = False
    others = stays.nonzero().flatten()
    recipe = recipe_of(task, q)
    label = "calibrate: a training without a tenth"

    def training(seed: int) -> State:
        return trained(task, [(task, others, others)], recipe, seed, label=label)

    def another() -> Tensor:
        return losses_at(task, training(seed + 1), others)

    state = training(seed)
    note = recipe.note
    if recipe.known:
        before = losses_at(task, q.mean, others)
        after = losses_at(task, state, others)
        note = ending_note(before, [after], changed=TENTH, another=another)
    return losses_at(task, state, chosen), note


def _solved(task: Task, q: Posterior, chosen: Tensor) -> Tensor:
    """The losses of the probe's examples, each left out; NaN where that failed."""
    removals = descended_removals(task, q, chosen, passes=UNTIL_REST)
    scored = scored_by(task.likelihood)
    losses: list[Tensor] = []
    for index, outputs in zip(chosen.split(1), removals.outputs, strict=True):
        _, targets = task.run(task.fetch(index), q.mean, index)
        likelihood = task.likelihood.at(index) if task.likelihood.is_sequence else scored
        losses.append(likelihood.nll(outputs.double(), widest(targets)))
    return torch.cat(losses).masked_fill(removals.lost, torch.nan)


def _probe(task: Task, q: Posterior, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Examples at random and w_i = 1/π_i; the chances π_i grow with the estimated rise."""
    losses = left_out_losses(task, q, torch.arange(task.n_data))
    rise = (losses(1.0) - losses(0.0)).clamp_min(0).nan_to_num(0.0, 0.0)
    share = 0.9 * rise / rise.sum().clamp_min(1e-300) + 0.1 / len(rise)
    chance = (share * min(count, task.n_data)).clamp_max(1.0)
    generator = torch.Generator().manual_seed(seed)
    chosen = (torch.rand(len(rise), generator=generator) < chance).nonzero().flatten()
    if len(chosen) < 2:
        chosen = rise.argsort(descending=True)[:2].sort().values
    return chosen, 1 / chance[chosen]
