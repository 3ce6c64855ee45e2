"""Which merge? Several are tried on data, and the best is taken.

Tried are the average, task arithmetic over a few α where there is a base, and merges by the
precisions: diagonals as they are and by their roots, "gram" over shrinkages, "kron" over powers of
G and dampings, the user's own settings first; gradient matching with the base's precision where
that is given; propagated statistics where there are tasks.

The best mean NLL on the validation tasks decides. Without them that of the tasks whose statistics
are propagated: these are of every other example then, and the rest are judged by, since merges fit
best what their statistics are of (what is taken is made with all examples again); the models have
seen them all the same, which validation tasks avoid. The average stays unless the best is ahead of
it by more than the standard error of that, of the differences example by example.
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
from blr_analysis.files import Source
from blr_analysis.merging.at_weights import named_tasks
from blr_analysis.merging.curve import MergePoint, evaluations, point_of
from blr_analysis.merging.folders import collect
from blr_analysis.merging.job import Job
from blr_analysis.merging.lora import open_model
from blr_analysis.merging.plan import make_plan
from blr_analysis.merging.precisions import open_precision
from blr_analysis.merging.tokens import tokens_of
from blr_analysis.posterior import FACTORED
from blr_analysis.task import Task

ALPHAS = (0.2, 0.3, 0.5, 0.7, 1.0)  # of task arithmetic, beside 1/T
SHRINK = (1.0, 0.9, 0.5)
POWERS = (1.0, 0.5, 0.0)
DAMPINGS = (1.0, 0.1)  # of "kron"
ROOT = 0.5  # the power of diagonals
AVERAGE = "average"
PLAIN = {"shrink": None, "power": 1.0, "damping": None, "tasks": None}
BARE = {**PLAIN, "base_precision": None, "delta": 0.0}


@dataclass(frozen=True)
class Choice:
    """What ``method="auto"`` took, and what it tried.

    Attributes:
        name: of the candidate that was taken.
        settings: by which it differs from what was given: fields of :class:`.Job`, and the weights.
        points: every candidate with what it came to.
        gain: by how much the best that was tried is ahead of the average, in nats, and the standard
            error of that; None where the average is the best.
        seen: whether it was judged by examples that the models were trained on.
    """

    name: str
    settings: Mapping[str, Any]
    points: tuple[MergePoint, ...]
    gain: tuple[float, float] | None
    seen: bool

    @property
    def average(self) -> MergePoint:
        """What the average came to."""
        return next(p for p in self.points if p.method == AVERAGE)

    @property
    def best(self) -> MergePoint:
        """What was taken came to."""
        return next(p for p in self.points if p.method == self.name)

    def __repr__(self) -> str:
        ahead = f"; ahead by {self.gain[0]:.2g} ± {self.gain[1]:.2g}" if self.gain else ""
        stays = ", the average stays" if self.gain and self.name == AVERAGE else ""
        seen = "; by examples that the models have seen: validate= is surer" if self.seen else ""
        return (
            f"Choice({self.name!r}, NLL {self.best.nll:.4g}, average {self.average.nll:.4g}, "
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
    if validate is None and job.tasks is not None:
        known, validate = zip(*map(_halves, job.tasks), strict=True)
    if validate is None:
        raise InputError('method="auto" chooses by data: give validate= or tasks=')
    held, structure = _in_memory(job)
    found, judged = candidates(job, structure), {}
    tasks = named_tasks(validate, "validate")
    for name, how in found.items():
        tried = changed(held, {**how, "tasks": known} if how["tasks"] else how)
        judged[name] = evaluations(tasks, collect(make_plan(tried), False), name)
    weights = {name: tuple(map(float, how.get("weights", ()))) for name, how in found.items()}
    points = tuple(point_of(name, weights[name], judged[name]) for name in found)
    best = min(points, key=lambda p: round(p.nll, 6)).method
    gain = None if best == AVERAGE else _gain(judged[best], judged[AVERAGE])
    name = AVERAGE if gain is not None and gain[0] <= gain[1] else best
    return changed(job, found[name]), Choice(name, found[name], points, gain, seen)


def candidates(job: Job, structure: str) -> dict[str, dict[str, Any]]:
    """What each candidate changes of a job, by its name; ``weights`` are the members'."""
    count, based = len(job.members), job.base is not None
    average = {"method": "linear", "weights": [1.0] * count, "normalize": True}
    found: dict[str, dict[str, Any]] = {AVERAGE: {**BARE, **average}}
    if based and not job.normalize:  # else the average again, whatever α
        for alpha in sorted({*ALPHAS, 1 / count}):
            how = {"method": "task_arithmetic", "weights": [alpha] * count}
            found[f"task_arithmetic, α = {alpha:.3g}"] = {**BARE, **how}
    for family in families(structure, job) if structure else ():
        words = "".join(f", {key} {v:g}" for key, v in family.items() if v is not None)
        found[f"fisher, {structure}{words}"] = {**BARE, **family, "method": "fisher"}
        if based and (job.base_precision is not None or job.delta):
            how = {**PLAIN, **family, "method": "gradient_matching"}
            found[f"gradient_matching, {structure}{words}"] = how
    if job.tasks is not None:
        for shrink in dict.fromkeys((job.shrink, None, *SHRINK)):
            words = "" if shrink is None else f", shrink {shrink:g}"
            how = {"method": "fisher", "shrink": shrink, "tasks": job.tasks, "normalize": None}
            found[f"propagated{words}"] = {**BARE, **how}
    return found


def families(structure: str, job: Job) -> list[dict[str, Any]]:
    """Shrinkage, power of G and damping that are tried for a structure, the user's own first."""
    if structure not in FACTORED:
        return [{"power": p} for p in dict.fromkeys((job.power, ROOT, 1.0))]
    if structure == "gram":
        shrinks = dict.fromkeys((job.shrink, *SHRINK))
        return [{"shrink": s, "damping": job.damping} for s in shrinks]
    own = (job.power, 1.0 if job.damping is None else job.damping)
    grid = dict.fromkeys((own, *itertools.product(POWERS, DAMPINGS)))
    shrink = 1.0 if job.shrink is None else job.shrink
    return [{"shrink": shrink, "power": power, "damping": damping} for power, damping in grid]


def changed(job: Job, how: Mapping[str, Any]) -> Job:
    """A job with the changes of a candidate."""
    more = dict(how)
    weights = more.pop("weights", [m.weight for m in job.members])
    bare = {"precision": None} if more["method"] in ("linear", "task_arithmetic") else {}
    pairs = zip(job.members, weights, strict=True)
    members = tuple(replace(m, weight=a, data=None, **bare) for m, a in pairs)
    return replace(job, **more, members=members)


def _in_memory(job: Job) -> tuple[Job, str]:
    """A job whose models are state dicts, and the structure of their precisions."""
    base = None if job.base is None else open_model(job.base, "base")
    sources = [open_model(m.model, f"models[{t}]", base) for t, m in enumerate(job.members)]
    _refuse_borrowed_rows(job, base, sources)
    start, *states = (None if s is None else s.tensors() for s in (base, *sources))
    members = tuple(replace(m, model=s) for m, s in zip(job.members, states, strict=True))
    given = [m for m in members if m.precision is not None]
    kinds = {open_precision(m.precision, m.n_data).structure for m in given}
    held = replace(job, base=start, members=members, out_dtype=None, tokenizer_source=None)
    return held, " and ".join(sorted(kinds))


def _refuse_borrowed_rows(job: Job, base: Source | None, sources: Sequence[Source]) -> None:
    """Raise where models have other tokens, which no task can be asked about for all of them."""
    models = [m.model for m in job.members]
    opened = list(sources)
    if base is not None:
        models.insert(0, job.base)
        opened.insert(0, base)
    if tokens_of(models, opened, job.tokenizer_source).rows is not None:
        raise InputError('method="auto" takes models of one vocabulary: name a method')


def _halves(task: Task) -> tuple[Task, Task]:
    order = torch.arange(task.n_data)
    return (task, task) if task.n_data == 1 else (task.subset(order[::2]), task.subset(order[1::2]))


def _gain(ours: Sequence[Evaluation], average: Sequence[Evaluation]) -> tuple[float, float]:
    """By how much a merge is better in the mean over the tasks, and the standard error of that."""
    apart = [(b.counted - a.counted).double() for a, b in zip(ours, average, strict=True)]
    variances = [float(d.var()) / len(d) if len(d) > 1 else math.inf for d in apart]
    mean = sum(float(d.mean()) for d in apart) / len(apart)
    return mean, math.sqrt(sum(variances)) / len(apart)
