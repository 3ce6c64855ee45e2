"""Which merge? Several are tried on data, and the best is chosen; without data a safe one is.

These merges are tried:

* the average;
* with a base, the base itself, and task arithmetic over a few α;
* with precisions, the default (see below);
* with precisions, the Fisher average: diagonals as they are, their roots, and damped; "gram" over
  shrinkages and dampings; "kron" over powers of G and dampings. The user's settings come first;
* with the base's precision, gradient matching over the same settings;
* with the models' data, RegMean++ over shrinkages.

The mean NLL on the validation tasks decides. Without these, the models' own data decide. A merge
does best on the examples that its statistics are measured on. So the statistics come from every
other example, and the remaining examples judge; the chosen merge is then made with all of them. The
models were trained on these examples, however, which validation tasks avoid. The average is chosen
unless the best merge is ahead of it by more than a standard error, which is taken over the
differences example by example.

Without any data nothing is tried. With precisions, the merge is then (Σ α H)⁻¹ Σ α H θ with
balanced precisions H / mean(H) + d 1, the mean over each layer or tensor. This is also the default
of :func:`blr_analysis.merge`:

* diagonals take d = 3: three quarters of every weight are an average;
* so does "kron" with A = Σ ‖g‖² a aᵀ, the moments of the inputs a weighed by the gradients g;
* "gram" takes d = 10, because its moments Σ a aᵀ do not say which inputs matter;
* where a model has fewer examples than a layer has inputs, its factors are mostly chance in many
  directions. There "kron" takes its diagonal, and "gram" the average.

Balanced, all models count alike in the damping, and the larger d, the nearer is the merge to the
average. Damped by their own means instead, the models would be weighed by the sizes of their
precisions: a model that is sure of its data has hardly any. Without d, whole factors are better on
some networks and worse than the average on others, which only data can tell. Without precisions,
the average is chosen. The settings were selected among some hundred, on seeds 11 and 12 of the
networks of ``python -m benchmarks.merging.contest``, on a seed of digits and on MiniLM.
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
from blr_analysis.merging.plan import make_plan
from blr_analysis.merging.precisions import open_precision
from blr_analysis.merging.sources import open_model
from blr_analysis.merging.tokens import tokens_of
from blr_analysis.posterior import FACTORED
from blr_analysis.task import Task

# The settings that are tried.
ALPHAS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)  # of task arithmetic, beside 1/T
SHRINK = (1.0, 0.9, 0.5)
POWERS = (1.0, 0.5, 0.0)
DAMPINGS = (1.0, 0.1)
ROOT = 0.5  # the power of diagonals
AVERAGE = "average"
BASE = "base"
PLAIN = {"shrink": None, "power": 1.0, "damping": None, "tasks": None}
WITHOUT_PRECISIONS = {**PLAIN, "base_precision": None, "delta": 0.0}


@dataclass(frozen=True)
class Choice:
    """The merge that ``method="auto"`` has chosen, and those that it has tried.

    Attributes:
        name: the name of the chosen candidate.
        settings: its changes to the job: fields of :class:`.Job`, and ``weights``.
        points: every candidate with its losses; empty where there were no data to try them on.
        gain: by how much the best candidate is ahead of the average, in nats, and the standard
            error of this; None where the average is the best.
        seen: whether the examples that judged are among those the models were trained on.
    """

    name: str
    settings: Mapping[str, Any]
    points: tuple[MergePoint, ...]
    gain: tuple[float, float] | None
    seen: bool

    @property
    def average(self) -> MergePoint:
        """The average with its losses."""
        return self._point(AVERAGE)

    @property
    def best(self) -> MergePoint:
        """The chosen merge with its losses."""
        return self._point(self.name)

    def _point(self, name: str) -> MergePoint:
        """The candidate of this name with its losses."""
        for point in self.points:
            if point.method == name:
                return point
        raise InputError("nothing was tried: give validate= or tasks=")

    def __repr__(self) -> str:
        if not self.points:
            return f"Choice({self.name!r}: no data to try others on, validate= or tasks=)"
        facts = [
            repr(self.name),
            f"NLL {self.best.nll:.4g}",
            f"average {self.average.nll:.4g}",
            f"best of {len(self.points)}",
        ]
        text = ", ".join(facts)
        if self.gain:
            text += f"; ahead by {self.gain[0]:.2g} ± {self.gain[1]:.2g}"
            if self.name == AVERAGE:
                text += ", the average stays"
        if self.name == BASE:
            text += "; no merge is better than the base"
        if self.seen:
            text += "; by examples that the models have seen: validate= is surer"
        return f"Choice({text})"


def chosen(job: Job, validate: Any) -> tuple[Job, Choice]:
    """The job with the best of :func:`candidates`, or :func:`untried` where there are no data.

    Args:
        validate: tasks with held-out data; None: the models' own data judge.

    Raises:
        InputError: precisions of some models only.
        BLRError: as :func:`blr_analysis.merge`.
    """
    have_precisions = [member.precision is not None for member in job.members]
    if any(have_precisions) != all(have_precisions):
        raise InputError('method="auto" takes a precision of every model, or none')
    has_validation = validate is not None
    tasks = job.tasks
    if not has_validation:
        if tasks is None:
            return untried(job)
        tasks, validate = zip(*map(_halves, tasks), strict=True)
    in_memory, structure = _in_memory(job)
    settings_of = candidates(job, structure)
    judges = named_tasks(validate, "validate")
    judged: dict[str, list[Evaluation]] = {}
    for name, settings in settings_of.items():
        if settings["tasks"]:
            settings = {**settings, "tasks": tasks}
        state = collect(make_plan(changed(in_memory, settings)), False)
        judged[name] = evaluations(judges, state, name)
    points = tuple(
        point_of(name, tuple(map(float, settings.get("weights", ()))), judged[name])
        for name, settings in settings_of.items()
    )
    best = min(points, key=lambda point: round(point.nll, 6)).method
    gain = None if best == AVERAGE else _gain(judged[best], judged[AVERAGE])
    is_within_error = gain is not None and gain[0] <= gain[1]
    name = AVERAGE if is_within_error else best
    choice = Choice(name, settings_of[name], points, gain, not has_validation)
    return changed(job, settings_of[name]), choice


def untried(job: Job) -> tuple[Job, Choice]:
    """The merge that is chosen where there are no data to try others on."""
    if all(member.precision is None for member in job.members):
        settings = _average(job)
        return changed(job, settings), Choice(AVERAGE, settings, (), None, seen=False)
    has_start = job.base_precision is not None or job.delta != 0
    if has_start:
        settings = {"method": "gradient_matching"}
        name = "gradient matching by the given base precision"
        return changed(job, settings), Choice(name, settings, (), None, seen=False)
    safe_job = by_precisions(job)
    settings = {"method": safe_job.method, "balanced": True}
    return safe_job, Choice("fisher, balanced", settings, (), None, seen=False)


def by_precisions(job: Job) -> Job:
    """The average by balanced precisions; what the user sets stays.

    Weights are normalized, so that entries without any precision are averaged.
    """
    normalize = True if job.normalize is None else job.normalize
    return replace(
        job,
        method="fisher",
        base_precision=None,
        delta=0.0,
        balanced=True,
        normalize=normalize,
    )


def _average(job: Job) -> dict[str, Any]:
    """The settings of the average."""
    ones = [1.0] * len(job.members)
    return {**WITHOUT_PRECISIONS, "method": "linear", "weights": ones, "normalize": True}


def candidates(job: Job, structure: str) -> dict[str, dict[str, Any]]:
    """By the name of each candidate, its changes to a job.

    The keys are fields of :class:`.Job`, and ``weights``, which are those of its members.
    """
    settings = {AVERAGE: _average(job)}
    settings |= _arithmetic_candidates(job)
    if structure:
        settings |= _precision_candidates(job, structure)
    if job.tasks is not None:
        settings |= _propagated_candidates(job)
    return settings


def _arithmetic_candidates(job: Job) -> dict[str, dict[str, Any]]:
    """The base, and task arithmetic over a few α; normalised weights would give the average."""
    if job.base is None or job.normalize:
        return {}
    count = len(job.members)
    alphas = {f"task_arithmetic, α = {alpha:.3g}": alpha for alpha in sorted({*ALPHAS, 1 / count})}
    return {
        name: {**WITHOUT_PRECISIONS, "method": "task_arithmetic", "weights": [alpha] * count}
        for name, alpha in {BASE: 0.0, **alphas}.items()
    }


def _precision_candidates(job: Job, structure: str) -> dict[str, dict[str, Any]]:
    """The default, Fisher averages, and gradient matching where there is an H_0."""
    has_start = job.base_precision is not None or job.delta
    default = {"method": "fisher", "balanced": True, "normalize": True}
    settings = {f"fisher, {structure}, balanced": {**WITHOUT_PRECISIONS, **default}}
    for family in families(structure, job):
        words = "".join(f", {key} {value:g}" for key, value in family.items() if value is not None)
        fisher = {**WITHOUT_PRECISIONS, **family, "method": "fisher"}
        settings[f"fisher, {structure}{words}"] = fisher
        if job.base is not None and has_start:
            matching = {**PLAIN, **family, "method": "gradient_matching"}
            settings[f"gradient_matching, {structure}{words}"] = matching
    return settings


def _propagated_candidates(job: Job) -> dict[str, dict[str, Any]]:
    """RegMean++ over shrinkages."""
    settings = {}
    for shrink in dict.fromkeys((job.shrink, None, *SHRINK)):
        words = "" if shrink is None else f", shrink {shrink:g}"
        settings[f"propagated{words}"] = {
            **WITHOUT_PRECISIONS,
            "method": "fisher",
            "shrink": shrink,
            "tasks": job.tasks,
            "normalize": None,
        }
    return settings


def families(structure: str, job: Job) -> list[dict[str, Any]]:
    """The shrinkages, powers and dampings that are tried for a structure, the user's first."""
    if structure not in FACTORED:
        users_pair = (job.power, job.damping)
        pairs = dict.fromkeys((users_pair, (ROOT, None), (1.0, None), *_damped(1.0)))
        return [{"power": power, "damping": damping} for power, damping in pairs]
    if structure == "gram":
        users_pair = (job.shrink, job.damping)
        pairs = dict.fromkeys((users_pair, *_damped(1.0)))
        pairs |= dict.fromkeys((shrink, job.damping) for shrink in SHRINK)
        return [{"shrink": shrink, "damping": damping} for shrink, damping in pairs]
    users_pair = (job.power, 1.0 if job.damping is None else job.damping)
    grid = dict.fromkeys((users_pair, *itertools.product(POWERS, DAMPINGS)))
    shrink = 1.0 if job.shrink is None else job.shrink
    return [{"shrink": shrink, "power": power, "damping": damping} for power, damping in grid]


def _damped(setting: float) -> list[tuple[float, float]]:
    """Pairs of a setting with every damping that is tried."""
    return [(setting, damping) for damping in DAMPINGS]


def changed(job: Job, settings: Mapping[str, Any]) -> Job:
    """A job with the settings of a candidate."""
    fields = dict(settings)
    weights = fields.pop("weights", [member.weight for member in job.members])
    members = [
        replace(member, weight=weight, data=None)
        for member, weight in zip(job.members, weights, strict=True)
    ]
    if settings["method"] in ("linear", "task_arithmetic"):
        members = [replace(member, precision=None) for member in members]
    return replace(job, **fields, members=tuple(members))


def _in_memory(job: Job) -> tuple[Job, str]:
    """The job with its models in memory, and the structure of their precisions.

    The structure is "" without precisions, and names several if they differ.
    """
    base = None if job.base is None else open_model(job.base, "base")
    sources = [
        open_model(member.model, f"models[{t}]", base) for t, member in enumerate(job.members)
    ]
    _refuse_borrowed_rows(job, base, sources)
    members = tuple(
        replace(member, model=source.tensors())
        for member, source in zip(job.members, sources, strict=True)
    )
    structures = {
        open_precision(member.precision, member.n_data).structure
        for member in members
        if member.precision is not None
    }
    in_memory = replace(
        job,
        base=None if base is None else base.tensors(),
        members=members,
        out_dtype=None,
        tokenizer_source=None,
    )
    return in_memory, " and ".join(sorted(structures))


def _refuse_borrowed_rows(job: Job, base: Source | None, sources: Sequence[Source]) -> None:
    """Raise where models have different tokens: a task's model reads only one vocabulary."""
    models = [member.model for member in job.members]
    opened = list(sources)
    if base is not None:
        models.insert(0, job.base)
        opened.insert(0, base)
    if tokens_of(models, opened, job.tokenizer_source).rows is not None:
        raise InputError('method="auto" takes models of one vocabulary: name a method')


def _halves(task: Task) -> tuple[Task, Task]:
    """A task of every other example, and a task of the remaining ones."""
    if task.n_data == 1:
        return task, task
    order = torch.arange(task.n_data)
    return task.subset(order[::2]), task.subset(order[1::2])


def _gain(ours: Sequence[Evaluation], average: Sequence[Evaluation]) -> tuple[float, float]:
    """How much a merge is better than the average, in nats, and the standard error of this.

    Both are means over the tasks, each of which counts the same.
    """
    gains = [
        (losses_of_average.counted - losses.counted).double()
        for losses, losses_of_average in zip(ours, average, strict=True)
    ]
    squared_errors = [
        float(gain.var()) / len(gain) if len(gain) > 1 else math.inf for gain in gains
    ]
    mean = sum(float(gain.mean()) for gain in gains) / len(gains)
    return mean, math.sqrt(sum(squared_errors)) / len(gains)
