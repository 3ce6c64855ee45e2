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
from blr_analysis.merging.in_memory import ARGUMENTS, merged, refuse_idle
from blr_analysis.merging.methods import method_of
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
    """

    method: str
    weights: tuple[float, ...]
    nlls: tuple[float, ...]
    accuracies: tuple[float, ...]
    failure: str = ""

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
            "rows" (as listed).
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
        that a wider grid may hold a better one. Listed rows have no edge."""
        if self.shape == "rows":
            return False
        tried = zip(*(p.weights for p in self.points if p.method == self.best.method), strict=True)
        return any(
            min(values) < max(values) and w in (min(values), max(values))
            for w, values in zip(self.best.weights, tried, strict=True)
        )

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


def read_grid(weights: Any, models: Sequence[str]) -> tuple[str, list[Weights]]:
    """The shape and the rows that the argument ``weights`` of :func:`merge_curve` asks for.

    Raises:
        InputError: nothing to try, rows of another length than there are models, unknown models,
            NaN or inf, too many combinations.
    """
    size = len(models)
    if isinstance(weights, Mapping):
        given = {str(n): v for n, v in weights.items()}
        if set(given) != set(models):
            raise InputError(f"weights are for {sorted(given)}, the models are {sorted(models)}")
        axes = [_numbers(given[n], f"weights[{n!r}]") for n in models]
        count = math.prod(map(len, axes))
        if count > MOST:
            raise InputError(f"{count:,} combinations of weights, at most {MOST:,}: pass rows")
        return "grid", list(itertools.product(*axes))
    table = _table(STEPS if weights is None else weights)
    if table.ndim == 1:
        return "shared", [(a,) * size for a in dict.fromkeys(table.tolist())]
    if table.shape[1] != size:
        raise InputError(
            f"a row of weights needs one number for each of {size} models, got {table.shape[1]}"
        )
    return "rows", list(dict.fromkeys(map(tuple, table.tolist())))


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
    precisions: Any = None,
    base_precision: Any = None,
    criterion: str = "nll",
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
        precisions, base_precision: H_t and H_0 as :func:`blr_analysis.merge` takes them.
        criterion: what "best" is: "nll" (smallest) or "accuracy" (largest); means over the tasks,
            each counting the same. Accuracy is a step function of α: with few validation examples
            the NLL chooses better.
        options: what :func:`blr_analysis.merge` takes beside these: ``delta``, ``normalize``,
            ``missing_precision``, ``n_data``, ``dtype``; each goes to the methods that it is for.

    Where H_0 + δ is small beside the H_t, only the ratios of the α_t matter to gradient matching
    (as to "fisher" and "linear" anyhow): one α for all draws a flat line, and there is nothing to
    choose. Rows then show what does matter.

    A merge that overflows (a negative α can bring H̄ close to 0) gets an infinite NLL and the reason
    in the table; only if none can be run is it an error.

    Returns:
        ``best`` (a point: method, weights, nll, accuracy), ``weights`` of it by model, ``table``,
        and ``plot()``: curves, or a map for two models. Models in a list are called as the tasks
        are, where there is one each.

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
    start, states = state_of(base, "base"), named_states(models, "models")
    if (
        isinstance(models, list | tuple)
        and isinstance(tasks, Mapping)
        and len(judges) == len(states)
    ):
        states = dict(zip(judges, states.values(), strict=True))
    names = tuple(states)
    one_of("criterion", criterion, CRITERIA)
    shape, rows = read_grid(weights, names)
    curved = None if precisions is None else in_order(precisions, names)
    mergers = read_mergers(
        method, {"precisions": curved, "base_precision": base_precision, **options}
    )
    known = [method_of(m.row) for m in mergers.values() if m.row is not None]
    if known:
        refuse_idle(known, options)
    trial = Trial(start, list(states.values()), judges, mergers)
    trial.check(criterion)
    points: list[MergePoint] = []
    for name in mergers:
        tried = rows if weights is not None else sorted({*rows, trial.default(name)})
        steps = track(tried, total=len(tried), label=f"merges: {name}", show=progress)
        points += [trial.point(name, row) for row in steps]
    if all(p.failure for p in points):
        raise ModelError(
            f"none of the {len(points)} merges could be run; the first: {points[0].failure}"
        )
    return MergeCurve(tuple(points), names, tuple(judges), criterion, shape)
