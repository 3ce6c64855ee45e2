"""Is this the model, are these the data, that a posterior was learned with?

Three numbers of a few examples identify a model and its data: one each of their outputs at the
posterior's mean, their targets and their losses. A fit stores them as the posterior's
``fingerprint``. Where there was no fit, the first analysis computes them, and stores them beside
the posterior.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from blr_analysis.checks import bare_name
from blr_analysis.errors import BLRError, PosteriorError, PosteriorWarning, warn_user
from blr_analysis.posterior.facts import Numbers
from blr_analysis.posterior.input_ranges import remember
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.task import Task

EXAMPLES = 8  # of a fingerprint, spread evenly over the data
ENTRIES = 64  # of a frozen parameter, spread evenly
TOLERANCE = 0.05  # of the largest number: more than casts, devices and rounded weights change
FAR = 0.1  # of the mean's norm: weights at this distance are another model's
ROUNDED = 2.0**-8  # of a weight: the rounding of bfloat16
SMALLEST = 1e-7  # the rounding of the smallest weights in float16
LEAST_SIZE = 1e-6  # of the largest number of a fingerprint, so that zeros are compared too
TINY_NORM = 1e-150  # of a mean, so that one of zeros does not divide by 0
ELSEWHERE = "the posterior stands at other weights than the model: all numbers are of those weights"
OTHER_DATA = {"outputs": "another model or other inputs", "targets": "other targets"}
OTHER_DATA_OR_LOSS = OTHER_DATA | {"losses": "another loss"}


@dataclass(frozen=True)
class Identity:
    """Numbers that identify a posterior's model and data.

    Attributes:
        fingerprint: of :func:`fingerprint`.
        frozen_values: of :func:`frozen_numbers`.
    """

    fingerprint: Numbers
    frozen_values: Numbers


# The posteriors that were compared with a task already.
_COMPARED: WeakKeyDictionary[Task, WeakSet[Posterior]] = WeakKeyDictionary()
# The identities that a first analysis computed, of posteriors that had none.
_IDENTITIES: WeakKeyDictionary[Posterior, Identity] = WeakKeyDictionary()


def recognised(
    task: Task, posterior: Posterior, on_task: Posterior, *, own_weights: bool
) -> Posterior:
    """The posterior on the task's device, with its fingerprint and its frozen values.

    The given posterior is not changed; an identity that is computed here is stored beside it.

    Args:
        on_task: the posterior on the task's device.
        own_weights: whether the model should stand at the posterior's mean. It need not where there
            are several checkpoints of one run.

    Warns:
        PosteriorWarning: once, where the posterior is of another model or of other data.
    """
    if posterior not in _COMPARED.get(task, ()):
        met(task, posterior)
        _warn_of_differences(task, posterior, on_task, own_weights=own_weights)
    identity = _IDENTITIES.get(posterior)
    if identity is None:  # the fit stored it, or it could not be computed
        return on_task
    identified = on_task.changed(
        fingerprint=identity.fingerprint, frozen_values=identity.frozen_values
    )
    met(task, identified)
    return identified


def _warn_of_differences(
    task: Task, posterior: Posterior, on_task: Posterior, *, own_weights: bool
) -> None:
    """Warn where the task has another model or other data than the posterior was learned with."""
    try:
        fingerprint_now = fingerprint(task, on_task.mean)
    except BLRError:  # the analysis that follows raises it with a better message
        return
    identity = _identity(task, posterior, fingerprint_now)
    complaint = trained_since(task, on_task, identity.frozen_values)
    if not complaint:
        complaint = differs(identity.fingerprint, fingerprint_now)
    is_end_of_run = own_weights and "checkpoint" not in posterior.record
    if not complaint and is_end_of_run and _distance(task, on_task) > FAR:
        complaint = (
            "the model's weights are not the posterior's mean: load those that it was learned at"
        )
    for message in (complaint, _too_few_terms(task, posterior)):
        if message:
            warn_user(message, PosteriorWarning)


def _identity(task: Task, posterior: Posterior, fingerprint_now: Numbers) -> Identity:
    """The identity that the fit stored; else that of the first analysis, which is stored here."""
    if posterior in _IDENTITIES:
        return _IDENTITIES[posterior]
    of_fit = posterior.fingerprint
    frozen = posterior.frozen_values
    if of_fit is not None and frozen is not None:
        return Identity(of_fit, frozen)
    identity = Identity(
        fingerprint=fingerprint_now if of_fit is None else of_fit,
        frozen_values=frozen_numbers(task, posterior.mean) if frozen is None else frozen,
    )
    _IDENTITIES[posterior] = identity
    if posterior.input_ranges is None:
        remember(posterior, task)
    return identity


def met(task: Task, *posteriors: Posterior) -> None:
    """Note that these posteriors need not be compared with the task (again)."""
    _COMPARED.setdefault(task, WeakSet()).update(posteriors)


def fingerprint(task: Task, mean: Mapping[str, Tensor]) -> Numbers:
    """A number each of the outputs, targets and losses of eight examples, by these names.

    Of sequences the numbers are of the tokens that count, so that padding does not change them.
    Sequences are run one by one, because long ones may not fit into memory together.
    """
    weights = task.cast(mean)
    places = torch.linspace(0, task.n_data - 1, min(EXAMPLES, task.n_data))
    chosen = places.long().unique()
    are_rows = task.examples.is_tensors and not task.likelihood.is_sequence
    batches = chosen.split(task.batch_size if are_rows else 1)
    numbers = torch.cat([_numbers_of(task, weights, indices) for indices in batches], dim=1)
    outputs, targets, losses = numbers.tolist()
    return {"outputs": outputs, "targets": targets, "losses": losses}


def _numbers_of(task: Task, weights: Mapping[str, Tensor], indices: Tensor) -> Tensor:
    """A number of each example's outputs, targets and loss, ``[3, B]``."""
    with torch.no_grad(), task.evaluation():
        outputs, targets = task.run(task.fetch(indices), weights, indices)
    losses = task.likelihood.at(indices).nll(outputs, targets)
    counted = task.likelihood.counted(targets)
    if counted is not None:
        outputs = outputs[counted].unsqueeze(0)
        targets = targets[counted].unsqueeze(0)
    return torch.stack([_projected(values) for values in (outputs, targets, losses)])


def _projected(values: Tensor) -> Tensor:
    """Σ_j cos(j) x_ij of each row x_i, ``[B]``: one number in which every entry counts."""
    rows = values.detach().cpu().double().reshape(len(values), -1)
    places = torch.arange(1.0, rows.shape[1] + 1, dtype=torch.float64)
    return rows @ places.cos()


def differs(before: Numbers, now: Numbers, *, strictly: bool = False) -> str:
    """How the data of two fingerprints differ, in one line; "" where they do not.

    Args:
        before: the posterior's fingerprint.
        now: that of the task.
        strictly: whether losses are compared too, and one example that differs is enough; else
            more than half of the examples must differ.
    """
    quantities = OTHER_DATA_OR_LOSS if strictly else OTHER_DATA
    for quantity, description in quantities.items():
        numbers_before = torch.tensor(before[quantity], dtype=torch.float64)
        numbers_now = torch.tensor(now[quantity], dtype=torch.float64)
        n_different = _count_of_differences(numbers_before, numbers_now)
        n_tolerated = 0 if strictly else len(numbers_now) / 2
        if n_different > n_tolerated:
            return (
                f"the posterior was learned with {description}: {n_different} of "
                f"{len(numbers_now)} examples differ; pass the task that it was fitted to"
            )
    return ""


def _count_of_differences(before: Tensor, now: Tensor) -> int:
    if before.shape != now.shape:
        return len(now)
    largest = max(float(before.abs().max()), LEAST_SIZE)
    return int(((before - now).abs() > TOLERANCE * largest).sum())


def frozen_numbers(task: Task, mean: Mapping[str, Tensor]) -> Numbers:
    """A number and the norm of some entries of every frozen parameter, by name.

    Frozen are the model's parameters that are not in the posterior's ``mean``.
    """
    return {
        name: _number_and_norm(parameter.detach())
        for name, parameter in task.model.named_parameters()
        if name not in mean and parameter.numel()
    }


def _number_and_norm(parameter: Tensor) -> list[float]:
    flat = parameter.reshape(-1)
    n_entries = min(len(flat), ENTRIES)
    places = torch.linspace(0, len(flat) - 1, n_entries, dtype=torch.float64)
    entries = flat[places.long().to(flat.device)].cpu().double()
    return [float(_projected(entries.unsqueeze(0))), float(entries.norm())]


def trained_since(task: Task, q: Posterior, frozen_values: Numbers) -> str:
    """Which parameter was frozen at the fit and has changed since, in one line; "" if none has."""
    for name, (number, norm) in frozen_numbers(task, q.mean).items():
        number_before, norm_before = frozen_values.get(name, (number, norm))
        change = max(abs(number - number_before), abs(norm - norm_before))
        if change > ROUNDED * max(norm, norm_before):
            return f"{name!r} was frozen at the fit and has changed since: fit again"
    return ""


def _too_few_terms(task: Task, q: Posterior) -> str:
    """A line where the loss is a mean over N·C numbers, and the posterior took it for one over N.

    An optimizer cannot know that an example has C outputs. "" elsewhere.
    """
    is_of_optimizer = "scaling" in q.record
    if not task.mean_over_outputs or not is_of_optimizer:
        return ""
    n = q.n_data
    effective_sizes = q.record.get("ess") or [n]
    terms = q.record.get("tokens") or min(effective_sizes)
    with torch.no_grad(), task.evaluation():
        _, target = task.run(task.fetch(torch.zeros(1, dtype=torch.long)), q.mean)
    n_outputs = target.numel()
    if n_outputs == 1 or terms > n:
        return ""
    return (
        f"the loss is a mean over {n} · {n_outputs} numbers, the precision is of {terms:g}; "
        f"capture with n_data={n}, tokens={n * n_outputs} (which IVON takes as its ess)"
    )


def elsewhere(task: Task, q: Posterior) -> str:
    """A line where the model's weights are not the posterior's mean; "" where they are.

    Differences that rounding to half precision explains are ignored.
    """
    parameters = {bare_name(name): p for name, p in task.model.named_parameters()}
    for name, mean in q.mean.items():
        weights = parameters[bare_name(name)].detach().to(mean)
        bound = ROUNDED * mean.abs() + SMALLEST
        if bool(((weights - mean).abs() > bound).any()):
            return ELSEWHERE
    return ""


def check_weights(task: Task, posterior: Posterior) -> None:
    """Raise :class:`PosteriorError` where :func:`elsewhere` has something to say."""
    if elsewhere(task, posterior.on(task, same_data=False)):
        raise PosteriorError("the weights are not those of the posterior: build the index anew")


def _distance(task: Task, q: Posterior) -> float:
    """‖θ − m‖ / ‖m‖ of the model's weights θ and the posterior's mean m."""
    weights = dict(task.model.named_parameters())
    gaps = [_norm(weights[name].detach().to(m) - m) for name, m in q.mean.items()]
    sizes = [_norm(m) for m in q.mean.values()]
    return math.hypot(*gaps) / math.hypot(*sizes, TINY_NORM)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.double))
