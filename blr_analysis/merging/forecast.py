"""Will it work? How far a merge raises each task's loss, predicted by precisions.

With θ_t the weights of task t and H_t the precision of its data, the loss near θ_t rises by

    Q_t(θ) = ½ (θ − θ_t)ᵀ H_t (θ − θ_t)        nats, summed over the task's examples

The sum runs over tensors, or over layers where H_t has factors. The merge is carried out piece by
piece into a sink that keeps only these sums, for the merge and for the base.

Fine-tuning has gone along the line from the base θ_0 to θ_t, and the loss on this line is at most
that of the base. What the other tasks change leads off the line, where the loss rises faster than
H_t says. That part of Q_t is the interference

    I_t(θ) = Q_t(θ) − [½ (θ − θ_t)ᵀ H_t (θ_0 − θ_t)]² / Q_t(θ_0)

H_t is small where model t is sure of its data, and models differ in this. So the mean of all tasks'
H for each example, H̄, has a say too: Q̄_t and Ī_t are of θ − θ_t in H̄. The cost
√((Q_t + I_t)(Q̄_t + Ī_t)) is the number to order merges by. It was chosen among some 33 formulas. On
seeds that had no part in the choice it ordered merges much better than Q_t for transformers of
images, better for adapters, alike for MLPs, and slightly worse for convolutions. The tasks of one
merge of texts are ordered better by Q_t. ``python -m benchmarks.merging.contest`` compares both.

Merges are often further from θ_t than this approximation reaches. The range around the rise is
therefore wide: a factor of 10 for Kronecker factors and of 30 for diagonals, which ignore how
weights act together. ``python -m benchmarks.merging.contest`` measures both: by Kronecker factors
99 to 100 % of the rises of small networks of images are within it, of small language models 60 to
65 %; the others rise by less. The order says more than the size, but by diagonals it says nothing
of MLPs and convolutions. The rise of the base is as uncertain as that of the merge. So a task is
called safe only if the two ranges do not meet: below 1/100 of the base's Q_t by factors. Three
tasks of eight below a tenth were worse than with the base. Two kinds of precisions are too weak for
this verdict. Where factors come from fewer examples than a layer has inputs, most directions are
unknown. Where Q_t of the base is below .01 nats, the model is so sure of its data that H_t has
vanished, or it has hardly moved. Of MiniLM with 120 texts for 384 inputs, both hold, and merges
were worse by .2 nats than Q_t says.

Moments of inputs ("gram") say how far a layer's outputs move, and not how much the loss depends on
them: they have no unit of the loss. For them, only the share of the base's Q_t is given. Each layer
counts in it by the size of its outputs. If the loss depends most on the layer whose share is
largest, the true share is that one. So this largest share must be below 1/100, too. A merge by gram
makes these very sums small, so that it looks better by them than it is.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.files import Scratch, Source
from blr_analysis.merging.folders import fill
from blr_analysis.merging.merge_plan import MergePlan
from blr_analysis.merging.precisions import (
    StoredPrecision,
    check_belongs,
    check_fits,
    open_precision,
)

# The range of a rise is from the rise divided by a factor to the rise times it.
RANGE_OF_KRONECKER = 10.0
RANGE_OF_DIAGONALS = 30.0
SMALLEST_BASE_RISE = 0.01  # nats for each example: below it, no task is called safe
ROUNDING = 1e-6  # of the base's rise: so much a layer may rise by rounding
REMEDY = "merge fewer models, use a smaller weight, gram or kron precisions, or a common base"


@dataclass(frozen=True)
class TaskForecast:
    """The expected rise of one task's loss.

    Attributes:
        task: the name of its fine-tuned model.
        rise: Q_t at the merge, in nats for each example; NaN where the precision has no such unit.
        factor: the true rise is likely between Q_t divided by this factor and Q_t times it.
        base_rise: Q_t at the base; NaN without a base.
        share: Q_t at the merge over Q_t at the base; NaN without a base.
        tensors: by tensor, or by layer, its share in Q_t of the merge, largest first.
        largest_share: the largest share of a tensor or layer: its part of Q_t at the merge over
            that at the base; NaN without a base.
        interference: I_t, in nats for each example; NaN without a base or a unit.
        cost: √((Q_t + I_t)(Q̄_t + Ī_t)), by which merges are ordered; without a base, I is 0.
        has_enough_examples: whether the precision is of as many examples as each layer with factors
            has inputs.
    """

    task: str
    rise: float
    factor: float
    base_rise: float
    share: float
    tensors: Mapping[str, float]
    largest_share: float = math.nan
    interference: float = math.nan
    cost: float = math.nan
    has_enough_examples: bool = True

    @property
    def low(self) -> float:
        """The lower end of the range of the rise."""
        return self.rise / self.factor

    @property
    def high(self) -> float:
        """The upper end of the range of the rise."""
        return self.rise * self.factor

    @property
    def safe_share(self) -> float:
        """The share below which the range of the rise ends before that of the base begins."""
        return self.factor**-2

    @property
    def verdict(self) -> str:
        """ "safe", "uncertain", or "too far apart"."""
        if self.share >= 1:
            return "too far apart"
        is_safe = self.share < self.safe_share and not self.doubt
        return "safe" if is_safe else "uncertain"

    @property
    def doubt(self) -> str:
        """Why a small share does not make the task safe; "" where it does."""
        has_vanished = self.base_rise < SMALLEST_BASE_RISE
        if has_vanished or not self.has_enough_examples:
            return "too few examples, or a model that is sure of them all"
        has_unit = not math.isnan(self.rise)
        if not has_unit and self.largest_share >= self.safe_share:
            return f"the share of one layer is {self.safe_share:g} or more"
        return ""


@dataclass(frozen=True)
class MergeForecast:
    """The expected rises of all tasks' losses, in the order of the models."""

    tasks: tuple[TaskForecast, ...]

    @property
    def cost(self) -> float:
        """The mean of the tasks' costs, by which merges are ordered."""
        return sum(task.cost for task in self.tasks) / len(self.tasks)

    @property
    def is_by_diagonals(self) -> bool:
        """Whether a task's precision ignores how weights act together."""
        return any(task.factor == RANGE_OF_DIAGONALS for task in self.tasks)

    @property
    def note(self) -> str:
        """What the verdicts come from, where the shares do not say it; "" where they do."""
        far = [task.task for task in self.tasks if task.verdict == "too far apart"]
        if far:
            names = ", ".join(map(repr, far))
            return f"too far apart for {names}, which the base serves as well: {REMEDY}"
        doubted: dict[str, list[str]] = {}
        for task in self.tasks:
            if task.share < task.safe_share and task.doubt:
                doubted.setdefault(task.doubt, []).append(repr(task.task))
        return "; ".join(
            f"uncertain for {', '.join(names)}: {doubt}" for doubt, names in doubted.items()
        )

    def __repr__(self) -> str:
        facts = [f"{task.task}: {task.rise:.3g} nats, {task.verdict}" for task in self.tasks]
        return f"MergeForecast({'; '.join(facts)})"


@dataclass
class Form:
    """The quadratic form ½ uᵀ H v between a merge, the base and θ_t; all steps are from θ_t.

    Attributes:
        rise: of the merge, Q_t(θ).
        along: between merge and base.
        rise_of_base: of the base, Q_t(θ_0).
    """

    rise: float = 0.0
    along: float = 0.0
    rise_of_base: float = 0.0

    @property
    def interference(self) -> float:
        """The part of the rise off the line from the base to θ_t; 0 without a base."""
        if self.rise_of_base <= 0:
            return 0.0
        return max(self.rise - self.along**2 / self.rise_of_base, 0.0)

    @classmethod
    def mean(cls, forms: Sequence[Form]) -> Form:
        """The form in the mean of several H."""
        count = len(forms)
        return cls(
            sum(form.rise for form in forms) / count,
            sum(form.along for form in forms) / count,
            sum(form.rise_of_base for form in forms) / count,
        )


def cost_of(form: Form, forms: Sequence[Form]) -> float:
    """√((Q + I)(Q̄ + Ī)) of a task's form, and the same steps' forms in the H of all tasks.

    >>> cost_of(Form(1.0), [Form(1.0), Form(7.0)])
    2.0
    """
    mean = Form.mean(forms)
    return math.sqrt((form.rise + form.interference) * (mean.rise + mean.interference))


@torch.no_grad()
@torch.inference_mode(False)
def forecast(plan: MergePlan, progress: bool | None = None) -> MergeForecast:
    """Carry a plan out without keeping the result, and add up how every task's loss would rise.

    Raises:
        InputError: a model without a precision, whatever the method, or models whose tables of
            tokens differ.
        blr_analysis.BLRError: as :func:`blr_analysis.merge`.

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
    curvatures = [_Curvature(_precision(plan, t), plan) for t in range(len(plan.models))]
    fill(plan, _Sums(curvatures), progress)
    return MergeForecast(tuple(_forecast_of(t, curvatures) for t in range(len(curvatures))))


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
    """A sink that adds each piece to the forms of all curvatures, and then forgets it."""

    def __init__(self, curvatures: Sequence[_Curvature]) -> None:
        self._curvatures = curvatures

    def put(self, name: str, start: int, values: Tensor) -> None:
        for curvature in self._curvatures:
            curvature.add(name, start, values)


@dataclass
class _Curvature:
    """One task's H, and its forms for the steps from every θ_t.

    The pieces of a layer with factors are kept until the layer is complete.

    Attributes:
        precision: H.
        plan: the plan of the merge.
        forms: by tensor or layer, one for each model.
    """

    precision: StoredPrecision
    plan: MergePlan
    forms: dict[str, list[Form]] = field(default_factory=dict)

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

    @property
    def n_data(self) -> int:
        """The number of examples that H sums over; 1 where it is unknown."""
        return self.precision.n_data or 1

    def total(self, t: int) -> Form:
        """The form of the steps from θ_t, for each example."""
        forms = [by_model[t] for by_model in self.forms.values()]
        return Form(
            sum(form.rise for form in forms) / self.n_data,
            sum(form.along for form in forms) / self.n_data,
            sum(form.rise_of_base for form in forms) / self.n_data,
        )

    def largest_share(self, t: int) -> float:
        """The largest share, in one tensor or layer, of the rise in that of the base.

        It is infinite where a layer moves that does not differ between θ_t and the base.
        """
        forms = [by_model[t] for by_model in self.forms.values()]
        rounding = ROUNDING * sum(form.rise_of_base for form in forms)
        shares = [
            form.rise / form.rise_of_base if form.rise_of_base > 0 else math.inf
            for form in forms
            if form.rise > rounding
        ]
        return max(shares, default=0.0)

    def _entries(self, name: str) -> int:
        """The number of entries of a tensor."""
        return self.plan.reference.specs[name].numel

    def add(self, name: str, start: int, values: Tensor) -> None:
        """Add a piece of the merge to the forms; tensors without a precision add nothing."""
        if name in self._layer_of:
            self._add_to_layer(name, start, values)
        elif name in self.precision.stored:
            self._add_entries(name, start, values.double().cpu())

    def _add_entries(self, name: str, start: int, merged: Tensor) -> None:
        """Add entries that have a diagonal precision."""
        scratch = Scratch()
        stop = start + len(merged)
        h = self.precision.read(name, start, stop, scratch, torch.float64).double().cpu()
        base = None
        if self.plan.base is not None:
            read = self.plan.base.read(name, start, stop, scratch)
            base = read.double().cpu().clone()  # the models are read into the same buffer
        for t, model in enumerate(self.plan.models):
            theta = model.source.read(model.names[name], start, stop, scratch).double().cpu()
            step = merged - theta
            form = Form(rise=_half_product(step, h * step))
            if base is not None:
                base_step = base - theta
                form.along = _half_product(step, h * base_step)
                form.rise_of_base = _half_product(base_step, h * base_step)
            self._add_form(name, t, form)

    def _add_to_layer(self, name: str, start: int, values: Tensor) -> None:
        """Add entries of a layer with factors; its forms are computed with its last entries."""
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
        base = None
        if self.plan.base is not None:
            base = {part: _flat(self.plan.base, part) for part in joint.names}
        for t, model in enumerate(self.plan.models):
            theta = {part: _flat(model.source, model.names[part]) for part in joint.names}
            step = self._step(layer, merged, theta)
            form = Form(rise=_half_product(step, factors.times(step)))
            if base is not None:
                base_step = self._step(layer, base, theta)
                curved_base_step = factors.times(base_step)
                form.along = _half_product(step, curved_base_step)
                form.rise_of_base = _half_product(base_step, curved_base_step)
            self._add_form(layer, t, form)

    def _step(
        self, layer: str, weights: Mapping[str, Tensor], theta: Mapping[str, Tensor]
    ) -> Tensor:
        """θ − θ_t of one layer, as a matrix, from weights that are flat and by name."""
        joint, _ = self.precision.layers[layer]
        steps = {
            name: (values - theta[name]).view(self.plan.reference.specs[name].shape)
            for name, values in weights.items()
        }
        return joint.join(steps)

    def _add_form(self, name: str, t: int, form: Form) -> None:
        """Add the form of some entries of a tensor or layer."""
        with self._lock:
            by_model = self.forms.setdefault(name, [Form() for _ in self.plan.models])
            by_model[t].rise += form.rise
            by_model[t].along += form.along
            by_model[t].rise_of_base += form.rise_of_base


def _forecast_of(t: int, curvatures: Sequence[_Curvature]) -> TaskForecast:
    """The forecast for task t by complete forms."""
    own = curvatures[t]
    total = own.total(t)
    cost = cost_of(total, [curvature.total(t) for curvature in curvatures])
    has_base = own.plan.base is not None
    has_share = has_base and total.rise_of_base > 0
    structure = own.precision.structure
    factor = RANGE_OF_DIAGONALS if structure == "diag" else RANGE_OF_KRONECKER
    divisor = max(total.rise * own.n_data, sys.float_info.min)
    parts = {name: by_model[t].rise / divisor for name, by_model in own.forms.items()}
    result = TaskForecast(
        own.plan.models[t].source.name,
        rise=total.rise,
        factor=factor,
        base_rise=total.rise_of_base if has_base else math.nan,
        share=total.rise / total.rise_of_base if has_share else math.nan,
        tensors=dict(sorted(parts.items(), key=lambda part: -part[1])),
        largest_share=own.largest_share(t) if has_share else math.nan,
        interference=total.interference if has_share else math.nan,
        cost=cost,
        has_enough_examples=not any(map(own.precision.is_poorly_sampled, own.precision.layers)),
    )
    if structure != "gram":
        return result
    no_unit = dict.fromkeys(("rise", "base_rise", "interference", "cost"), math.nan)
    return replace(result, **no_unit)


def _half_product(left: Tensor, right: Tensor) -> float:
    """½ Σ of the products of entries."""
    return float((left * right).sum()) / 2


def _flat(source: Source, name: str) -> Tensor:
    """All entries of a tensor in one row, in float64 on the CPU."""
    return source.tensor(name).double().cpu().reshape(-1)
