"""One merge after the other, each run on the validation tasks and let go of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any

import torch

from blr_analysis.backprop.loss import Evaluation, evaluated
from blr_analysis.checks import some
from blr_analysis.errors import InputError, ModelError
from blr_analysis.merging.at_weights import State, at_weights, state_of
from blr_analysis.merging.curve import MergePoint
from blr_analysis.merging.grids import Weights
from blr_analysis.merging.merge import merge
from blr_analysis.merging.methods import Method, method_of
from blr_analysis.merging.weighting import default_weights
from blr_analysis.task import Task


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
    strange = set(inputs) - set(signature(merge).parameters)
    if "out" in inputs or strange:
        raise InputError(
            f"merge_curve takes no {some(sorted(strange or {'out'}))}: beside its own arguments, "
            "those of blr_analysis.merge that concern a merge in memory; nothing is written"
        )
    given = method if isinstance(method, (list, tuple, Mapping)) else [method]
    pairs = given.items() if isinstance(given, Mapping) else [(m, m) for m in given]
    found: dict[str, Merger] = {}
    for name, kind in pairs:
        if callable(kind):
            label = name if isinstance(name, str) else getattr(kind, "__name__", "own")
            found[label] = Merger(kind)
            continue
        row = method_of(kind)
        own = {k: v for k, v in inputs.items() if _used(k, row)}
        missing = inputs.get("missing_precision", "error") == "error"
        if row.uses_precisions and missing and own.get("precisions") is None:
            raise InputError(f"method {row.name!r} weighs by precisions: pass precisions=")
        choice = inputs.get("normalize")
        normalize = row.normalize if choice is None else bool(choice)
        found[str(name)] = Merger(
            partial(merge, method=row.name, progress=False, **own),
            row.name,
            normalize,
            normalize or (row.uses_precisions and not row.uses_base_precision),
        )
    if not found or len(found) != len(given):
        raise InputError("method must name at least one merge method, each once")
    return found


def _used(argument: str, row: Method) -> bool:
    if argument in ("precisions", "n_data", "missing_precision"):
        return row.uses_precisions
    if argument in ("base_precision", "delta"):
        return row.uses_base_precision
    return True


@dataclass
class Trial:
    """Merges of these models, and what they come to on these tasks."""

    base: State
    models: Sequence[State]
    tasks: Mapping[str, Task]
    mergers: Mapping[str, Merger]
    _known: dict[tuple[str, Weights], MergePoint] = field(default_factory=dict)

    def check(self) -> None:
        """The tasks run at the base and at the first model, or an error says why not."""
        for who, state in (("base", self.base), ("the first model", self.models[0])):
            for name, task in self.tasks.items():
                with at_weights(task, state, f"{who} (for task {name!r})") as params:
                    chosen = torch.arange(min(task.n_data, task.batch_size))
                    with torch.no_grad(), task.evaluation():
                        task.run(task.fetch(chosen), params, chosen)

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
        found: list[Evaluation] = []
        for task_name, task in self.tasks.items():
            try:
                with at_weights(task, state, f"the merge by {name!r}") as params:
                    found.append(evaluated(task, params, progress=False)[0])
            except ModelError as error:  # the same task runs at the base: the weights are at fault
                return self._failed(name, weights, f"task {task_name!r}: {error}")
        accuracies = (math.nan if m.accuracy is None else m.accuracy for m in found)
        return MergePoint(name, weights, tuple(m.nll for m in found), tuple(accuracies))

    def _failed(self, name: str, weights: Weights, why: str) -> MergePoint:
        count = len(self.tasks)
        return MergePoint(name, weights, (math.inf,) * count, (math.nan,) * count, why)
