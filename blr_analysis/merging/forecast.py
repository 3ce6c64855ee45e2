"""Will it work? How far a merge raises each task's loss, predicted by precisions.

With θ_t the weights of task t and H_t the precision of its data, the loss near θ_t rises by

    Q_t(θ) = ½ (θ − θ_t)ᵀ H_t (θ − θ_t)        nats, summed over the task's examples

The sum runs over tensors, or over layers where H_t has factors. The merge is carried out piece by
piece into a sink that keeps only these sums, for the merge and for the base.

Fine-tuning has gone along the line from the base θ_0 to θ_t, and the loss on this line is at most
that of the base. What the other tasks change leads off the line, where the loss rises faster than
H_t says: H_t is measured where the model is sure of its data. That part of Q_t is the interference

    I_t(θ) = Q_t(θ) − [½ (θ − θ_t)ᵀ H_t (θ_0 − θ_t)]² / Q_t(θ_0)

Merges and tasks are ordered by Q_t + I_t (``python -m benchmarks.merging.contest`` compares both).

Merges are often further from θ_t than this approximation reaches. The range around the rise is
therefore wide: a factor of 10 for Kronecker factors and of 30 for diagonals, which ignore how
weights act together. All rises that ``python -m benchmarks.merging.contest`` measures are within
it. The order of the rises can be relied on. A task is called safe if Q_t of the merge is below a
tenth of Q_t of the base: there, no task below that was worse than with the base. Moments of inputs
("gram") have no unit of the loss. For them, only the share of the base's Q_t is given.
"""

from __future__ import annotations

import math
import sys
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

# The range of a rise is from the rise divided by a factor to the rise times it.
# `python -m benchmarks.merging.contest` measures both.
RANGE_OF_KRONECKER = 10.0
RANGE_OF_DIAGONALS = 30.0
SAFE_SHARE = 0.1  # of the base's rise
REMEDY = "merge fewer models, use a smaller weight, gram or kron precisions, or a common base"


@dataclass(frozen=True)
class TaskForecast:
    """The expected rise of one task's loss.

    Attributes:
        task: the name of its fine-tuned model.
        rise: Q_t at the merge, in nats for each example; NaN where the precision has no such unit.
        low, high: the range of the rise.
        base_rise: Q_t at the base; NaN without a base.
        share: Q_t at the merge over Q_t at the base; NaN without a base.
        tensors: by tensor, or by layer, its share in Q_t of the merge, largest first.
        interference: I_t, in nats for each example; NaN without a base or a unit.
    """

    task: str
    rise: float
    low: float
    high: float
    base_rise: float
    share: float
    tensors: Mapping[str, float]
    interference: float = math.nan

    @property
    def cost(self) -> float:
        """The rise with interference counted twice, by which merges and tasks are ordered."""
        return self.rise if math.isnan(self.interference) else self.rise + self.interference

    @property
    def verdict(self) -> str:
        """ "safe", "uncertain", or "too far apart"."""
        if self.share < SAFE_SHARE:
            return "safe"
        return "too far apart" if self.share >= 1 else "uncertain"


@dataclass(frozen=True)
class MergeForecast:
    """The expected rises of all tasks' losses, in the order of the models."""

    tasks: tuple[TaskForecast, ...]

    @property
    def note(self) -> str:
        """One line about the tasks that the base serves as well; "" where there are none."""
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
    """Carry a plan out without keeping the result, and add up how every task's loss would rise.

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
    """H_t as it is stored, without damping and power."""
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
    """A sink that adds each piece to the sums of all tasks, and then forgets it."""

    def __init__(self, tasks: Sequence[_Task]) -> None:
        self._tasks = tasks

    def put(self, name: str, start: int, values: Tensor) -> None:
        for task in self._tasks:
            task.add(name, start, values)


@dataclass
class _Task:
    """The sums of one task.

    The pieces of a layer with factors are kept until the layer is complete.

    Attributes:
        model: θ_t.
        precision: H_t.
        plan: the plan of the merge.
        at_merge, at_base: Q_t at the merge and at the base, by tensor or layer.
        along: ½ (θ − θ_t)ᵀ H_t (θ_0 − θ_t) for the merge θ.
    """

    model: OpenModel
    precision: StoredPrecision
    plan: MergePlan
    at_merge: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    at_base: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    along: float = 0.0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._layer_of = {
            name: layer
            for layer, (joint, _) in self.precision.layers.items()
            for name in joint.names
        }
        self._merged: dict[str, Tensor] = {}  # tensors of layers that are incomplete
        self._n_missing = {
            layer: sum(self._entries(name) for name in joint.names)
            for layer, (joint, _) in self.precision.layers.items()
        }

    def _entries(self, name: str) -> int:
        """The number of entries of a tensor."""
        return self.plan.reference.specs[name].numel

    def add(self, name: str, start: int, values: Tensor) -> None:
        """Add a piece of the merge to the sums; tensors without a precision add nothing."""
        if name in self._layer_of:
            self._add_to_layer(name, start, values)
        elif name in self.precision.stored:
            self._add_entries(name, start, values.double().cpu())

    def _add_entries(self, name: str, start: int, merged: Tensor) -> None:
        """Add entries that have a diagonal precision."""
        scratch = Scratch()
        stop = start + len(merged)
        h = self.precision.read(name, start, stop, scratch, torch.float64).double().cpu()
        stored_name = self.model.names[name]
        theta = self.model.source.read(stored_name, start, stop, scratch).double().cpu()
        theta = theta.clone()  # the base is read into the same buffer
        step = merged - theta
        merged_rise = float((h * step.square()).sum()) / 2
        base_rise = 0.0
        along = 0.0
        if self.plan.base is not None:
            base_step = self.plan.base.read(name, start, stop, scratch).double().cpu() - theta
            base_rise = float((h * base_step.square()).sum()) / 2
            along = float((h * step * base_step).sum()) / 2
        with self._lock:
            self.at_merge[name] += merged_rise
            self.at_base[name] += base_rise
            self.along += along

    def _add_to_layer(self, name: str, start: int, values: Tensor) -> None:
        """Add entries of a layer with factors; its sum is formed with its last entries."""
        layer = self._layer_of[name]
        joint, _ = self.precision.layers[layer]
        with self._lock:
            if name not in self._merged:
                self._merged[name] = torch.empty(self._entries(name), dtype=torch.float64)
            self._merged[name][start : start + len(values)] = values.double().cpu()
            self._n_missing[layer] -= len(values)
            if self._n_missing[layer] > 0:
                return
            merged = {part: self._merged.pop(part) for part in joint.names}
        factors = self.precision.factors(layer)
        step = self._step(layer, merged)
        curved_step = factors.times(step)
        self.at_merge[layer] = float((step * curved_step).sum()) / 2
        if self.plan.base is None:
            return
        base_step = self._step(layer, {part: _flat(self.plan.base, part) for part in joint.names})
        self.at_base[layer] = float((base_step * factors.times(base_step)).sum()) / 2
        with self._lock:
            self.along += float((base_step * curved_step).sum()) / 2

    def _step(self, layer: str, weights: Mapping[str, Tensor]) -> Tensor:
        """θ − θ_t of one layer, as a matrix, for weights θ that are flat and by name."""
        joint, _ = self.precision.layers[layer]
        steps = {}
        for name, values in weights.items():
            theta = _flat(self.model.source, self.model.names[name])
            steps[name] = (values - theta).view(self.plan.reference.specs[name].shape)
        return joint.join(steps)

    def forecast(self) -> TaskForecast:
        """The forecast by the sums, which must be complete."""
        n_data = self.precision.n_data or 1
        total = sum(self.at_merge.values())
        base_total = sum(self.at_base.values())
        has_base = self.plan.base is not None
        rise = total / n_data
        structure = self.precision.structure
        factor = RANGE_OF_DIAGONALS if structure == "diag" else RANGE_OF_KRONECKER
        divisor = max(total, sys.float_info.min)
        parts = {name: part / divisor for name, part in self.at_merge.items()}
        interference = math.nan
        if has_base and base_total > 0:
            interference = max(total - self.along**2 / base_total, 0.0) / n_data
        result = TaskForecast(
            self.model.source.name,
            rise=rise,
            low=rise / factor,
            high=rise * factor,
            base_rise=base_total / n_data if has_base else math.nan,
            share=total / base_total if has_base and base_total > 0 else math.nan,
            tensors=dict(sorted(parts.items(), key=lambda part: -part[1])),
            interference=interference,
        )
        if structure != "gram":
            return result
        no_unit = math.nan
        return replace(
            result,
            rise=no_unit,
            low=no_unit,
            high=no_unit,
            base_rise=no_unit,
            interference=no_unit,
        )


def _flat(source: Source, name: str) -> Tensor:
    """All entries of a tensor in one row, in float64 on the CPU."""
    return source.tensor(name).double().cpu().reshape(-1)
