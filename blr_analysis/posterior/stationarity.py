"""Is this the model, are these the data, that a posterior was learned with? Is the model at the
minimum of the loss that the task names? Everything else assumes it.

    F(θ) = Σ_i ℓ_i(θ) + ½ (θ − θ₀)ᵀ diag(δ) (θ − θ₀),     g = ∇F(m)
    decrement  ½ gᵀ Σ g                what a Newton step from m would gain, in nats
    pull       1/N Σ_i ½ g_iᵀ Σ g_i    what one example pulls at the model with, on average

A group is told from the training that goes on where its pull is ten times the decrement; n examples
that pull independently of each other have n times one example's.

A model and its data are known by three numbers of a few examples, for their outputs at the
posterior's mean, targets and losses, kept in the posterior's record when it is fitted, or at the
first analysis of one that was captured.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunk, chunks
from blr_analysis.backprop.loss import loss_and_gradient
from blr_analysis.backprop.tree import dot, norm
from blr_analysis.errors import BLRError, PosteriorError, PosteriorWarning
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.minimum import Stationarity
from blr_analysis.posterior.structures import Tree
from blr_analysis.task import Task

SAMPLE = 256  # examples whose own gradients are taken
FEW = 8  # examples, spread evenly
ENTRIES = 64  # of a frozen parameter, spread evenly
CLOSE = 0.05  # of the largest number: more than casts, devices and rounded weights change
APART = 0.1  # of the weights' norm: a model that is elsewhere
ALIKE = {"outputs": "another model or other inputs", "targets": "other targets"}
ROUNDED = 2.0**-8  # of the norm: weights that were stored in bfloat16


_MET: WeakKeyDictionary[Task, WeakSet[Posterior]] = WeakKeyDictionary()


@torch.inference_mode(False)  # also where the caller switched it on
def stationarity(task: Task, posterior: Posterior) -> Stationarity:
    """Whether a posterior's mean minimises the task's loss and its prior; kept with the posterior.

    One forward and backward pass over the data, and gradients of up to 256 examples.

    Raises:
        PosteriorError, ModelError, DataError: as :func:`blr_analysis.sensitivity`.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(60, 2), torch.randn(60)
        >>> task = blr.Task(torch.nn.Linear(2, 1), (X, y), likelihood="gaussian")
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
        >>> stationarity(task, q).at_minimum
        False
    """
    q = posterior.on(task)
    kept, known = posterior.stationarity, q.record.get("fingerprint")
    alike = kept is not None and known and kept.likelihood == task.likelihood.recorded
    if kept is not None and alike and not differs(known, fingerprint(task, q.mean), strictly=True):
        return kept
    return measured(task, q, loss_and_gradient(task, q.mean)[0])


def measured(task: Task, q: Posterior, slope: Tree) -> Stationarity:
    """The same from Σ_i ∇ℓ_i, written into the posterior's record."""
    back = q.prior.times(q.prior.gap(q.mean))
    g = {n: s + back[n] for n, s in slope.items()}
    decrement = gain(q, g)
    order = torch.randperm(task.n_data, generator=torch.Generator().manual_seed(0))
    chosen = order[:SAMPLE].sort().values
    single, saturated = 0.0, 0.0
    for chunk in chunks(task.quiet, q.mean, columns=1, indices=chosen):
        error = chunk.likelihood.error(chunk.outputs, chunk.targets)
        terms = chunk.terms(error.unsqueeze(1), last=True)
        single += 0.5 * float(q.form.gram(terms).double().sum())
        saturated += _saturated(chunk)
    size = norm(slope) + norm(back)
    residual = norm(g) / size if size > 0 else 0.0
    pull, said = single / len(chosen), task.likelihood.recorded
    kept = Stationarity(residual, decrement, pull, task.n_data, said)
    q.record["stationarity"] = asdict(kept)
    q.record["saturated"] = saturated / len(chosen)
    q.record.setdefault("frozen_values", frozen_numbers(task, q.mean))
    if "fingerprint" not in q.record:
        q.record["fingerprint"] = fingerprint(task, q.mean)
    return kept


def _saturated(chunk: Chunk) -> int:
    """How many examples have probabilities of 0 and 1 alone, in float64."""
    if chunk.likelihood.is_sequence or not chunk.likelihood.is_classification:
        return 0
    likelihood = chunk.likelihood.plain
    outputs = chunk.outputs.double()
    parts = likelihood.hessian_parts(outputs, chunk.targets)
    if parts is None:
        slopes = likelihood.hessian(outputs, chunk.targets).diagonal(dim1=1, dim2=2)
    else:
        scale, low = parts
        slopes = scale - low.square()
    return int((slopes.amax(1) < torch.finfo(torch.float64).eps).sum())


def gain(q: Posterior, g: Tree) -> float:
    """½ gᵀ Σ g in nats, summed in float64: what a step against this gradient gains."""
    return 0.5 * dot(g, q.form.solve(g))


def fingerprint(task: Task, mean: dict[str, Tensor]) -> dict[str, list[float]]:
    """Outputs, targets and losses of a few examples, a number each; of sequences of the tokens that
    count, however they are padded. One by one, so that long ones need no room together, but for
    rows of tensors."""
    mean = task.cast(mean)
    chosen = torch.linspace(0, task.n_data - 1, min(FEW, task.n_data)).long().unique()
    rows = task.examples.is_tensors and not task.likelihood.is_sequence
    kept, start = torch.zeros(3, len(chosen), dtype=torch.float64), 0
    for indices in chosen.split(task.batch_size if rows else 1):
        own, start = slice(start, start + len(indices)), start + len(indices)
        with torch.no_grad(), task.evaluation():
            f, y = task.run(task.fetch(indices), mean, indices)
        losses, counted = task.likelihood.at(indices).nll(f, y), task.likelihood.counted(y)
        if counted is not None:
            f, y = f[counted].unsqueeze(0), y[counted].unsqueeze(0)
        for numbers, values in zip(kept, (f, y, losses), strict=True):
            flat = values.detach().cpu().double().reshape(len(values), -1)
            places = torch.arange(1.0, flat.shape[1] + 1, dtype=torch.float64)
            numbers[own] = flat @ places.cos()
    return dict(zip(("outputs", "targets", "losses"), kept.tolist(), strict=True))


def recognise(task: Task, posterior: Posterior, q: Posterior, *, own_weights: bool) -> None:
    """Warn, once, of a posterior that was learned with another model or other data.

    Args:
        q: the same on the task's device.
        own_weights: whether the model should stand at the posterior's mean: not where there are
            several checkpoints of one run.
    """
    if posterior in _MET.get(task, ()):
        return
    met(task, posterior, q)
    try:
        seen = fingerprint(task, q.mean)
    except BLRError:  # the analysis will say it better
        return
    known = posterior.record["fingerprint"] = posterior.record.get("fingerprint") or seen
    said = trained_since(task, posterior) or differs(known, seen)
    own_weights = own_weights and "checkpoint" not in posterior.record
    if not said and own_weights and _distance(task, q) > APART:
        said = "the model's weights are not the posterior's mean: load those that it was learned at"
    for words in filter(None, (said, _too_few_terms(task, posterior))):
        warnings.warn(words, PosteriorWarning, stacklevel=5)


def frozen_numbers(task: Task, mean: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """A number and a size of some entries of every parameter that a posterior leaves as it is."""
    numbers = {}
    for name, parameter in task.model.named_parameters():
        if name in mean or not parameter.numel():
            continue
        flat = parameter.detach().reshape(-1)
        places = torch.linspace(0, len(flat) - 1, min(len(flat), ENTRIES), dtype=torch.float64)
        entries = flat[places.long().to(flat.device)].cpu().double()
        phases = torch.arange(1.0, len(entries) + 1, dtype=torch.float64)
        numbers[name] = [float(entries @ phases.cos()), float(entries.norm())]
    return numbers


def trained_since(task: Task, posterior: Posterior) -> str:
    """What is said of parameters that were frozen at the fit and have other values; "" of none."""
    seen = frozen_numbers(task, posterior.mean)
    known = posterior.record.setdefault("frozen_values", seen)
    for name, (number, size) in seen.items():
        before, size_before = known.get(name, (number, size))
        apart = max(abs(number - before), abs(size - size_before))
        if apart > ROUNDED * max(size, size_before):
            return f"{name!r} was frozen at the fit and has changed since: fit again"
    return ""


def met(task: Task, *posteriors: Posterior) -> None:
    """Nothing more is said of these, or of what is made of those that were recognised."""
    _MET.setdefault(task, WeakSet()).update(posteriors)


def differs(known: Any, seen: dict[str, list[float]], *, strictly: bool = False) -> str:
    """What is said of other data than a posterior's; "" of its own. ``strictly``: also of another
    loss, and where one example differs."""
    for what, words in (ALIKE | {"losses": "another loss"} if strictly else ALIKE).items():
        a, b = (torch.tensor(record[what], dtype=torch.float64) for record in (known, seen))
        count = tried = len(b)
        if a.shape == b.shape:
            count = int(((a - b).abs() > CLOSE * max(float(a.abs().max()), 1e-6)).sum())
        if count > (0 if strictly else tried / 2):
            said = f"the posterior was learned with {words}: {count} of {tried} examples differ"
            return f"{said}; pass the task that it was fitted to"
    return ""


def _too_few_terms(task: Task, q: Posterior) -> str:
    """A mean over N·C losses that was taken for one over N: an optimizer does not know C."""
    if not task.mean_over_outputs or "scaling" not in q.record:
        return ""
    n = q.n_data
    told = q.record.get("tokens") or min(q.record.get("ess") or [n])
    with torch.no_grad(), task.evaluation():
        _, y = task.run(task.fetch(torch.zeros(1, dtype=torch.long)), q.mean)
    if y.numel() == 1 or told > n:
        return ""
    return (
        f"the loss is a mean over {n} · {y.numel()} numbers, the precision is of {told:g}; capture "
        f"with n_data={n}, tokens={n * y.numel()} (which IVON takes as its ess)"
    )


def check_weights(task: Task, posterior: Posterior) -> None:
    """Raise :class:`PosteriorError` where a model's weights are not a posterior's mean, by more
    than they are rounded in half precision."""
    if _distance(task, posterior.on(task, same_data=False)) > ROUNDED:
        raise PosteriorError("the weights are not those of the posterior: build the index anew")


def _distance(task: Task, q: Posterior) -> float:
    """Of the model's weights from the posterior's mean, in the norm of the mean."""
    own, gaps, sizes = dict(task.model.named_parameters()), [0.0], [1e-150]
    for name, m in q.mean.items():
        gap = own[name].detach().to(m) - m
        gaps.append(float(torch.linalg.vector_norm(gap, dtype=torch.double)))
        sizes.append(float(torch.linalg.vector_norm(m, dtype=torch.double)))
    return math.hypot(*gaps) / math.hypot(*sizes)
