"""Is this the model, and are these the data, that a posterior was learned with?

Three numbers of a few examples, for their outputs at the posterior's mean, targets and losses, kept
in the posterior's record when it is fitted, or at the first analysis of one that was captured.
"""

from __future__ import annotations

import math
import warnings
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from blr_analysis.errors import BLRError, PosteriorError, PosteriorWarning
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.structures import Structure, Tree
from blr_analysis.task import Task

FEW = 8  # examples, spread evenly
CLOSE = 0.05  # of the largest number: more than casts, devices and rounded weights change
APART = 0.1  # of the weights' norm: a model that is elsewhere
ROUNDED = 2.0**-8  # of the norm: weights that were stored in bfloat16
_MET: WeakKeyDictionary[Task, WeakSet[Posterior]] = WeakKeyDictionary()


def fingerprint(task: Task, mean: dict[str, Tensor]) -> dict[str, list[float]]:
    """Outputs, targets and losses of a few examples, a number each; of sequences of the tokens that
    count, however they are padded. One by one, so that long ones need no room together, but for
    rows of tensors."""
    kept: dict[str, list[float]] = {"outputs": [], "targets": [], "losses": []}
    chosen = torch.linspace(0, task.n_data - 1, min(FEW, task.n_data)).long().unique()
    rows = task.examples.is_tensors and not task.likelihood.is_sequence
    for indices in chosen.split(task.batch_size if rows else 1):
        with torch.no_grad(), task.evaluation():
            f, y = task.run(task.fetch(indices), mean, indices)
        losses, counted = task.likelihood.at(indices).nll(f, y), task.likelihood.counted(y)
        if counted is not None:
            f, y = f[counted].unsqueeze(0), y[counted].unsqueeze(0)
        for numbers, values in zip(kept.values(), (f, y, losses), strict=True):
            flat = values.detach().cpu().double().reshape(len(values), -1)
            places = torch.arange(1.0, flat.shape[1] + 1, dtype=torch.float64)
            numbers += (flat @ places.cos()).tolist()
    return kept


def passed_on(posterior: Posterior) -> dict[str, Any]:
    """Its record without what was measured of it and its data, for a posterior made of it."""
    measured = ("fingerprint", "stationarity")
    return {name: entry for name, entry in posterior.record.items() if name not in measured}


def made_of(
    q: Posterior,
    mean: Tree | None = None,
    form: Structure | None = None,
    *,
    n_data: int | None = None,
    **record: Any,
) -> Posterior:
    """Another posterior under the same prior, as ``q`` where nothing is given; ``record`` joins
    what is passed on."""
    return Posterior(
        q.mean if mean is None else mean,
        q.form if form is None else form,
        prior_precision=q.prior,
        n_data=q.n_data if n_data is None else n_data,
        record={**passed_on(q), **record},
    )


def apart(known: Any, seen: Any, what: str) -> int:
    """In how many of the examples two fingerprints differ."""
    a, b = (torch.tensor(record[what], dtype=torch.float64) for record in (known, seen))
    if a.shape != b.shape:
        return max(len(a), len(b))
    return int(((a - b).abs() > CLOSE * max(float(a.abs().max()), 1e-6)).sum())


def recorded(task: Task, q: Posterior) -> bool:
    """Whether these are the model, the data and the loss of the record, as far as it says."""
    if not (known := q.record.get("fingerprint")):
        return False
    seen = fingerprint(task, q.mean)
    return not any(apart(known, seen, what) for what in seen)


def recognise(task: Task, posterior: Posterior, q: Posterior, *, own_weights: bool) -> None:
    """Warn, once, of a posterior that was learned with another model or other data.

    Args:
        q: the same on the task's device.
        own_weights: whether the model should stand at the posterior's mean: not where there are
            several checkpoints of one run.
    """
    met = _MET.setdefault(task, WeakSet())
    if posterior in met:
        return
    met |= WeakSet((posterior, q))
    try:
        seen = fingerprint(task, q.mean)
    except BLRError:  # the analysis will say it better
        return
    known = posterior.record["fingerprint"] = posterior.record.get("fingerprint") or seen
    if (said := _differs(known, seen)) or (own_weights and (said := _elsewhere(task, q))):
        warnings.warn(said, PosteriorWarning, stacklevel=5)
    if said := _too_few_terms(task, posterior):
        warnings.warn(said, PosteriorWarning, stacklevel=5)


def _differs(known: Any, seen: dict[str, list[float]]) -> str:
    for what, words in (("outputs", "another model or other inputs"), ("targets", "other targets")):
        count, tried = apart(known, seen, what), len(seen[what])
        if 2 * count > tried:
            return (
                f"the posterior was learned with {words}: {count} of {tried} examples differ; "
                "pass the task that it was fitted to"
            )
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
        raise PosteriorError(
            "the model's weights are not those that the posterior was learned at: name that model, "
            "or build the index anew"
        )


def _distance(task: Task, q: Posterior) -> float:
    """Of the model's weights from the posterior's mean, in the norm of the mean."""
    own = dict(task.model.named_parameters())
    gap = size = 0.0
    for name, m in q.mean.items():
        gap += float((own[name].detach().to(m) - m).double().square().sum())
        size += float(m.double().square().sum())
    return math.sqrt(gap / max(size, 1e-300))


def _elsewhere(task: Task, q: Posterior) -> str:
    if _distance(task, q) <= APART:
        return ""
    return (
        "the model's weights are not the posterior's mean, where the analysis runs: load the "
        "weights that it was learned at, or fit the posterior to these"
    )
