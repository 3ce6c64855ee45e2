"""Which merge? What is tried, and what is taken: by losses, or by the gap that precisions predict.

Tried are the average, task arithmetic over a few α where there is a base, and merges by the
precisions: diagonals as they are and by their roots, "gram" over shrinkages, "kron" over powers of
G and dampings, the user's own settings first; all of them "balanced"; gradient matching with the
base's precision where that is given; propagated statistics where there are tasks.

With validation tasks the best mean NLL decides; without them that of the tasks whose statistics are
propagated: these are of every other example then, and the rest are judged by, since merges fit best
what their statistics are of (what is taken is made with all examples again); the models have seen
them all the same, which validation tasks avoid. The average stays unless the best is ahead of it by
more than the standard error of that, of the differences example by example. Where there are
neither, the predicted gap of each task decides, as a part of what the average loses,

    Σ_t gap_t(θ) / gap_t(average),      gap_t(θ) = ½ (θ − θ_t)ᵀ H_t (θ − θ_t)

since the sizes of H_t are not to be compared: a task whose model is sure of its data has small ones
and would be given up for the others. (Moments of inputs, "gram", are no losses, and are not
balanced.) It is smallest for the "balanced" merge, under the precisions H_t / gap_t(average), so
that only that and those without precisions or with the base's are judged by it, and shrinkage and
the power of G stay as given. It cannot see that H_t are wrong in shape: only validation does that.
Diagonals are wrong in shape where models are far apart, their largest numbers too large: unless a
power is given, their roots stand for H_t in all of this.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from blr_analysis.backprop.loss import Evaluation
from blr_analysis.errors import InputError
from blr_analysis.merging.at_weights import named_tasks
from blr_analysis.merging.curve import MergePoint, evaluations, point_of
from blr_analysis.merging.folders import collect
from blr_analysis.merging.job import Job
from blr_analysis.merging.lora import open_model
from blr_analysis.merging.plan import make_plan
from blr_analysis.merging.precisions import StoredPrecision, open_precision
from blr_analysis.posterior import FACTORED
from blr_analysis.task import Task
from blr_analysis.views import Tabular

ALPHAS = (0.2, 0.3, 0.5, 0.7, 1.0)  # of task arithmetic, beside 1/T
SHRINK = (1.0, 0.9, 0.5)
POWERS = (1.0, 0.5, 0.0)
DAMPINGS = (1.0, 0.1)  # of "kron"
ROOT = 0.5  # the power of diagonals
AVERAGE = "average"


@dataclass(frozen=True)
class Choice(Tabular):
    """What ``method="auto"`` took, and what it tried.

    Attributes:
        name: of the candidate that was taken.
        settings: by which it differs from what was given: fields of :class:`.Job`.
        points: every candidate with what it came to: on validation tasks, or its predicted gap.
        by: "nll" or "gap".
        gain: by how much the best that was tried is ahead of the average, in nats, and the standard
            error of that; None where the average is the best, and by "gap".
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
        return next(p for p in self.points if p.method == AVERAGE)

    @property
    def best(self) -> MergePoint:
        """What was taken came to."""
        return next(p for p in self.points if p.method == self.name)

    def __repr__(self) -> str:
        words = {"nll": "NLL", "gap": "predicted gap"}[self.by]
        ahead = f"; ahead by {self.gain[0]:.2g} ± {self.gain[1]:.2g}" if self.gain else ""
        stays = ", the average stays" if self.gain and self.name == AVERAGE else ""
        seen = "; by examples that the models have seen: validate= is surer" if self.seen else ""
        return (
            f"Choice({self.name!r}, {words} {self.best.nll:.4g}, average {self.average.nll:.4g}, "
            f"best of {len(self.points)}{ahead}{stays}{seen})"
        )


def chosen(job: Job, validate: Any) -> tuple[Job, Choice]:
    """The merge by the best of :func:`candidates`.

    Raises:
        InputError: nothing to choose by.
        BLRError: as :func:`blr_analysis.merge`.
    """
    there = [m.precision is not None for m in job.members]
    if any(there) != all(there):
        raise InputError('method="auto" takes a precision of every model, or none')
    seen, known = validate is None, job.tasks
    if seen and job.tasks is not None:
        known, validate = zip(*map(_halves, job.tasks), strict=True)
    if validate is None and not all(there):
        raise InputError('method="auto" chooses by validate=, tasks= or precisions=: give one')
    held, opened = _in_memory(job)
    structure = " and ".join(sorted({p.structure for p in opened}))
    own = families(structure, job)[0] if structure else {}
    if structure == "diag":
        opened = [p.raised(own["power"]) for p in opened]
    average = _made(held, {"method": "linear", "weights": [1.0] * len(opened or there)})
    gaps = [p.gap(average, m.model) for p, m in zip(opened, held.members, strict=False)]
    found = candidates(job, structure, gaps)
    if validate is None:
        return _by_gap(job, held, opened, gaps, found, own if structure in FACTORED else {})
    tasks, points, judged = named_tasks(validate, "validate"), [], {}
    for name, how in found.items():
        state = _made(held, {**how, "tasks": known} if how["tasks"] else how)
        judged[name] = evaluations(tasks, state, name)
        points.append(point_of(name, _numbers(how), judged[name]))
    best, gain = min(points, key=lambda p: round(p.nll, 6)).method, None
    if best != AVERAGE:
        gain = _gain(judged[best], judged[AVERAGE])
    name = AVERAGE if gain is not None and gain[0] <= gain[1] else best
    choice = Choice(name, found[name], tuple(points), "nll", gain, seen)
    return changed(job, found[name]), choice


def _by_gap(
    job: Job,
    held: Job,
    opened: Sequence[StoredPrecision],
    gaps: Sequence[float],
    found: Mapping[str, dict[str, Any]],
    own: Mapping[str, Any],
) -> tuple[Job, Choice]:
    found = {n: how for n, how in found.items() if all(how.get(k, v) == v for k, v in own.items())}
    points = []
    for name, how in found.items():
        state, nan = _made(held, how), (math.nan,) * len(gaps)
        ours = tuple(p.gap(state, m.model) for p, m in zip(opened, held.members, strict=True))
        points.append(MergePoint(name, _numbers(how), ours, nan))

    def lost(point: MergePoint) -> float:
        pairs = zip(point.nlls, gaps, strict=True)
        return round(sum(new / old if old else math.inf for new, old in pairs), 9)

    name = min(points, key=lost).method
    return changed(job, found[name]), Choice(name, found[name], tuple(points), "gap")


def candidates(job: Job, structure: str, gaps: Sequence[float]) -> dict[str, dict[str, Any]]:
    """What each candidate changes of a job, by its name; ``weights`` are the members'."""
    count, based = len(job.members), job.base is not None
    plain = {"shrink": None, "power": 1.0, "damping": None, "tasks": None}
    found: dict[str, dict[str, Any]] = {
        AVERAGE: {**plain, "method": "linear", "weights": [1.0] * count, "normalize": True}
    }
    if based and not job.normalize:  # else the average again, whatever α
        for alpha in sorted({*ALPHAS, 1 / count}):
            how = {**plain, "method": "task_arithmetic", "weights": [alpha] * count}
            found[f"task_arithmetic, α = {alpha:.3g}"] = how
    for k, family in enumerate(families(structure, job) if structure else ()):
        words = "".join(f", {key} {v:g}" for key, v in family.items() if v is not None)
        how = {**plain, **family}
        found[f"fisher, {structure}{words}"] = {**how, "method": "fisher"}
        if k == 0 and "gram" not in structure and (balance := _balanced(job, gaps)):
            name = f"fisher, {structure}{words}, balanced"
            found[name] = {**how, "method": "fisher", "weights": balance}
        if based and (job.base_precision is not None or job.delta):
            if structure not in FACTORED:  # whose δ is in units of H
                how, words = {**plain, "power": job.power}, ""
            found[f"gradient_matching, {structure}{words}"] = {**how, "method": "gradient_matching"}
    if job.tasks is not None:
        for shrink in dict.fromkeys((job.shrink, None, *SHRINK)):
            words = "" if shrink is None else f", shrink {shrink:g}"
            how = {**plain, "method": "fisher", "shrink": shrink, "tasks": job.tasks}
            found[f"propagated{words}"] = {**how, "normalize": None}
    return found


def families(structure: str, job: Job) -> list[dict[str, Any]]:
    """Shrinkage, power of G and damping that are tried for a structure, the user's own first."""
    if structure not in FACTORED:
        return [{"power": p} for p in ((ROOT, 1.0) if job.power == 1 else (float(job.power),))]
    if structure == "gram":
        same = {"damping": job.damping}
        return [{"shrink": s, **same} for s in dict.fromkeys((job.shrink, *SHRINK))]
    shrink = 1.0 if job.shrink is None else job.shrink
    own = (float(job.power), 1.0 if job.damping is None else float(job.damping))
    grid = dict.fromkeys((own, *itertools.product(POWERS, DAMPINGS)))
    return [{"shrink": shrink, "power": power, "damping": damping} for power, damping in grid]


def changed(job: Job, how: Mapping[str, Any]) -> Job:
    """A job with the changes of a candidate."""
    more = dict(how)
    weights = more.pop("weights", [m.weight for m in job.members])
    if more["method"] != "gradient_matching":
        more |= {"base_precision": None, "delta": 0.0}
    bare = {"precision": None} if more["method"] in ("linear", "task_arithmetic") else {}
    pairs = zip(job.members, weights, strict=True)
    members = tuple(replace(m, weight=a, data=None, **bare) for m, a in pairs)
    return replace(job, **more, members=members)


def _made(held: Job, how: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    usual = {"shrink": None, "power": 1.0, "damping": None, "tasks": None}
    return collect(make_plan(changed(held, {**usual, **how})), False)


def _in_memory(job: Job) -> tuple[Job, list[StoredPrecision]]:
    """A job whose models are state dicts, and their precisions."""
    base = None if job.base is None else open_model(job.base, "base")
    sources = [open_model(m.model, f"models[{t}]", base) for t, m in enumerate(job.members)]
    states = [{n: s.tensor(n) for n in s.specs} for s in sources]
    members = [replace(m, model=s) for m, s in zip(job.members, states, strict=True)]
    opened = [
        open_precision(m.precision, m.n_data, label=f"precisions[{t}]")
        for t, m in enumerate(job.members)
        if m.precision is not None
    ]
    start = None if base is None else {n: base.tensor(n) for n in base.specs}
    return replace(job, base=start, members=tuple(members), rank=None, out_dtype=None), opened


def _balanced(job: Job, gaps: Sequence[float]) -> list[float]:
    """α_t / gap_t, times the mean gap; none where they are not all numbers above 0."""
    given = [m.weight for m in job.members]
    alphas = [a for a in given if not callable(a) and a > 0]
    if len(alphas) < len(given) or not gaps or min(gaps) <= 0:
        return []
    mean = sum(gaps) / len(gaps)
    return [a * mean / gap for a, gap in zip(alphas, gaps, strict=True)]


def _halves(task: Task) -> tuple[Task, Task]:
    order = torch.arange(task.n_data)
    return (task, task) if task.n_data == 1 else (task.subset(order[::2]), task.subset(order[1::2]))


def _numbers(how: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(float(w) for w in how.get("weights", ()))


def _gain(ours: Sequence[Evaluation], average: Sequence[Evaluation]) -> tuple[float, float]:
    """By how much a merge is better in the mean over the tasks, and the standard error of that."""
    apart = [(b.counted - a.counted).double() for a, b in zip(ours, average, strict=True)]
    variances = [float(d.var()) / len(d) if len(d) > 1 else math.inf for d in apart]
    mean = sum(float(d.mean()) for d in apart) / len(apart)
    return mean, math.sqrt(sum(variances)) / len(apart)
