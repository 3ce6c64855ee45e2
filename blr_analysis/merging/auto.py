"""Which method, which α? Tried on validation tasks, or by the gap that the precisions predict.

Candidates are the average; task arithmetic with some α where there is a base; the merges under the
precisions, with and without shrinkage of their off-diagonals, powers of G and damping, and with the
base's precision where that is given; propagated statistics where there are tasks.

With validation tasks the best mean NLL (or accuracy) decides; without them that of the tasks whose
statistics are propagated: these are of every other example then, and the rest are judged by, since
merges fit best what their statistics are of (what is taken is made with all examples again); the
models have seen them all the same, which validation tasks avoid. The average stays unless the best
is ahead of it by more than the standard error of that, of the differences example by example. Where
there are neither, the predicted gap of each task decides, as a part of what the average loses,

    Σ_t gap_t(θ) / gap_t(average),      gap_t(θ) = ½ (θ − θ_t)ᵀ H_t (θ − θ_t)

since the sizes of H_t are not to be compared: a task whose model is sure of its data has small ones
and would be given up for the others. (Moments of inputs, "gram", are no losses, and are not
balanced.) It is smallest for the "balanced" merge, under the precisions
H_t / gap_t(average), so that only that and those without precisions or with the base's are judged
by it, and shrinkage and the power of G stay as given. It cannot see that H_t are wrong in shape:
only validation does that. Diagonals are wrong in shape where models are far apart, their largest
numbers too large: unless a power is given, their roots stand for H_t in all of this.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import one_of
from blr_analysis.errors import InputError
from blr_analysis.files import Folder
from blr_analysis.merging.at_weights import State, named_tasks, state_of
from blr_analysis.merging.curve import CRITERIA, MergePoint, Merger, Trial, rank
from blr_analysis.merging.in_memory import SETTINGS, merged, one_each
from blr_analysis.merging.job import Job, Weight
from blr_analysis.merging.lora import is_adapter
from blr_analysis.merging.methods import CURVED
from blr_analysis.merging.plan import open_model
from blr_analysis.merging.precisions import precision_in_memory
from blr_analysis.merging.propagation import PropagatedJob
from blr_analysis.posterior import FACTORED
from blr_analysis.task import Task
from blr_analysis.views import Tabular

ALPHAS = (0.2, 0.3, 0.5, 0.7, 1.0)  # of task arithmetic, beside 1/T
SHRINK = (1.0, 0.9, 0.5)
POWERS = (1.0, 0.5, 0.0)
DAMPINGS = (1.0, 0.1)  # of "kron"
ROOT = 0.5  # the power of diagonals
COMMON = ("dtype", "trust")  # what every candidate is made with


@dataclass(frozen=True)
class Choice(Tabular):
    """What ``method="auto"`` took, and what it tried.

    Attributes:
        name: of the candidate that was taken.
        settings: the arguments of :func:`blr_analysis.merge` that make it.
        points: every candidate with what it came to: on validation tasks, or its predicted gap.
        by: "nll", "accuracy" or "gap".
        gain: by how much the best that was tried is ahead of the average, in nats or as a fraction,
            and the standard error of that; None where the average is the best, and by "gap".
        seen: whether it was judged by examples that the models were trained on.
    """

    name: str
    settings: Mapping[str, Any]
    points: tuple[MergePoint, ...]
    by: str
    gain: tuple[float, float] | None = None
    seen: bool = False

    @property
    def average(self) -> MergePoint:
        """What the average came to."""
        return next(p for p in self.points if p.method == "average")

    @property
    def best(self) -> MergePoint:
        """What was taken came to."""
        return next(p for p in self.points if p.method == self.name)

    def __repr__(self) -> str:
        words = {"nll": "NLL", "accuracy": "accuracy", "gap": "predicted gap"}[self.by]
        value = "accuracy" if self.by == "accuracy" else "nll"
        ours, average = getattr(self.best, value), getattr(self.average, value)
        return (
            f"Choice({self.name!r}, {words} {ours:.4g}, average {average:.4g}, best of "
            f"{len(self.points)}{self._note})"
        )

    @property
    def _note(self) -> str:
        seen = "; by examples that the models have seen: validate= is surer" if self.seen else ""
        if self.gain is None:
            return seen
        stays = ", the average stays" if self.name == "average" else ""
        ahead, error = self.gain
        said = f"± {error:.2g}" if math.isfinite(error) else "by one example"
        return f"; ahead by {ahead:.2g} {said}{stays}{seen}"


class Merged(dict[str, Tensor]):
    """A merged state dict that knows how it was chosen."""

    choice: Choice


def candidates(
    count: int,
    *,
    based: bool,
    structure: str,
    settings: Mapping[str, Any],
    balance: Sequence[Weight],
    tasks: Any,
) -> dict[str, dict[str, Any]]:
    """Arguments of :func:`blr_analysis.merge` by a name for each candidate; ``balance`` holds the
    weights of the balanced one."""
    average = {"method": "linear", "weights": [1.0] * count, "normalize": True}
    found: dict[str, dict[str, Any]] = {"average": average}
    if based and not settings["normalize"]:  # else the average again, whatever α
        for alpha in sorted({*ALPHAS, 1 / count}):
            name = f"task_arithmetic, α = {alpha:.3g}"
            found[name] = {"method": "task_arithmetic", "weights": [alpha] * count}
    own = {k: settings[k] for k in (*CURVED, "weights", "normalize")}
    first = {k: settings[k] for k in ("base_precision", "delta")}
    if structure:
        for family in families(structure, settings):
            given = {k: v for k, v in family.items() if v is not None}
            words = "".join(f", {key} {value:g}" for key, value in given.items())
            how = {**own, **family}
            if tasks is not None and structure == "diag":
                how["shrink"] = None  # which is of the moments that are taken on the way
            found[f"fisher, {structure}{words}"] = {"method": "fisher", **how}
            if balance and "gram" not in structure and family == families(structure, settings)[0]:
                name = f"fisher, {structure}{words}, balanced"
                found[name] = {"method": "fisher", **how, "weights": list(balance)}
            if based and (first["base_precision"] is not None or first["delta"]):
                plain = structure not in FACTORED  # whose δ is in units of H
                name = f"gradient_matching, {structure}{'' if plain else words}"
                found[name] = {"method": "gradient_matching", **(own if plain else how), **first}
    if tasks is not None:
        for shrink in dict.fromkeys((settings["shrink"], None, *SHRINK)):
            more = {"tasks": tasks, "shrink": shrink, "weights": settings["weights"]}
            words = "" if shrink is None else f", shrink {shrink:g}"
            found[f"propagated{words}"] = {"method": "fisher", **more}
    return found


def families(structure: str, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Shrinkage, power of G and damping that are tried for a structure, the user's own first."""
    if structure not in FACTORED:
        given = float(settings["power"])
        return [{"power": power} for power in ((ROOT, 1.0) if given == 1 else (given,))]
    shrink = settings["shrink"]
    if structure == "gram":
        return [{"shrink": s} for s in dict.fromkeys((shrink, *SHRINK))]
    damping = 1.0 if settings["damping"] is None else float(settings["damping"])
    own = {
        "shrink": 1.0 if shrink is None else shrink,
        "power": settings["power"],
        "damping": damping,
    }
    grid = itertools.product(POWERS, DAMPINGS)
    tried = [{"shrink": own["shrink"], "power": p, "damping": d} for p, d in grid]
    return [own, *(family for family in tried if family != own)]


def chosen_job(job: Job, validate: Any, tasks: Sequence[Task] | None = None) -> tuple[Job, Choice]:
    """A merge of folders by the best of :func:`candidates`; with ``tasks``, the models' data, also
    by statistics that are taken on the way."""
    choice = chosen(
        job.base,
        [m.model for m in job.members],
        **{k: getattr(job, k) for k in SETTINGS - {"method"}},
        precisions=[m.precision for m in job.members],
        weights=[m.weight for m in job.members],
        base_precision=job.base_precision,
        n_data=[m.n_data for m in job.members],
        tasks=tasks,
        validate=validate,
        criterion="nll",
    )
    how = choice.settings
    weights = how.get("weights") or [m.weight for m in job.members]
    members = tuple(replace(m, weight=w) for m, w in zip(job.members, weights, strict=True))
    own = {k: how[k] for k in SETTINGS if k in how}
    made = replace(job, members=members, **own)
    if "tasks" in how:
        made = PropagatedJob(**{f.name: getattr(made, f.name) for f in fields(made)})
    return made, choice


def chosen(
    base: Any, models: Sequence[Any], *, validate: Any, criterion: str, **settings: Any
) -> Choice:
    """The best of :func:`candidates`; the arguments are those of :func:`blr_analysis.merge`.

    Raises:
        InputError: nothing to choose by; an unknown criterion.
        BLRError: as :func:`blr_analysis.merge`.
    """
    one_of("criterion", criterion, CRITERIA)
    given, tasks = settings["precisions"], settings["tasks"]
    there = [p is not None for p in given or ()]
    if any(there) and not all(there):
        raise InputError('method="auto" takes a precision of every model, or none')
    complete = any(there)
    known, seen = tasks, validate is None
    if validate is None and tasks is not None:
        known, validate = zip(*map(_halves, tasks), strict=True)
    if validate is None and not complete:
        raise InputError('method="auto" chooses by validate=, tasks= or precisions=: give one')
    start = None if base is None else _state(base, "base", None)
    states = [_state(m, f"models[{t}]", base) for t, m in enumerate(models)]
    numbers = settings["n_data"] or [None] * len(states)
    settings |= {"precisions": given if complete else None}
    opened = [
        precision_in_memory(f"precisions[{t}]", p, n)
        for t, (p, n) in enumerate(zip(settings["precisions"] or (), numbers, strict=False))
    ]
    kinds = {p.structure for p in opened}
    structure = " and ".join(sorted(kinds))
    common = {k: settings[k] for k in COMMON}
    if structure == "diag":
        opened = [p.raised(families(structure, settings)[0]["power"]) for p in opened]
    average = merged(None, states, method="linear", progress=False, **common)
    gaps = [p.gap(average, s) for p, s in zip(opened, states, strict=True)] if opened else []
    kind: Any = {"based": base is not None, "structure": structure, "settings": settings}
    kind["balance"] = _balanced(settings["weights"], gaps)
    found = candidates(len(states), **kind, tasks=tasks)
    if validate is not None:
        tried = candidates(len(states), **kind, tasks=known)
        trial, points = _tried(start, states, validate, tried, common, criterion)
        best = min(points, key=lambda point: rank(point, criterion))
        average = next(p for p in points if p.method == "average")
        if best is average or average.failure:
            return Choice(best.method, found[best.method], tuple(points), criterion, seen=seen)
        gain = trial.gain(best.method, "average", criterion)
        name = best.method if gain[0] > gain[1] else "average"
        return Choice(name, found[name], tuple(points), criterion, gain, seen)
    own = families(structure, settings)[0] if structure in FACTORED else {}
    found = {
        name: how
        for name, how in found.items()
        if all(how.get(key, value) == value for key, value in own.items())
    }
    points = _predicted(start, states, opened, found, common)

    def order(point: MergePoint) -> float:
        pairs = zip(point.nlls, gaps, strict=True)
        return round(sum(new / old if old else math.inf for new, old in pairs), 9)

    best = min(points, key=order)
    return Choice(best.method, found[best.method], tuple(points), "gap")


def _balanced(weights: Any, gaps: Sequence[float]) -> list[Weight]:
    """α_t / gap_t, times the mean gap; none where they are not all above 0."""
    if not gaps or min(gaps) <= 0:
        return []
    mean = sum(gaps) / len(gaps)
    shares = [mean / gap for gap in gaps]
    given = one_each("weights", weights, len(gaps), 1.0)
    if any(not callable(a) and a <= 0 for a in given):
        return []

    def scaled(alpha: Weight, share: float) -> Weight:
        return (lambda name: alpha(name) * share) if callable(alpha) else alpha * share

    return [scaled(alpha, share) for alpha, share in zip(given, shares, strict=True)]


def _halves(task: Task) -> tuple[Task, Task]:
    order = torch.arange(task.n_data)
    return (task, task) if task.n_data == 1 else (task.subset(order[::2]), task.subset(order[1::2]))


def _state(given: Any, name: str, base: Any) -> State:
    """Tensors in memory; an adapter applied to its base."""
    if isinstance(given, str | os.PathLike) and is_adapter(Path(given)):
        source = open_model(Path(given), None if base is None else Folder.open(base))
        return {n: source.tensor(n) for n in source.specs}
    return state_of(given, name)


def _tried(
    base: State | None,
    states: Sequence[State],
    validate: Any,
    found: Mapping[str, dict[str, Any]],
    common: Mapping[str, Any],
    criterion: str,
) -> tuple[Trial, list[MergePoint]]:
    def maker(how: Mapping[str, Any]) -> Merger:
        def make(base: Any, models: Any, weights: Any) -> Any:
            return merged(base, models, progress=False, **{**common, **how})

        return Merger(make)

    mergers = {name: maker(how) for name, how in found.items()}
    first = states[0] if base is None else base
    trial = Trial(first, list(states), named_tasks(validate, "validate"), mergers, {})
    trial.check(criterion)
    return trial, [trial.point(name, _weights(how)) for name, how in found.items()]


def _weights(how: Mapping[str, Any]) -> tuple[float, ...]:
    given = how.get("weights")
    if isinstance(given, int | float):
        return (float(given),)
    return tuple(float(w) for w in given or () if not callable(w))


def _predicted(
    base: State | None,
    states: Sequence[State],
    opened: Sequence[Any],
    found: Mapping[str, dict[str, Any]],
    common: Mapping[str, Any],
) -> list[MergePoint]:
    points = []
    for name, how in found.items():
        made = merged(base, list(states), progress=False, **{**common, **how})
        gaps = tuple(p.gap(made, s) for p, s in zip(opened, states, strict=True))
        points.append(MergePoint(name, _weights(how), gaps, (math.nan,) * len(gaps)))
    return points
