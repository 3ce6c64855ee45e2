"""Measure the temperature τ of a posterior, a scale that no formula at the weights gives.

    Σ_{i∈B} ℓ(y_i, f_i^{\\i}(τ)) = Σ_{i∈B} ℓ(y_i, f_i of a model without B)

Off a minimum f_i^{\\i}(τ) = f_i + τ V_i ē_i, B is a random tenth of the data, and the model without
B comes from one training by the run's own recipe. At a minimum B is a sample of examples (the
probe), and each is left out by a descent on all others. The losses are unweighted.

The standard error of log τ comes from the spread over B of the differences between the two sides.
One training is random, and another would give other rises; off a minimum the spread of the rises is
therefore added. ``python -m benchmarks.field`` counts how often the cross-validated loss lies
within the error.
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
from blr_analysis.backprop.loss import SequenceEvaluation, evaluated
from blr_analysis.checks import at_least, positive_int
from blr_analysis.errors import PosteriorWarning
from blr_analysis.posterior.facts import Calibration
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.predictive import scored_by
from blr_analysis.sensitivity.corrections import (
    correction_for,
    highest_leverage,
    left_out_moves,
    prediction_variances,
    self_influence,
)
from blr_analysis.sensitivity.door import checked_runs
from blr_analysis.sensitivity.endings import ending_note
from blr_analysis.sensitivity.removal import UNTIL_REST, descended_removals
from blr_analysis.sensitivity.training import recipe_of, trained
from blr_analysis.sensitivity.training_errors import losses_at, mean_errors, targets_on_cpu
from blr_analysis.snapshots import State
from blr_analysis.task import Task

TENTH = 0.1  # the share of the data that one training leaves out
LOWEST = -14.0  # log τ, the ends of the interval that is searched
HIGHEST = 5.0
HALVINGS = 60  # of that interval
NEARBY = 0.01  # in log τ, the step of difference quotients
UNIFORM_SHARE = 0.1  # of the probe is drawn uniformly, the rest by the estimated rise

Losses = Callable[[float], Tensor]  # τ → the left-out losses of some examples [B]


@torch.inference_mode(False)  # also where the caller switched it on
def calibrate(
    task: Task, posterior: Posterior | Sequence[Posterior], *, probe: int = 32, seed: int = 0
) -> Any:
    """The same posterior with a measured ``temperature`` and ``temperature_error``.

    Away from a minimum it trains once by the task's recipe. At a minimum it descends without each
    example of the probe, in at most 40 passes over the data for each. τ multiplies V in
    sensitivity, leave-one-out and influence.

    Args:
        task: the model, the data it was trained on, and its recipe.
        posterior: learned on those data; or a list of posteriors.
        probe: the number of examples that are left out at a minimum. Examples with a large
            estimated rise are drawn with a higher probability.
        seed: draws the tenth or the probe, and starts the training.

    Returns:
        The calibrated posterior, or a list of them for a list. A posterior comes back unchanged,
        with a warning, if there is neither a minimum nor a recipe, or if no temperature agrees
        with the measurement. ``temperature_error`` is the standard error of log τ.

    Warns:
        PosteriorWarning: nothing was measured, and why.

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
    is_list = isinstance(posterior, list | tuple)
    users_posteriors: Any = posterior if is_list else [posterior]
    runs = checked_runs(task, posterior)
    calibrated = []
    for users_posterior, (with_buffers, q) in zip(users_posteriors, runs, strict=True):
        calibrated.append(_calibrated(with_buffers, q, users_posterior, probe, seed))
    return calibrated if is_list else calibrated[0]


@dataclass(frozen=True)
class Measurement:
    """The left-out losses of B examples, estimated and true.

    Attributes:
        losses: τ → the estimated losses ``[B]``.
        truth: the true losses ``[B]``; NaN where the descent of an example failed.
        weight: the weight of each example in the sums, ``[B]``.
        tokens: the tokens of each example that count, ``[B]``; 1 where examples are no sequences.
        how: where the truth comes from, in words.
        is_exact: whether the truth comes from descents, and not from one random training.
        ending: one line if that training ended at another loss than the model's; "" if not.
    """

    losses: Losses
    truth: Tensor
    weight: Tensor
    tokens: Tensor
    how: str
    is_exact: bool
    ending: str = ""

    @property
    def usable(self) -> Tensor:
        """Which examples have a true loss, ``[B]``."""
        return self.truth.isfinite()

    def left_out_loss(self) -> tuple[float | None, float | None]:
        """The mean of the true losses per token, and its standard error (of a ratio of sums).

        Both are None where there are fewer than two.
        """
        usable = self.usable
        losses = (self.weight * self.truth)[usable]
        if len(losses) < 2:
            return None, None
        tokens = (self.weight * self.tokens)[usable]
        mean = losses.sum() / tokens.sum()
        spread = (losses - mean * tokens).std()
        error = math.sqrt(len(losses)) * spread / tokens.sum()
        return float(mean), float(error)

    def gaps(self, log_temperature: float) -> Tensor:
        """(estimate − truth) times weight, ``[B]``; 0 where there is no truth."""
        estimates = self.losses(math.exp(log_temperature))
        return (self.weight * (estimates - self.truth)).where(self.usable, 0.0)

    def log_temperature(self) -> float | None:
        """log τ at which the sums of estimates and truths agree; None where no τ does."""
        low = LOWEST
        high = HIGHEST
        has_solution = float(self.gaps(low).sum()) < 0 < float(self.gaps(high).sum())
        if not has_solution:
            return None
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if float(self.gaps(middle).sum()) < 0:
                low = middle
            else:
                high = middle
        return high

    def error(self, log_temperature: float) -> float | None:
        """The standard error of log τ; None where the estimates do not rise with τ.

        It is the standard error of the sum of gaps, over the derivative of that sum by log τ.
        """
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
        error_of_sum = math.sqrt(int(usable.sum())) * spread
        return error_of_sum / slope


def _calibrated(
    task: Task, q: Posterior, users_posterior: Posterior, probe: int, seed: int
) -> Posterior:
    """The user's posterior with the temperature of ``q``, the same posterior on the task."""
    measurement = _measured(task, q, probe, seed)
    if measurement is None:
        why = "neither at a minimum nor with a recipe: give Task(recipe=)"
        return _unchanged(users_posterior, why)
    log_temperature = measurement.log_temperature()
    if log_temperature is None:
        why = f"no temperature agrees with {measurement.how}"
        return _unchanged(users_posterior, why, measurement.ending)
    left_out_loss, left_out_loss_error = measurement.left_out_loss()
    calibration = Calibration(
        temperature=math.exp(log_temperature),
        error=measurement.error(log_temperature),
        how=measurement.how,
        examples=int(measurement.usable.sum()),
        ending=measurement.ending,
        left_out_loss=left_out_loss,
        left_out_loss_error=left_out_loss_error,
    )
    return users_posterior.changed(
        calibration=calibration,
        ending=measurement.ending or users_posterior.ending,
        stationarity=q.stationarity,
        saturated=q.saturated,
        fingerprint=q.fingerprint,
        frozen_values=q.frozen_values,
        input_ranges=q.input_ranges,
    )


def _measured(task: Task, q: Posterior, probe: int, seed: int) -> Measurement | None:
    """By descents at a minimum, else by a training with the recipe; None without either."""
    if q.at_minimum:
        chosen, weight = _probe(task, q, probe, seed)
        return Measurement(
            losses=left_out_losses(task, q, chosen),
            truth=_losses_by_descent(task, q, chosen),
            weight=weight,
            tokens=_tokens(task, q, chosen),
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
        tokens=_tokens(task, q, chosen),
        how="a training without a tenth",
        is_exact=False,
        ending=ending,
    )


def recipe_known(task: Task, q: Posterior) -> bool:
    """Whether the task or the posterior's record has the recipe of the run."""
    return task.recipe is not None or bool(q.record.get("recipe"))


def _unchanged(posterior: Posterior, why: str, ending: str = "") -> Posterior:
    """The posterior as it was, after a warning; ``ending`` goes into its note."""
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
    """The function τ → ℓ(y_i, f_i^{\\i}(τ)) of these examples, unweighted, in float64."""
    if task.likelihood.is_sequence:
        return _left_out_losses_of_sequences(task, q, chosen)
    scored = scored_by(task.likelihood)
    likelihood = task.likelihood.at(chosen)
    correction = correction_for(q, "auto")
    bound = highest_leverage(q)
    outputs, targets, errors, variances = _left_out_parts(task, q, chosen)

    def losses(temperature: float) -> Tensor:
        move, _, _ = left_out_moves(
            correction, outputs, targets, errors, temperature * variances, likelihood, bound
        )
        return scored.nll(likelihood.moved(outputs, move), targets)

    return losses


def _left_out_parts(
    task: Task, q: Posterior, chosen: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """f, y, ē and V of these examples on the CPU, real numbers in float64."""
    errors_of = mean_errors(task, q)
    outputs: list[Tensor] = []
    targets: list[Tensor] = []
    errors: list[Tensor] = []
    variances: list[Tensor] = []
    for chunk in chunks(task.quiet, q.mean, by_parts=True, indices=chosen):
        error = errors_of(task, chunk)
        for rows, variance in prediction_variances(q, chunk):
            outputs.append(chunk.outputs[rows].cpu().double())
            targets.append(targets_on_cpu(chunk.targets[rows]))
            errors.append(error[rows].cpu().double())
            variances.append(variance.cpu().double())
    return torch.cat(outputs), torch.cat(targets), torch.cat(errors), torch.cat(variances)


def _left_out_losses_of_sequences(task: Task, q: Posterior, chosen: Tensor) -> Losses:
    """The function τ → ℓ_i + τ ē_iᵀ V_i ē_i, the left-out losses to first order."""
    errors_of = mean_errors(task, q)
    losses_of_chunks: list[Tensor] = []
    rises_of_chunks: list[Tensor] = []
    for chunk in chunks(task.quiet, q.mean, columns=1, indices=chosen):
        nll = chunk.likelihood.nll(chunk.outputs, chunk.targets)
        rise = self_influence(q, chunk, errors_of(task, chunk))
        losses_of_chunks.append(nll.cpu().double())
        rises_of_chunks.append(rise.cpu().double())
    losses = torch.cat(losses_of_chunks)
    rises = torch.cat(rises_of_chunks)
    return lambda temperature: losses + temperature * rises


def _retrained(task: Task, q: Posterior, chosen: Tensor, seed: int) -> tuple[Tensor, str]:
    """The losses of these examples after one training by the recipe without them.

    The second value is a line that says that this training ends at another loss than the model's;
    "" if it does not.
    """
    remains = torch.ones(task.n_data, dtype=torch.bool)
    remains[chosen] = False
    remaining = remains.nonzero().flatten()
    recipe = recipe_of(task, q)
    label = "calibrate: a training without a tenth"

    def training(seed: int) -> State:
        return trained(task, [(task, remaining, remaining)], recipe, seed, label=label)

    def another(further: int) -> Tensor:
        return losses_at(task, training(seed + 1 + further), remaining)

    state = training(seed)
    note = recipe.note
    if recipe.known:
        before = losses_at(task, q.mean, remaining)
        after = losses_at(task, state, remaining)
        note = ending_note(before, [after], changed=TENTH, another=another)
    return losses_at(task, state, chosen), note


def _losses_by_descent(task: Task, q: Posterior, chosen: Tensor) -> Tensor:
    """The loss of each example after a descent without it, ``[B]``; NaN if that failed."""
    removals = descended_removals(task, q, chosen, passes=UNTIL_REST)
    scored = scored_by(task.likelihood)
    losses: list[Tensor] = []
    for index, outputs in zip(chosen.split(1), removals.outputs, strict=True):
        _, targets = task.run(task.fetch(index), q.mean, index)
        likelihood = task.likelihood.at(index) if task.likelihood.is_sequence else scored
        losses.append(likelihood.nll(outputs.double(), targets_on_cpu(targets)))
    return torch.cat(losses).masked_fill(removals.lost, torch.nan)


def _tokens(task: Task, q: Posterior, chosen: Tensor) -> Tensor:
    """The tokens of these examples that count, ``[B]``; 1 where examples are no sequences."""
    if not task.likelihood.is_sequence:
        return torch.ones(len(chosen), dtype=torch.float64)
    evaluation, _ = evaluated(task.subset(chosen), q.mean)
    assert isinstance(evaluation, SequenceEvaluation)
    return evaluation.tokens.double()


def _probe(task: Task, q: Posterior, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """About ``count`` random examples ``[B]``, and their weights 1/π_i ``[B]``.

    An example is drawn with a probability π_i that grows with its estimated rise; the weights make
    sums over the probe unbiased for sums over all data.
    """
    losses = left_out_losses(task, q, torch.arange(task.n_data))
    rise = (losses(1.0) - losses(0.0)).clamp_min(0).nan_to_num(0.0, 0.0)
    by_rise = rise / rise.sum().clamp_min(1e-300)
    share = (1 - UNIFORM_SHARE) * by_rise + UNIFORM_SHARE / len(rise)
    probability = (share * min(count, task.n_data)).clamp_max(1.0)
    generator = torch.Generator().manual_seed(seed)
    is_chosen = torch.rand(len(rise), generator=generator) < probability
    chosen = is_chosen.nonzero().flatten()
    if len(chosen) < 2:  # a spread takes two
        chosen = rise.argsort(descending=True)[:2].sort().values
    return chosen, 1 / probability[chosen]
