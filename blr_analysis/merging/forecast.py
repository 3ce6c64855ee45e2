"""Will it work? What a merge costs each task, foretold by the precisions before it is written.

With θ_t the weights of task t and H_t the precision of its data, near θ_t its loss rises by

    Q_t(θ) = ½ (θ − θ_t)ᵀ H_t (θ − θ_t)        nats, summed over the task's examples

tensor by tensor, or layer by layer where H_t has factors. A merge is carried out piece by piece
into a sink that keeps nothing but these sums, for the merge and for the base.

Merges leave the region in which this holds: over all merges, tasks and kinds of
``python -m benchmarks.merging.contest`` the measured rise was between a tenth of Q_t and ten times
it for Kronecker factors, which is the range that is given here; for diagonals, which leave out how
weights act together, thirty times. The order of the rises is what can be relied on. A task is
called safe where Q_t of the merge is below a tenth of Q_t of the base: none that ended worse than
its base was below that. Moments of inputs ("gram") are in no unit of the loss: of these the share
of the base's Q_t alone is given.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.files import Scratch, Source
from blr_analysis.merging.folders import fill
from blr_analysis.merging.merge_plan import MergePlan, OpenModel
from blr_analysis.merging.precisions import (
    StoredPrecision,
    check_belongs,
    check_fits,
    open_precision,
)

FACTOR_WITH_FACTORS = 10.0  # of the range; python -m benchmarks.merging.contest measures both
FACTOR_OF_DIAGONALS = 30.0
SAFE_SHARE = 0.1  # of the base's rise
REMEDY = "merge fewer models, use a smaller weight, gram or kron precisions, or a common base"


@dataclass(frozen=True)
class TaskForecast:
    """What a merge is foretold to cost one task.

    Attributes:
        task: the name of its fine-tuned model.
        rise: Q_t at the merge, in nats for each example; NaN where the precision has no such unit.
        low, high: the range of the rise.
        base_rise: Q_t at the base; NaN without one.
        share: of the base's, that of the merge; NaN without a base.
        tensors: the share of each tensor, or of each layer, in Q_t of the merge, largest first.
    """

    task: str
    rise: float
    low: float
    high: float
    base_rise: float
    share: float
    tensors: Mapping[str, float]

    @property
    def verdict(self) -> str:
        """ "safe", "uncertain", or "too far apart"."""
        if self.share < SAFE_SHARE:
            return "safe"
        return "too far apart" if self.share >= 1 else "uncertain"


@dataclass(frozen=True)
class MergeForecast:
    """What a merge is foretold to cost its tasks, in the order of the models."""

    tasks: tuple[TaskForecast, ...]

    @property
    def note(self) -> str:
        """One line where a task is better served by the base, else ""."""
        far = [task.task for task in self.tasks if task.verdict == "too far apart"]
        if not far:
            return ""
        names = ", ".join(map(repr, far))
        return f"too far apart for {names}, which the base serves as well: {REMEDY}"

    def __repr__(self) -> str:
        facts = [f"{task.task}: {task.rise:.3g} nats, {task.verdict}" for task in self.tasks]
        return f"MergeForecast({'; '.join(facts)})"


@torch.no_grad()
@torch.inference_mode(False)
def forecast(plan: MergePlan, progress: bool | None = None) -> MergeForecast:
    """Carry a plan out, keep nothing, and say what it would cost every task.

    Raises:
        InputError: a model without a precision, whatever the method, or models whose tables of
            tokens differ.
        BLRError: as :func:`blr_analysis.merge`.

    Example:
        >>> from blr_analysis.merging.job import job_of
        >>> from blr_analysis.merging.plan import make_plan
        >>> base, models = {"w": torch.zeros(1)}, [{"w": torch.ones(1)}, {"w": -torch.ones(1)}]
        >>> precisions = [{"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}]
        >>> job = job_of(base, models, "fisher", precisions=precisions)
        >>> [task.rise for task in forecast(make_plan(job), progress=False).tasks]
        [0.375, 1.125]
    """
    if plan.tokens.rows is not None:
        raise InputError("a forecast takes models of one vocabulary")
    tasks = [_Task(model, _precision(plan, t), plan) for t, model in enumerate(plan.models)]
    fill(plan, _Sums(tasks), progress)
    return MergeForecast(tuple(task.forecast() for task in tasks))


def _precision(plan: MergePlan, t: int) -> StoredPrecision:
    """H_t as it is stored: neither damped nor raised to a power."""
    member = plan.job.members[t]
    if member.precision is None:
        raise InputError(
            f"a forecast needs the precision of {plan.models[t].source.name!r}: compute it "
            "(`blr-analysis fisher`)"
        )
    precision = open_precision(member.precision, member.n_data)
    if not plan.job.trust:
        check_belongs(precision, plan.models[t].source)
    check_fits(precision, plan.reference)
    return precision


class _Sums:
    """A sink that keeps sums; pieces of a layer with factors until the layer is whole."""

    def __init__(self, tasks: Sequence[_Task]) -> None:
        self._tasks = tasks

    def put(self, name: str, start: int, values: Tensor) -> None:
        for task in self._tasks:
            task.add(name, start, values)


@dataclass
class _Task:
    """The sums of one task.

    Attributes:
        model: θ_t.
        precision: H_t.
        plan: of the merge.
        at_merge, at_base: Q_t by tensor or layer.
    """

    model: OpenModel
    precision: StoredPrecision
    plan: MergePlan
    at_merge: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    at_base: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._layer_of = {
            name: layer
            for layer, (joint, _) in self.precision.layers.items()
            for name in joint.names
        }
        self._merged: dict[str, Tensor] = {}
        self._missing = {
            layer: sum(self._entries(name) for name in joint.names)
            for layer, (joint, _) in self.precision.layers.items()
        }

    def _entries(self, name: str) -> int:
        return self.plan.reference.specs[name].numel

    def add(self, name: str, start: int, values: Tensor) -> None:
        """Take a piece of the merge."""
        if name in self._layer_of:
            self._add_to_layer(name, start, values)
        elif name in self.precision.stored:
            scratch = Scratch()
            stop = start + len(values)
            h = self.precision.read(name, start, stop, scratch, torch.float64).double().cpu()
            home = self._home(name, start, stop, scratch)
            merged_rise = float((h * (values.double().cpu() - home).square()).sum()) / 2
            base_rise = 0.0
            if self.plan.base is not None:
                base = self.plan.base.read(name, start, stop, scratch).double().cpu()
                base_rise = float((h * (base - home).square()).sum()) / 2
            with self._lock:
                self.at_merge[name] += merged_rise
                self.at_base[name] += base_rise

    def _home(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        """θ_t, which may be read into the same buffers as others."""
        stored_name = self.model.names[name]
        return self.model.source.read(stored_name, start, stop, scratch).double().cpu().clone()

    def _add_to_layer(self, name: str, start: int, values: Tensor) -> None:
        layer = self._layer_of[name]
        joint, _ = self.precision.layers[layer]
        with self._lock:
            if name not in self._merged:
                self._merged[name] = torch.empty(self._entries(name), dtype=torch.float64)
            self._merged[name][start : start + len(values)] = values.double().cpu()
            self._missing[layer] -= len(values)
            if self._missing[layer] > 0:
                return
            merged = {part: self._merged.pop(part) for part in joint.names}
        self.at_merge[layer] = self._rise(layer, merged)
        if self.plan.base is not None:
            base = {part: _flat(self.plan.base, part) for part in joint.names}
            self.at_base[layer] = self._rise(layer, base)

    def _rise(self, layer: str, weights: Mapping[str, Tensor]) -> float:
        """Q_t of one layer."""
        joint, _ = self.precision.layers[layer]
        steps = {
            name: (values - _flat(self.model.source, self.model.names[name])).view(
                self.plan.reference.specs[name].shape
            )
            for name, values in weights.items()
        }
        step = joint.join(steps)
        factors = self.precision.factors(layer)
        return float((step * factors.times(step)).sum()) / 2

    def forecast(self) -> TaskForecast:
        """What the sums say."""
        examples = self.precision.n_data or 1
        total = sum(self.at_merge.values())
        base_total = sum(self.at_base.values())
        has_base = self.plan.base is not None
        rise = total / examples
        structure = self.precision.structure
        factor = FACTOR_OF_DIAGONALS if structure == "diag" else FACTOR_WITH_FACTORS
        parts = {name: part / max(total, 1e-300) for name, part in self.at_merge.items()}
        result = TaskForecast(
            self.model.source.name,
            rise=rise,
            low=rise / factor,
            high=rise * factor,
            base_rise=base_total / examples if has_base else math.nan,
            share=total / base_total if has_base and base_total > 0 else math.nan,
            tensors=dict(sorted(parts.items(), key=lambda part: -part[1])),
        )
        if structure != "gram":
            return result
        nothing = math.nan
        return replace(result, rise=nothing, low=nothing, high=nothing, base_rise=nothing)


def _flat(source: Source, name: str) -> Tensor:
    return source.tensor(name).double().cpu().reshape(-1)
