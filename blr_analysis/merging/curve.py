"""Which α? Merges over a range of weights, tried on validation tasks; nothing is written."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.loss import Evaluation, evaluated
from blr_analysis.checks import one_of, positive_int, some
from blr_analysis.errors import InputError, ModelError
from blr_analysis.merging.at_weights import State, at_weights, named_states, named_tasks, state_of
from blr_analysis.merging.front import Surrogates, far_apart, undominated
from blr_analysis.merging.in_memory import ARGUMENTS, merged, refuse_idle
from blr_analysis.merging.methods import method_of
from blr_analysis.merging.precisions import precision_in_memory
from blr_analysis.merging.weighting import default_weights, in_order
from blr_analysis.progress import track
from blr_analysis.task import Task
from blr_analysis.views import Plottable, Tabular

CRITERIA = ("nll", "accuracy")


@dataclass(frozen=True)
class MergePoint:
    """One merge that was tried.

    Attributes:
        method: its name.
        weights: α_t, in the order of the models.
        nlls: mean loss on each validation task, nats per example; infinite where it failed.
        accuracies: fraction right on each; NaN for regression.
        failure: why it could not be run; "" where it could.
        predicted: of a front, the mean loss on each task that its surrogate foretold; empty where
            precisions are of no loss ("gram"), or of an unknown number of examples.
        checkpoints: where models have several, what each checkpoint was merged with; those of a
            model add up to its weight.
    """

    method: str
    weights: tuple[float, ...]
    nlls: tuple[float, ...]
    accuracies: tuple[float, ...]
    failure: str = ""
    predicted: tuple[float, ...] = ()
    checkpoints: tuple[float, ...] = ()

    @property
    def nll(self) -> float:
        """The mean over the tasks, each counting the same whatever its size."""
        return sum(self.nlls) / len(self.nlls)

    @property
    def accuracy(self) -> float:
        """The mean over the tasks that have one; NaN where none has."""
        known = [a for a in self.accuracies if not math.isnan(a)]
        return sum(known) / len(known) if known else math.nan


@dataclass(frozen=True)
class MergeCurve(Tabular, Plottable):
    """The result of :func:`blr_analysis.merge_curve`.

    Attributes:
        points: every merge that was tried, in order.
        models, tasks: their names, in the order of the points' numbers.
        criterion: what ``best`` goes by: "nll" or "accuracy".
        shape: which weights were tried: "shared" (one α for all models), "grid" (all combinations),
            "rows" (as listed), "search" (one coordinate after the other), "front" (the predicted
            Pareto front).
    """

    points: Sequence[MergePoint]
    models: tuple[str, ...]
    tasks: tuple[str, ...]
    criterion: str
    shape: str

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(p.method for p in self.points))

    @cached_property
    def best(self) -> MergePoint:
        """The point with the smallest mean NLL (or the largest mean accuracy).

        Means are over the tasks, each counting the same. Among equals (to six decimals) the other
        of the two decides, then the smallest Σ|α| (nearest to the base), then the order.
        """
        return self.best_of()

    def best_of(self, method: str | None = None) -> MergePoint:
        """The best point of one method, or of all.

        Raises:
            InputError: a method that was not tried.
        """
        if method is not None and method not in self.methods:
            raise InputError(f"method must be one of {self.methods}, got {method!r}")
        points = [p for p in self.points if method in (None, p.method)]
        return min(points, key=lambda p: rank(p, self.criterion))

    @property
    def weights(self) -> dict[str, float]:
        """α_t of the best point, by model."""
        return dict(zip(self.models, self.best.weights, strict=True))

    @property
    def at_edge(self) -> bool:
        """Whether a weight of the best point is the smallest or largest that was tried for it, so
        that a wider grid may hold a better one. Listed rows and fronts have no edge."""
        if self.shape in ("rows", "front"):
            return False
        tried = zip(*(p.weights for p in self.points if p.method == self.best.method), strict=True)
        return any(
            min(values) < max(values) and w in (min(values), max(values))
            for w, values in zip(self.best.weights, tried, strict=True)
        )

    @property
    def front(self) -> tuple[MergePoint, ...]:
        """The Pareto front: the points that no other beats on one task without losing on another,
        by NLL, the best for the first task first."""
        losses = torch.tensor([p.nlls for p in self.points], dtype=torch.float64)
        kept = [self.points[k] for k in undominated(losses) if not self.points[k].failure]
        return tuple(sorted(kept, key=lambda p: p.nlls))

    def __len__(self) -> int:
        return len(self.points)

    def __repr__(self) -> str:
        shown = ", ".join(f"{n}: {a:.4g}" for n, a in self.weights.items())
        right = "" if math.isnan(self.best.accuracy) else f", accuracy {self.best.accuracy:.4f}"
        edge = "; at the edge of the grid: try a wider one" if self.at_edge else ""
        failed = sum(bool(p.failure) for p in self.points)
        lost = f"; {failed} could not be run" if failed else ""
        return (
            f"MergeCurve(best of {len(self)} by {self.criterion}: {self.best.method} with "
            f"{{{shown}}}, NLL {self.best.nll:.4f}{right}{edge}{lost})"
        )


def rank(point: MergePoint, criterion: str) -> tuple[float, float, float]:
    """What the points are sorted by, the best first."""
    loss = round(point.nll, 6) if math.isfinite(point.nll) else math.inf
    miss = -round(point.accuracy, 6) if not math.isnan(point.accuracy) else math.inf
    size = sum(abs(a) for a in point.weights)
    return (loss, miss, size) if criterion == "nll" else (miss, loss, size)


Weights = tuple[float, ...]
STEPS = tuple(k / 10 for k in range(16))  # 0 to 1.5: where nobody says which
MOST = 2000  # combinations


@dataclass(frozen=True)
class Grid:
    """Weights to try: ``rows`` of T numbers or, for a search, the numbers of each model.

    ``shape`` is one of "shared", "grid", "rows", "search"; see
    :class:`blr_analysis.MergeCurve`.
    """

    shape: str
    rows: Sequence[Weights] = ()
    axes: Sequence[Sequence[float]] = ()


def read_grid(weights: Any, models: Sequence[str], *, search: bool) -> Grid:
    """What the argument ``weights`` of :func:`blr_analysis.merge_curve` asks for.

    Raises:
        InputError: nothing to try, rows of another length than there are models, unknown models,
            NaN or inf, too many combinations, rows for a search along axes.
    """
    size = len(models)
    if isinstance(weights, Mapping):
        given = {str(n): v for n, v in weights.items()}
        if set(given) != set(models):
            raise InputError(f"weights are for {sorted(given)}, the models are {sorted(models)}")
        axes = [_numbers(given[n], f"weights[{n!r}]") for n in models]
        count = math.prod(map(len, axes))
        if search:
            return Grid("search", axes=axes)
        if count > MOST:
            raise InputError(
                f"{count:,} combinations of weights are too many (at most {MOST:,}): pass "
                'search="coordinates" or rows'
            )
        return Grid("grid", rows=list(itertools.product(*axes)))
    table = _table(STEPS if weights is None else weights)
    if table.ndim == 1:
        shared = list(dict.fromkeys(table.tolist()))
        if search:
            return Grid("search", axes=[shared] * size)
        return Grid("shared", rows=[(a,) * size for a in shared])
    if search:
        raise InputError('search="coordinates" takes numbers, or a dict model → numbers, not rows')
    if table.shape[1] != size:
        raise InputError(
            f"a row of weights needs one number for each of {size} models, got {table.shape[1]}"
        )
    return Grid("rows", rows=list(dict.fromkeys(map(tuple, table.tolist()))))


def simplex_grid(n_models: int, steps: int) -> list[tuple[float, ...]]:
    """Every set of weights ≥ 0 in steps of 1/``steps`` that sums to 1, in lexical order.

    C(steps + T − 1, T − 1) of them: 66 for three models in tenths.

    Raises:
        InputError: counts that are no positive whole numbers.

    Example:
        >>> simplex_grid(2, 4)
        [(0.0, 1.0), (0.25, 0.75), (0.5, 0.5), (0.75, 0.25), (1.0, 0.0)]
    """
    positive_int("n_models", n_models)
    positive_int("steps", steps)

    def parts(count: int, left: int) -> list[tuple[int, ...]]:
        if count == 1:
            return [(left,)]
        return [(k, *rest) for k in range(left + 1) for rest in parts(count - 1, left - k)]

    return [tuple(k / steps for k in row) for row in parts(n_models, steps)]


def _numbers(values: Any, name: str) -> list[float]:
    table = _table(values, name)
    if table.ndim != 1:
        raise InputError(f"{name} must be a list of numbers, got shape {tuple(table.shape)}")
    return list(dict.fromkeys(table.tolist()))


def _table(values: Any, name: str = "weights") -> torch.Tensor:
    """Finite numbers, one- or two-dimensional."""
    try:
        table = torch.as_tensor(values, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} must be numbers, rows of numbers, or a dict model → numbers, got {values!r}"
        ) from error
    if table.ndim not in (1, 2) or not table.numel():
        raise InputError(f"{name} must hold at least one number, got shape {tuple(table.shape)}")
    if not bool(torch.isfinite(table).all()):
        raise InputError(f"{name} must be finite, got NaN or inf")
    return table


@dataclass(frozen=True)
class Merger:
    """A way of merging: ``make(base, models, weights=[α, …])`` gives a state dict.

    Attributes:
        row: the method's name in the table of methods; None for a function of the user's.
        normalize: whether it divides the weights by their sum, so that their scale is nothing.
        divides: whether their sum must not be 0.
    """

    make: Callable[..., Any]
    row: str | None = None
    normalize: bool = False
    divides: bool = False


def read_mergers(method: Any, inputs: Mapping[str, Any]) -> dict[str, Merger]:
    """The methods to compare, by name, each with those of merge's arguments that it uses.

    Raises:
        InputError: none, an unknown one, something that is neither name nor function, a method
            that needs precisions without any, an argument that merge does not take.
    """
    strange = set(inputs) - ARGUMENTS
    if strange:
        raise InputError(
            f"merge_curve takes no {some(sorted(strange))}: see those of "
            "blr_analysis.merge, in memory"
        )
    given = method if isinstance(method, (list, tuple, Mapping)) else [method]
    pairs = given.items() if isinstance(given, Mapping) else [(m, m) for m in given]
    mergers: dict[str, Merger] = {}
    for name, kind in pairs:
        if callable(kind):
            label = name if isinstance(name, str) else getattr(kind, "__name__", "own")
            mergers[label] = Merger(kind)
            continue
        row = method_of(kind)
        own = {k: v for k, v in inputs.items() if row.takes(k)}
        missing = inputs.get("missing_precision", "error") == "error"
        if row.uses_precisions and missing and own.get("precisions") is None:
            raise InputError(f"method {row.name!r} weighs by precisions: pass precisions=")
        choice = inputs.get("normalize")
        normalize = row.normalize if choice is None else bool(choice)
        mergers[str(name)] = Merger(
            partial(merged, method=row.name, progress=False, **own),
            row.name,
            normalize,
            normalize or row.divides_by_precisions,
        )
    if not mergers or len(mergers) != len(given):
        raise InputError("method must name at least one merge method, each once")
    return mergers


def _mean_and_variance(apart: Tensor, weights: Tensor | None = None) -> tuple[float, float]:
    """Of weighted examples, and how far that mean may be off."""
    given = torch.ones_like(apart) if weights is None else weights
    share = given.double() / given.double().sum()
    apart, n = apart.double().nan_to_num(), int((share > 0).sum())
    mean = (share * apart).sum()
    spread = (share * (apart - mean)).square().sum()
    return float(mean), float(spread) * n / (n - 1) if n > 1 else math.inf


@dataclass
class Trial:
    """Merges of these models, and what they come to on these tasks."""

    base: State
    models: Sequence[State]
    tasks: Mapping[str, Task]
    mergers: Mapping[str, Merger]
    seen: dict[str, list[Evaluation]] | None = None  # filled, where it is there, by method
    _known: dict[tuple[str, Weights], MergePoint] = field(default_factory=dict)

    def gain(self, name: str, over: str, criterion: str) -> tuple[float, float]:
        """By how much a merge is better than another in the mean over the tasks, and the standard
        error of that, from the differences of example by example."""
        assert self.seen is not None
        pairs = list(zip(self.seen[name], self.seen[over], strict=True))
        if criterion == "nll":
            each = [_mean_and_variance(b.counted - a.counted) for a, b in pairs]
        else:  # of the tasks that have one
            each = [
                _mean_and_variance(a.correct.double() - b.correct.double(), a.weights)
                for a, b in pairs
                if a.correct is not None and b.correct is not None and bool(a.weights.any())
            ]
        if not each:
            raise InputError("every label of the validation tasks is ignored: give some that count")
        gains, variances = zip(*each, strict=True)
        return sum(gains) / len(each), math.sqrt(sum(variances)) / len(each)

    def check(self, criterion: str) -> None:
        """The tasks run at the base and at the first model, and one has what ``criterion`` asks
        for, or an error says why not."""
        right: list[Tensor | None] = []
        for who, state in (("base", self.base), ("the first model", self.models[0])):
            for name, task in self.tasks.items():
                with at_weights(task, state, f"{who} (for task {name!r})") as params:
                    chosen = torch.arange(min(task.n_data, task.batch_size))
                    with torch.no_grad(), task.evaluation():
                        run = task.run(task.fetch(chosen), params, chosen)
                        right.append(task.likelihood.at(chosen).correct(*run))
        if criterion == "accuracy" and all(r is None for r in right):
            raise InputError('no task has an accuracy: take criterion="nll"')

    def default(self, name: str) -> Weights:
        """The weights of a method before anything is tried; 1/T each for a function."""
        row = self.mergers[name].row
        count = len(self.models)
        return (1 / count,) * count if row is None else tuple(default_weights(row, count))

    def point(self, name: str, weights: Weights) -> MergePoint:
        """One merge: made, run on every task, and forgotten; what is the same is run once."""
        key, merger, total = weights, self.mergers[name], sum(weights)
        if merger.divides and abs(total) <= 1e-12:
            return self._failed(name, weights, f"the weights sum to {total:g}")
        if merger.normalize:
            key = tuple(round(a / total, 12) for a in weights)
        if (name, key) not in self._known:
            self._known[name, key] = self._run(name, weights)
        return replace(self._known[name, key], weights=weights)

    def _run(self, name: str, weights: Weights) -> MergePoint:
        made = self.mergers[name].make(self.base, list(self.models), weights=list(weights))
        state = state_of(made, f"what {name!r} returns")
        wild = next((n for n, t in state.items() if not bool(torch.isfinite(t).all())), None)
        if wild is not None:
            return self._failed(name, weights, f"{wild!r} of the merge holds NaN or inf")
        evaluations: list[Evaluation] = []
        for task_name, task in self.tasks.items():
            try:
                with at_weights(task, state, f"the merge by {name!r}") as params:
                    evaluations.append(evaluated(task, params, progress=False)[0])
            except ModelError as error:  # the same task runs at the base: the weights are at fault
                return self._failed(name, weights, f"task {task_name!r}: {error}")
        accuracies = (math.nan if m.accuracy is None else m.accuracy for m in evaluations)
        if self.seen is not None:
            self.seen[name] = evaluations
        return MergePoint(name, weights, tuple(m.nll for m in evaluations), tuple(accuracies))

    def _failed(self, name: str, weights: Weights, why: str) -> MergePoint:
        count = len(self.tasks)
        return MergePoint(name, weights, (math.inf,) * count, (math.nan,) * count, why)


@torch.inference_mode(False)
def merge_curve(
    base: Any,
    models: Any,
    tasks: Any,
    *,
    method: Any = "gradient_matching",
    weights: Any = None,
    search: str = "grid",
    precisions: Any = None,
    base_precision: Any = None,
    criterion: str = "nll",
    max_sweeps: int = 3,
    budget: int = 12,
    progress: bool | None = None,
    **options: Any,
) -> MergeCurve:
    """Merge with many weights α, look at each on validation tasks, and say which is best.

    Every merge is made in memory, run, and let go of: no checkpoint is written, and no more than
    one merge is held at a time.

    Args:
        base: θ_0: a state dict, a module, or a folder of safetensors, which is read into memory.
        models: the θ_t, a list or a dict by name, of the same.
        tasks: validation tasks, a list or a dict by name, with the names that tables shall show.
            Held-out data: on training data, the largest α wins too often. They may be as many as
            one likes, and share one model; the model gives the architecture, not the weights.
        method: the name of a merge method, or a list of several, compared in one call; or a dict
            name → method or function ``(base, models, weights=[α, …]) -> state dict`` of your own.
        weights: which α are tried.

            * numbers: one α for all models, each in turn;
            * rows of T numbers: as listed, such as :func:`blr_analysis.merging.simplex_grid`;
            * a dict model → numbers: all combinations (at most 2,000);
            * None: 0, 0.1, …, 1.5 for all models, and the method's own default.
        search: "grid", or "coordinates": from the method's
            :func:`~blr_analysis.merging.default_weights`, the α_t of
            one model after the other is moved to the best of its numbers, until a sweep over the
            models changes nothing: T · K merges a sweep instead of K^T; or "front", the Pareto
            front, where nobody can say which task matters how much: of some hundred weights that
            sum to 1, the losses ½ (θ − θ_t)ᵀ H_t (θ − θ_t) that the precisions predict say which
            may lie on it, and ``budget`` of them, far from each other, are run. Where a model is a
            list of checkpoints of its task, with a precision each ("diag" or "kron"), the loss is
            that of their mixture (:mod:`blr_analysis.merging.front`). What was foretold stands
            beside what came: ``point.predicted``.
        precisions, base_precision: H_t and H_0 as :func:`blr_analysis.merge` takes them.
        criterion: what "best" is: "nll" (smallest) or "accuracy" (largest); means over the tasks,
            each counting the same. Accuracy is a step function of α: with few validation examples
            the NLL chooses better.
        max_sweeps: of the coordinate search.
        budget: merges that a front runs.
        options: what :func:`blr_analysis.merge` takes beside these: ``delta``, ``normalize``,
            ``missing_precision``, ``n_data``, ``dtype``; each goes to the methods that it is for.

    Where H_0 + δ is small beside the H_t, only the ratios of the α_t matter to gradient matching
    (as to "fisher" and "linear" anyhow): one α for all draws a flat line, and there is nothing to
    choose. Rows, or a search, then show what does matter.

    A merge that overflows (a negative α can bring H̄ close to 0) gets an infinite NLL and the reason
    in the table; only if none can be run is it an error.

    Returns:
        ``best`` (a point: method, weights, nll, accuracy), ``weights`` of it by model, ``front``
        (the points that none beats on every task), ``table``, and ``plot()``: curves, a map for two
        models, or the front. Models in a list are called as the tasks are, where there is one each.

    Raises:
        InputError: no weights, weights of another number than the models, NaN or inf, an unknown
            method or option, state dicts that do not belong to the tasks' models, ``out=``.
        ModelError: no merge could be run; as :meth:`Task.run`.

    Example:
        >>> import blr_analysis as blr
        >>> X, y = torch.eye(2), torch.tensor([1.0, 2.0])
        >>> task = blr.Task(torch.nn.Linear(2, 1, bias=False), (X, y), likelihood="gaussian")
        >>> base, a, b = ({"weight": torch.tensor([w])} for w in ([0., 0.], [1., 0.], [0., 2.]))
        >>> curve = merge_curve(base, [a, b], task, method="task_arithmetic",
        ...                     weights=[0.0, 0.5, 1.0, 1.5], progress=False)
        >>> curve.best.weights, curve.at_edge
        ((1.0, 1.0), False)
    """
    judges = named_tasks(tasks)
    start, parts = state_of(base, "base"), _parts(models)
    states = {n: own[0] for n, own in parts.items()}
    if (
        isinstance(models, list | tuple)
        and isinstance(tasks, Mapping)
        and len(judges) == len(states)
    ):
        states = dict(zip(judges, states.values(), strict=True))
    names = tuple(states)
    counts = [len(own) for own in parts.values()]
    if search != "front" and max(counts) > 1:
        raise InputError('several checkpoints of one model are for search="front"')
    one_of("criterion", criterion, CRITERIA)
    one_of("search", search, ("grid", "coordinates", "front"))
    positive_int("max_sweeps", max_sweeps)
    positive_int("budget", budget)
    if search == "front" and (weights is not None or precisions is None or len(judges) < 2):
        raise InputError("a front takes precisions=, two tasks or more, and no weights=")
    if search == "front" and len(judges) != len(states):
        raise InputError(f"a front takes a task for each model, got {len(judges)}, {len(states)}")
    grid = read_grid(weights, names, search=search == "coordinates")
    grid = Grid("front") if search == "front" else grid
    curved = None if precisions is None else in_order(precisions, names)
    owners = [t for t, count in enumerate(counts) for _ in range(count)]
    if search == "front":  # what is said of a task holds for each of its checkpoints
        curved = [p for t, p in enumerate(curved or []) for p in _each(p, counts[t], names[t])]
        if options.get("n_data") is not None:
            given = _each(options["n_data"], len(names), "the tasks", "n_data")
            options["n_data"] = [given[t] for t in owners]
    inputs = {"precisions": curved, "base_precision": base_precision, **options}
    mergers = read_mergers(method, inputs)
    rows = [method_of(m.row) for m in mergers.values() if m.row is not None]
    if rows and search != "front":  # which predicts by the precisions, whatever the method
        refuse_idle(rows, options)
    trial = Trial(start, [s for own in parts.values() for s in own], judges, mergers)
    trial.check(criterion)
    front = (
        _surrogates(trial, owners, curved or [], options.get("n_data"))
        if search == "front"
        else None
    )
    points: list[MergePoint] = []
    for name in mergers:
        if front is not None:
            points += _on_front(trial, name, *front, budget, progress)
        elif grid.shape == "search":
            points += _searched(trial, name, grid, criterion, max_sweeps, progress)
        else:
            own = () if weights is not None else (trial.default(name),)
            rows = sorted({*grid.rows, *own}) if own else grid.rows
            steps = track(rows, total=len(rows), label=f"merges: {name}", show=progress)
            points += [trial.point(name, row) for row in steps]
    if all(p.failure for p in points):
        raise ModelError(
            f"none of the {len(points)} merges could be run; the first: {points[0].failure}"
        )
    return MergeCurve(tuple(points), names, tuple(judges), criterion, grid.shape)


FRONT = 300  # weights whose losses are predicted


def _on_front(
    trial: Trial, name: str, surrogates: Surrogates, sizes: Sequence[int], budget: int,
    progress: bool | None,
) -> list[MergePoint]:  # fmt: skip
    """The weights of the predicted front, far from each other, run."""
    count, steps = len(trial.tasks), 1
    most = max(FRONT // len(surrogates.starts), budget)
    while math.comb(steps + count, count - 1) <= most:
        steps += 1

    def make(weights: list[float]) -> State:
        made = trial.mergers[name].make(trial.base, list(trial.models), weights=weights)
        return state_of(made, f"what {name!r} returns")

    rows = simplex_grid(count, steps)
    shown = track(rows, total=len(rows), label=f"predictions: {name}", show=progress)
    previews = [surrogates.preview(make, row) for row in shown]
    losses = torch.tensor([p.losses for p in previews], dtype=torch.float64)
    picked = far_apart(losses, budget)
    points = []
    for k in track(picked, total=len(picked), label=f"merges: {name}", show=progress):
        point = trial.point(name, previews[k].weights)
        means = tuple(sums / n for sums, n in zip(previews[k].losses, sizes, strict=False))
        several = point.weights if surrogates.mixed else ()
        points.append(replace(point, weights=rows[k], predicted=means, checkpoints=several))
    return points


def _parts(models: Any) -> dict[str, list[State]]:
    """The checkpoints of every model, one where it is no list."""
    pairs = models.items() if isinstance(models, Mapping) else enumerate(models, 1)
    several = isinstance(models, Mapping | list | tuple)
    if not several or not any(isinstance(own, list | tuple) for _, own in pairs):
        return {n: [own] for n, own in named_states(models, "models").items()}
    pairs = models.items() if isinstance(models, Mapping) else enumerate(models, 1)
    found = {}
    for n, own in pairs:
        listed = own if isinstance(own, list | tuple) else [own]
        found[str(n)] = list(named_states(listed, f"models[{n!r}]").values())
    return found


def _each(given: Any, count: int, name: str, what: str = "precisions") -> list[Any]:
    listed = list(given) if isinstance(given, list | tuple) else [given]
    if len(listed) != count:
        raise InputError(f"{name}: {count} wanted, {len(listed)} {what}")
    return listed


def _surrogates(
    trial: Trial, owners: Sequence[int], given: Sequence[Any], n_data: Any
) -> tuple[Surrogates, list[int]]:
    """The tasks' losses by the checkpoints, and the examples that they are sums over; none where
    precisions are of no loss ("gram") or of an unknown number of examples."""
    tasks = list(trial.tasks.values())
    numbers = n_data or [None] * len(owners)
    held = [
        precision_in_memory(f"precisions[{k}]", p, n)
        for k, (p, n) in enumerate(zip(given, numbers, strict=True))
    ]
    sizes = {t: int(n or h.n_data) for t, h, n in zip(owners, held, numbers, strict=True)}
    found = Surrogates(trial.models, held, owners, [0.0] * len(held))
    if not all(sizes.values()) or any(h.structure == "gram" for h in held):
        if found.mixed:
            raise InputError('several checkpoints take precisions "diag" or "kron", and n_data')
        return found, []
    own = []
    for t, state in zip(owners, trial.models, strict=True):
        with at_weights(tasks[t], state, "a model") as params:
            own.append(sizes[t] * evaluated(tasks[t], params, progress=False)[0].nll)
    return replace(found, own=own), [sizes[t] for t in range(len(tasks))]


def _searched(
    trial: Trial, name: str, grid: Grid, criterion: str, max_sweeps: int, progress: bool | None
) -> list[MergePoint]:
    """Every point looked at on the way down, one coordinate after the other."""
    best = trial.point(name, trial.default(name))
    seen: dict[Weights, MergePoint] = {best.weights: best}
    for sweep in range(1, max_sweeps + 1):
        before = best
        axes = list(enumerate(grid.axes))
        label = f"merges: {name}, sweep {sweep}"
        for t, axis in track(axes, total=len(axes), label=label, show=progress):
            line = [(*best.weights[:t], alpha, *best.weights[t + 1 :]) for alpha in axis]
            for row in line:
                if row not in seen:
                    seen[row] = trial.point(name, row)
            best = min((best, *(seen[row] for row in line)), key=lambda p: rank(p, criterion))
        if best is before:
            break
    return list(seen.values())
