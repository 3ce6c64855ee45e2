"""Is this the model, are these the data, that a posterior was learned with?

Three numbers of each of a few examples identify a model and its data: one number of its outputs at
the posterior's mean, one of its target, and its loss. A fit stores these numbers as the posterior's
``fingerprint``. For a posterior without a fit, the first analysis computes them, and this module
remembers them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from blr_analysis.checks import bare_name
from blr_analysis.data.examples import evenly_spread
from blr_analysis.errors import BLRError, PosteriorError, PosteriorWarning, warn_user
from blr_analysis.half import stored_parts
from blr_analysis.posterior.facts import Numbers
from blr_analysis.posterior.input_ranges import remember
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.ranks import gathered_piece
from blr_analysis.task import Task

N_EXAMPLES = 8  # a fingerprint is of so many examples, spread evenly over the data
N_ENTRIES = 64  # a frozen parameter is compared at so many entries, spread evenly
TOLERANCE = 0.05  # of the largest number; casts, devices and rounded weights change less
FAR_DISTANCE = 0.1  # of the mean's norm; weights that are farther away are another model's
ROUNDED = 2.0**-8  # of a weight: the rounding of bfloat16
SMALLEST = 1e-7  # the rounding of the smallest weights in float16
LEAST_SIZE = 1e-6  # a smaller largest number counts as this, so that zeros are compared too
TINY_NORM = 1e-150  # joins the norm of a mean, so that a mean of zeros does not divide by 0
OTHER_WEIGHTS = (
    "the posterior was learned at other weights than the model has: all numbers belong to those "
    "weights"
)
OTHER_DATA = {"outputs": "another model or other inputs", "targets": "other targets"}
OTHER_DATA_OR_LOSS = OTHER_DATA | {"losses": "another loss"}


@dataclass(frozen=True)
class Identity:
    """Numbers that identify a posterior's model and data.

    Attributes:
        fingerprint: what :func:`fingerprint` returns.
        frozen_values: what :func:`frozen_numbers` returns.
    """

    fingerprint: Numbers
    frozen_values: Numbers


# For each task, the posteriors that were compared with it already.
_COMPARED: WeakKeyDictionary[Task, WeakSet[Posterior]] = WeakKeyDictionary()
# The identities that a first analysis computed, for posteriors whose fit stored none.
_IDENTITIES: WeakKeyDictionary[Posterior, Identity] = WeakKeyDictionary()


def recognised(
    task: Task, posterior: Posterior, on_task: Posterior, *, own_weights: bool
) -> Posterior:
    """Warn if the posterior does not belong to the task; return it with its identity.

    The two are compared once only. A posterior that its fit gave no fingerprint and no frozen
    values is not changed: the copy that is returned has those of the first analysis.

    Args:
        posterior: as the user passes it.
        on_task: the same posterior on the task's device.
        own_weights: whether the model should stand at the posterior's mean. It need not where there
            are several checkpoints of one run.

    Returns:
        ``on_task``, or a copy of it that has the fingerprint and the frozen values.

    Warns:
        PosteriorWarning: once, where the posterior is of another model or of other data.
    """
    if posterior not in _COMPARED.get(task, ()):
        mark_compared(task, posterior)
        _warn_of_differences(task, posterior, on_task, own_weights=own_weights)
    identity = _IDENTITIES.get(posterior)
    if identity is None:  # the fit stored it, or it could not be computed
        return on_task
    identified = on_task.changed(
        fingerprint=identity.fingerprint, frozen_values=identity.frozen_values
    )
    mark_compared(task, identified)
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
    # A posterior of an earlier checkpoint belongs to a model that has trained on.
    should_be_at_mean = own_weights and "checkpoint" not in posterior.record
    complaint = _change_of_frozen(task, on_task, identity.frozen_values)
    if not complaint:
        complaint = differs(identity.fingerprint, fingerprint_now)
    if not complaint and should_be_at_mean and _distance(task, on_task) > FAR_DISTANCE:
        complaint = (
            "the model's weights are not the posterior's mean: load those that it was learned at"
        )
    if complaint:
        warn_user(complaint, PosteriorWarning)
    complaint_of_scale = _too_few_terms(task, posterior)
    if complaint_of_scale:
        warn_user(complaint_of_scale, PosteriorWarning)


def _identity(task: Task, posterior: Posterior, fingerprint_now: Numbers) -> Identity:
    """The identity that the fit stored; without one, that of the first analysis.

    If this is the first analysis, its identity is remembered in ``_IDENTITIES``.
    """
    if posterior in _IDENTITIES:
        return _IDENTITIES[posterior]
    stored_fingerprint = posterior.fingerprint
    frozen_values = posterior.frozen_values
    if stored_fingerprint is not None and frozen_values is not None:
        return Identity(stored_fingerprint, frozen_values)
    if frozen_values is None:
        frozen_values = frozen_numbers(task, posterior.mean)
    identity = Identity(
        fingerprint=fingerprint_now if stored_fingerprint is None else stored_fingerprint,
        frozen_values=frozen_values,
    )
    _IDENTITIES[posterior] = identity
    if posterior.input_ranges is None:
        remember(posterior, task)
    return identity


def mark_compared(task: Task, posterior: Posterior) -> None:
    """Note that this posterior need not be compared with the task (again)."""
    _COMPARED.setdefault(task, WeakSet()).add(posterior)


def fingerprint(task: Task, mean: Mapping[str, Tensor]) -> Numbers:
    """Numbers of up to eight examples: one each of the outputs, the targets and the losses.

    The numbers of a sequence are computed from the tokens that count, so that padding does not
    change them. Sequences are run one by one, because long ones may not fit into memory together.

    Returns:
        The lists ``outputs``, ``targets`` and ``losses``, each with a number for every example.
    """
    weights = task.cast(mean)
    can_be_batched = task.examples.is_tensors and not task.likelihood.is_sequence
    batches = evenly_spread(task.n_data, N_EXAMPLES).split(task.batch_size if can_be_batched else 1)
    numbers = torch.cat([_numbers_of(task, weights, indices) for indices in batches], dim=1)
    outputs, targets, losses = numbers.tolist()
    return {"outputs": outputs, "targets": targets, "losses": losses}


def _numbers_of(task: Task, weights: Mapping[str, Tensor], indices: Tensor) -> Tensor:
    """One number each of the outputs, the target and the loss of every example, ``[3, B]``."""
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
    """How many of the numbers ``[n]`` differ by more than the tolerance."""
    if before.shape != now.shape:
        return len(now)
    largest = max(float(before.abs().max()), LEAST_SIZE)
    return int(((before - now).abs() > TOLERANCE * largest).sum())


def frozen_numbers(task: Task, mean: Mapping[str, Tensor]) -> Numbers:
    """The number (:func:`_projected`) and the norm of some entries of every frozen parameter.

    A parameter is frozen if the posterior's ``mean`` does not contain it. Parameters that are
    offloaded are left out.
    """
    return {
        name: _number_and_norm(gathered_piece(parameter).detach())
        for name, parameter in task.model.named_parameters()
        if name not in mean and parameter.numel() and not parameter.is_meta
    }


def _number_and_norm(parameter: Tensor) -> list[float]:
    """The number (:func:`_projected`) and the norm of some entries of one parameter.

    Of a quantised parameter they are of its codes and scales.
    """
    entries = torch.cat([_some_entries(part) for part in stored_parts(parameter)])
    return [float(_projected(entries.unsqueeze(0))), float(entries.norm())]


def _some_entries(tensor: Tensor) -> Tensor:
    """Entries that are spread evenly over the tensor, in float64 on the CPU."""
    flat = tensor.reshape(-1)
    n_entries = min(len(flat), N_ENTRIES)
    places = torch.linspace(0, len(flat) - 1, n_entries, dtype=torch.float64)
    return flat[places.long().to(flat.device)].cpu().double()


def _change_of_frozen(task: Task, q: Posterior, frozen_values: Numbers) -> str:
    """One line on a parameter that was frozen at the fit and has changed since; "" without one."""
    for name, (number, norm) in frozen_numbers(task, q.mean).items():
        number_before, norm_before = frozen_values.get(name, (number, norm))
        change = max(abs(number - number_before), abs(norm - norm_before))
        if change > ROUNDED * max(norm, norm_before):
            return f"{name!r} was frozen at the fit and has changed since: fit again"
    return ""


def _too_few_terms(task: Task, q: Posterior) -> str:
    """One line if the loss is a mean over N·C numbers and the posterior took it for one over N.

    An optimizer cannot know that an example has C outputs. Otherwise "".
    """
    is_of_optimizer = "scaling" in q.record
    if not task.mean_over_outputs or not is_of_optimizer:
        return ""
    n_data = q.n_data
    effective_sizes = q.record.get("ess") or [n_data]  # of the optimizer's groups
    n_terms = q.record.get("tokens") or min(effective_sizes)
    with torch.no_grad(), task.evaluation():
        _, target = task.run(task.fetch(torch.zeros(1, dtype=torch.long)), q.mean)
    n_outputs = target.numel()
    counts_outputs = n_terms > n_data
    if n_outputs == 1 or counts_outputs:
        return ""
    return (
        f"the loss is a mean over {n_data} · {n_outputs} numbers, but the precision counts "
        f"{n_terms:g}; capture with n_data={n_data}, tokens={n_data * n_outputs} "
        "(for IVON these are its ess)"
    )


def warning_of_other_weights(task: Task, q: Posterior) -> str:
    """One line if the model's weights are not the posterior's mean; "" if they are.

    Differences that rounding to half precision explains are ignored.
    """
    parameters = {bare_name(name): p for name, p in task.model.named_parameters()}
    for name, mean in q.mean.items():
        weights = gathered_piece(parameters[bare_name(name)]).detach().to(mean)
        bound = ROUNDED * mean.abs() + SMALLEST
        if bool(((weights - mean).abs() > bound).any()):
            return OTHER_WEIGHTS
    return ""


def check_weights(task: Task, posterior: Posterior) -> None:
    """Raise :class:`PosteriorError` if the model's weights are not the posterior's mean."""
    if warning_of_other_weights(task, posterior.on(task, same_data=False)):
        raise PosteriorError("the weights are not those of the posterior: build the index anew")


def _distance(task: Task, q: Posterior) -> float:
    """‖θ − m‖ / ‖m‖ of the model's weights θ and the posterior's mean m."""
    weights = dict(task.model.named_parameters())
    gaps = []
    for name, mean in q.mean.items():
        weight = gathered_piece(weights[name]).detach().to(mean)
        gaps.append(_norm(weight - mean))
    sizes = [_norm(m) for m in q.mean.values()]
    return math.hypot(*gaps) / math.hypot(*sizes, TINY_NORM)


def _norm(tensor: Tensor) -> float:
    """The Euclidean norm of all entries, summed in float64."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.double))
