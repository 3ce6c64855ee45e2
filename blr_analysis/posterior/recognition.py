"""Is this the model, are these the data, that a posterior was learned with?

A model and its data are known again by three numbers of a few examples: of their outputs at the
posterior's mean, their targets and their losses. A fit keeps them as the posterior's
``fingerprint``. Where there was no fit, those of the first analysis are kept beside the posterior.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from blr_analysis.checks import bare_name
from blr_analysis.errors import BLRError, PosteriorError, PosteriorWarning
from blr_analysis.posterior.facts import Numbers
from blr_analysis.posterior.input_ranges import remember
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.task import Task

FEW = 8  # examples, spread evenly
ENTRIES = 64  # of a frozen parameter, spread evenly
CLOSE = 0.05  # of the largest number: more than casts, devices and rounded weights change
APART = 0.1  # of the weights' norm: a model that is elsewhere
ROUNDED = 2.0**-8  # of a weight: what bfloat16 changes
SMALLEST = 1e-7  # what float16 changes of the smallest weights
ELSEWHERE = "the posterior stands at other weights than the model: all numbers are of those weights"
OTHER_DATA = {"outputs": "another model or other inputs", "targets": "other targets"}
OTHER_DATA_OR_LOSS = OTHER_DATA | {"losses": "another loss"}


@dataclass(frozen=True)
class Identity:
    """What a posterior's model and data are known again by: see :func:`fingerprint` and
    :func:`frozen_numbers`."""

    fingerprint: Numbers
    frozen_values: Numbers


_MET: WeakKeyDictionary[Task, WeakSet[Posterior]] = WeakKeyDictionary()
_AT_FIRST: WeakKeyDictionary[Posterior, Identity] = WeakKeyDictionary()


def recognised(
    task: Task, posterior: Posterior, on_task: Posterior, *, own_weights: bool
) -> Posterior:
    """The posterior on the task's device, with its fingerprint and its frozen values.

    The posterior itself stays as it is: what the first analysis saw is kept beside it.

    Args:
        on_task: the posterior on the task's device.
        own_weights: whether the model should stand at the posterior's mean: not where there are
            several checkpoints of one run.

    Warns:
        PosteriorWarning: once, of a posterior of another model or of other data.
    """
    if posterior not in _MET.get(task, ()):
        met(task, posterior)
        _recognise(task, posterior, on_task, own_weights=own_weights)
    identity = _AT_FIRST.get(posterior)
    if identity is None:  # the fit has told it, or it cannot be computed
        return on_task
    identified = on_task.changed(
        fingerprint=identity.fingerprint, frozen_values=identity.frozen_values
    )
    met(task, identified)
    return identified


def _recognise(task: Task, posterior: Posterior, on_task: Posterior, *, own_weights: bool) -> None:
    try:
        seen = fingerprint(task, on_task.mean)
    except BLRError:  # the analysis will say it better
        return
    identity = _identity(task, posterior, seen)
    complaint = trained_since(task, on_task, identity.frozen_values)
    if not complaint:
        complaint = differs(identity.fingerprint, seen)
    is_end_of_run = own_weights and "checkpoint" not in posterior.record
    if not complaint and is_end_of_run and _distance(task, on_task) > APART:
        complaint = (
            "the model's weights are not the posterior's mean: load those that it was learned at"
        )
    for message in (complaint, _too_few_terms(task, posterior)):
        if message:
            warnings.warn(message, PosteriorWarning, stacklevel=6)


def _identity(task: Task, posterior: Posterior, seen: Numbers) -> Identity:
    """As the fit told it; else as the first analysis saw it, which is kept beside the posterior."""
    if posterior in _AT_FIRST:
        return _AT_FIRST[posterior]
    fitted = posterior.fingerprint
    frozen = posterior.frozen_values
    if fitted is not None and frozen is not None:
        return Identity(fitted, frozen)
    identity = Identity(
        seen if fitted is None else fitted,
        frozen_numbers(task, posterior.mean) if frozen is None else frozen,
    )
    _AT_FIRST[posterior] = identity
    if posterior.input_ranges is None:
        remember(posterior, task)
    return identity


def met(task: Task, *posteriors: Posterior) -> None:
    """Nothing more is said of these, or of what is made of those that were recognised."""
    _MET.setdefault(task, WeakSet()).update(posteriors)


def fingerprint(task: Task, mean: Mapping[str, Tensor]) -> Numbers:
    """Outputs, targets and losses of a few examples, a number each; of sequences of the tokens that
    count, however they are padded.

    Long sequences are read one by one, so that they need no room together.
    """
    weights = task.cast(mean)
    chosen = torch.linspace(0, task.n_data - 1, min(FEW, task.n_data)).long().unique()
    are_rows = task.examples.is_tensors and not task.likelihood.is_sequence
    batches = chosen.split(task.batch_size if are_rows else 1)
    numbers = torch.cat([_numbers_of(task, weights, indices) for indices in batches], dim=1)
    outputs, targets, losses = numbers.tolist()
    return {"outputs": outputs, "targets": targets, "losses": losses}


def _numbers_of(task: Task, weights: Mapping[str, Tensor], indices: Tensor) -> Tensor:
    """A number of outputs, targets and loss of each of these examples, ``[3, B]``."""
    with torch.no_grad(), task.evaluation():
        outputs, targets = task.run(task.fetch(indices), weights, indices)
    losses = task.likelihood.at(indices).nll(outputs, targets)
    counted = task.likelihood.counted(targets)
    if counted is not None:
        outputs = outputs[counted].unsqueeze(0)
        targets = targets[counted].unsqueeze(0)
    return torch.stack([_projected(values) for values in (outputs, targets, losses)])


def _projected(values: Tensor) -> Tensor:
    """Σ_j cos(j) x_ij of each row, ``[B]``."""
    flat = values.detach().cpu().double().reshape(len(values), -1)
    places = torch.arange(1.0, flat.shape[1] + 1, dtype=torch.float64)
    return flat @ places.cos()


def differs(known: Numbers, seen: Numbers, *, strictly: bool = False) -> str:
    """In what other data than a posterior's differ, in one line; "" of its own.

    Args:
        strictly: another loss differs too, and so do data where one example does.
    """
    for what, words in (OTHER_DATA_OR_LOSS if strictly else OTHER_DATA).items():
        before = torch.tensor(known[what], dtype=torch.float64)
        now = torch.tensor(seen[what], dtype=torch.float64)
        count = _count_of_differences(before, now)
        most = 0 if strictly else len(now) / 2
        if count > most:
            return (
                f"the posterior was learned with {words}: {count} of {len(now)} examples differ; "
                "pass the task that it was fitted to"
            )
    return ""


def _count_of_differences(before: Tensor, now: Tensor) -> int:
    if before.shape != now.shape:
        return len(now)
    largest = max(float(before.abs().max()), 1e-6)
    return int(((before - now).abs() > CLOSE * largest).sum())


def frozen_numbers(task: Task, mean: Mapping[str, Tensor]) -> Numbers:
    """A number and a size of some entries of every parameter that a posterior leaves as it is."""
    return {
        name: _number_and_size(parameter.detach())
        for name, parameter in task.model.named_parameters()
        if name not in mean and parameter.numel()
    }


def _number_and_size(parameter: Tensor) -> list[float]:
    flat = parameter.reshape(-1)
    places = torch.linspace(0, len(flat) - 1, min(len(flat), ENTRIES), dtype=torch.float64)
    entries = flat[places.long().to(flat.device)].cpu().double()
    return [float(_projected(entries.unsqueeze(0))), float(entries.norm())]


def trained_since(task: Task, q: Posterior, frozen_values: Numbers) -> str:
    """Which parameter was frozen at the fit and has another value now, in one line; "" if none."""
    for name, (number, size) in frozen_numbers(task, q.mean).items():
        number_before, size_before = frozen_values.get(name, (number, size))
        gap = max(abs(number - number_before), abs(size - size_before))
        if gap > ROUNDED * max(size, size_before):
            return f"{name!r} was frozen at the fit and has changed since: fit again"
    return ""


def _too_few_terms(task: Task, q: Posterior) -> str:
    """A mean over N·C losses that was taken for one over N: an optimizer does not know C."""
    if not task.mean_over_outputs or "scaling" not in q.record:
        return ""
    n = q.n_data
    terms = q.record.get("tokens") or min(q.record.get("ess") or [n])
    with torch.no_grad(), task.evaluation():
        _, y = task.run(task.fetch(torch.zeros(1, dtype=torch.long)), q.mean)
    if y.numel() == 1 or terms > n:
        return ""
    return (
        f"the loss is a mean over {n} · {y.numel()} numbers, the precision is of {terms:g}; "
        f"capture with n_data={n}, tokens={n * y.numel()} (which IVON takes as its ess)"
    )


def elsewhere(task: Task, q: Posterior) -> str:
    """What to say of a posterior at other weights than the model's, which differ by more than
    rounding in half precision; "" at the same."""
    parameters = {bare_name(name): p for name, p in task.model.named_parameters()}
    for name, mean in q.mean.items():
        weights = parameters[bare_name(name)].detach().to(mean)
        bound = ROUNDED * mean.abs() + SMALLEST
        if bool(((weights - mean).abs() > bound).any()):
            return ELSEWHERE
    return ""


def check_weights(task: Task, posterior: Posterior) -> None:
    """Raise :class:`PosteriorError` where a model's weights are not a posterior's mean, by more
    than they are rounded in half precision."""
    if elsewhere(task, posterior.on(task, same_data=False)):
        raise PosteriorError("the weights are not those of the posterior: build the index anew")


def _distance(task: Task, q: Posterior) -> float:
    """Of the model's weights from the posterior's mean, in the norm of the mean."""
    weights = dict(task.model.named_parameters())
    gaps = [_norm(weights[name].detach().to(m) - m) for name, m in q.mean.items()]
    sizes = [_norm(m) for m in q.mean.values()]
    return math.hypot(*gaps) / math.hypot(*sizes, 1e-150)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.double))
