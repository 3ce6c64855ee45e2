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
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.engine import chunks
from blr_analysis.checks import positive_int
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
LOWEST, HIGHEST = -14.0, 5.0  # log τ that is searched
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
    several = checked_runs(task, posterior)
    given: Any = posterior if isinstance(posterior, list | tuple) else [posterior]
    pairs = zip(several, given, strict=True)
    found = [_calibrated(where, q, own, probe, seed) for (where, q), own in pairs]
    return found if isinstance(posterior, list | tuple) else found[0]


def _calibrated(task: Task, q: Posterior, own: Posterior, probe: int, seed: int) -> Posterior:
    ending = ""
    if q.at_minimum:
        chosen, weight = _probe(task, q, probe, seed)
        losses, truth, how = _left_out(task, q, chosen), _solved(task, q, chosen), "exact solves"
    elif recipe_known(task, q):
        chosen = _tenth(task, seed)
        weight = torch.ones(len(chosen), dtype=torch.float64)
        losses = _left_out(task, q, chosen)
        truth, ending = _retrained(task, q, chosen, seed)
        how = "a training without a tenth"
    else:
        return _unchanged(own, "neither at a minimum nor with a recipe: give Task(recipe=)")
    usable = truth.isfinite()
    weight = weight * usable
    truth = truth.where(usable, 0.0)

    def gap(log: float) -> Tensor:
        return weight * (losses(math.exp(log)).where(usable, 0.0) - truth)

    low, high = LOWEST, HIGHEST
    if not usable.any() or float(gap(low).sum()) >= 0 or float(gap(high).sum()) <= 0:
        return _unchanged(own, f"no temperature agrees with {how}", ending)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if float(gap(middle).sum()) < 0 else (low, middle)
    slope = float((gap(high + NEARBY) - gap(high - NEARBY)).sum()) / (2 * NEARBY)
    spread = float(gap(high)[usable].std())
    if not q.at_minimum:
        rises = weight * (truth - losses(0.0))
        spread = math.hypot(spread, float(rises[usable].std()))
    noise = math.sqrt(int(usable.sum())) * spread
    calibration = Calibration(
        temperature=math.exp(high),
        error=noise / slope if slope > 0 else None,
        how=how,
        examples=int(usable.sum()),
        ending=ending,
    )
    return own.changed(
        calibration=calibration,
        ending=ending or own.ending,
        stationarity=q.stationarity,
        saturated=q.saturated,
        fingerprint=q.fingerprint,
        frozen_values=q.frozen_values,
        input_ranges=q.input_ranges,
    )


def recipe_known(task: Task, q: Posterior) -> bool:
    """Whether the run's own recipe is told, by the task or by the posterior's record."""
    return task.recipe is not None or bool(q.record.get("recipe"))


def _unchanged(posterior: Posterior, why: str, ending: str = "") -> Posterior:
    """The posterior without a temperature; its note says where the recipe is another training's."""
    because = f"{why}; {ending}" if ending else why
    warnings.warn(f"not calibrated: {because}", PosteriorWarning, stacklevel=4)
    if not ending:
        return posterior
    return posterior.changed(ending=ending)


def _tenth(task: Task, seed: int) -> Tensor:
    order = torch.randperm(task.n_data, generator=torch.Generator().manual_seed(seed))
    return order[: max(2, round(TENTH * task.n_data))].sort().values


def _left_out(task: Task, q: Posterior, chosen: Tensor) -> Losses:
    """τ ↦ ℓ(y_i, f_i^{\\i}(τ)), unweighted, in float64."""
    scored, errors = scored_by(task.likelihood), mean_errors(task, q)
    if task.likelihood.is_sequence:
        parts = [
            (chunk.likelihood.nll(chunk.outputs, chunk.targets).cpu().double(),
             self_influence(q, chunk, errors(task, chunk)).cpu().double())
            for chunk in chunks(task.quiet, q.mean, columns=1, indices=chosen)
        ]  # fmt: skip
        before, rise = (torch.cat(part) for part in zip(*parts, strict=True))
        return lambda scale: before + scale * rise
    word, bound, kept = taken(q, "auto"), bound_of(q), []
    for chunk in chunks(task.quiet, q.mean, by_parts=True, indices=chosen):
        error = errors(task, chunk)
        for rows, v in prediction_variances(q, chunk):
            seen = chunk.outputs[rows], chunk.targets[rows], error[rows], v
            kept.append([t.cpu().double() if t.is_floating_point() else t.cpu() for t in seen])
    f, y, e, v = (torch.cat(part) for part in zip(*kept, strict=True))
    likelihood = task.likelihood.at(chosen)

    def losses(scale: float) -> Tensor:
        move, *_ = left_out_by(word, f, y, e, scale * v, likelihood, bound)
        return scored.nll(likelihood.moved(f, move), y)

    return losses


def _retrained(task: Task, q: Posterior, chosen: Tensor, seed: int) -> tuple[Tensor, str]:
    """The losses of examples that one training by the recipe leaves out, and a line where it ended
    elsewhere than the model's own."""
    keep = torch.ones(task.n_data, dtype=torch.bool)
    keep[chosen] = False
    rest = keep.nonzero().flatten()
    recipe = recipe_of(task, q)
    label = "calibrate: a training without a tenth"

    def training(seed: int) -> State:
        return trained(task, [(task, rest, rest)], recipe, seed, label=label)

    def another() -> Tensor:
        return losses_at(task, training(seed + 1), rest)

    state = training(seed)
    note = recipe.note
    if recipe.known:
        before = losses_at(task, q.mean, rest)
        there = losses_at(task, state, rest)
        note = ending_note(before, [there], changed=TENTH, another=another)
    return losses_at(task, state, chosen), note


def _solved(task: Task, q: Posterior, chosen: Tensor) -> Tensor:
    """The losses of the probe's examples, each left out; NaN where that failed."""
    alone = descended_removals(task, q, chosen, passes=UNTIL_REST)
    scored, losses = scored_by(task.likelihood), []
    for index, f in zip(chosen, alone.outputs, strict=True):
        _, y = task.run(task.fetch(index.reshape(1)), q.mean, index.reshape(1))
        kind = task.likelihood.at(index.reshape(1)) if task.likelihood.is_sequence else scored
        losses.append(kind.nll(f.double(), widest(y)))
    return torch.cat(losses).masked_fill(alone.lost, torch.nan)


def _probe(task: Task, q: Posterior, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Examples at random and w_i = 1/π_i; the chances π_i grow with the estimated rise."""
    every = _left_out(task, q, torch.arange(task.n_data))
    rise = (every(1.0) - every(0.0)).clamp_min(0).nan_to_num(0.0, 0.0)
    share = 0.9 * rise / rise.sum().clamp_min(1e-300) + 0.1 / len(rise)
    chance = (share * min(count, task.n_data)).clamp_max(1.0)
    generator = torch.Generator().manual_seed(seed)
    chosen = (torch.rand(len(rise), generator=generator) < chance).nonzero().flatten()
    chosen = chosen if len(chosen) > 1 else rise.argsort(descending=True)[:2].sort().values
    return chosen, 1 / chance[chosen]
