"""A merge that can be carried out: the models, opened, and what becomes of every tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from blr_analysis.adapters import stores_transposed
from blr_analysis.backprop.matrices import Joint
from blr_analysis.checks import some
from blr_analysis.errors import InputError
from blr_analysis.files import Source, Spec
from blr_analysis.merging.job import Job, Weight
from blr_analysis.merging.methods import ENTRIES, MATRICES, ROWS, Method
from blr_analysis.merging.precisions import StoredPrecision
from blr_analysis.merging.selections import Selection
from blr_analysis.merging.tokens import Tokens

# The damping of balanced precisions; python -m benchmarks.merging.contest measures both.
DAMPING_OF_GRAM = 10.0
DAMPING = 3.0  # of all others
RAM_EPSILON = 1e-5  # RAM takes a larger step for a change, unless told otherwise
CHUNK = 2**19  # the largest number of a tensor's entries that a thread merges at a time

# What becomes of a tensor.
MERGED = "merged"
AVERAGED = "averaged"
COPIED = "copied"
POORLY_SAMPLED = "gram of fewer examples than inputs"  # the note of a tensor that is averaged

# The precision of one model in one tensor.
ZERO = "zero"
OWN = "own"  # the model has one
BASE = "base"  # the base's replaces it


@dataclass(frozen=True)
class OpenModel:
    """One fine-tuned model, opened.

    Attributes:
        source: θ_t.
        precision: H_t, or None.
        weight: α_t, a number or a function of the tensor's name.
        density: the share of θ_t − θ_0 that stays, likewise.
        epsilon: the setting of "della", likewise.
        gamma: the setting of "breadcrumbs", likewise.
        buffers: the names of tensors that are known to be no parameters.
        names: by tensor of the result, the model's name for it.
    """

    source: Source
    precision: StoredPrecision | None
    weight: Weight
    density: Weight
    epsilon: Weight | None
    gamma: Weight
    buffers: frozenset[str]
    names: Mapping[str, str]


@dataclass(frozen=True)
class TensorPlan:
    """What becomes of one tensor of the result.

    Attributes:
        name: its name in the result.
        fate: "merged", "averaged" (running statistics are, under every method) or "copied".
        spec: its shape, and the dtype that is written.
        names: its name in each model.
        weights: α_t, normalised where the method says so.
        precisions: H_t of each model: "own", "base" (H_0 + δ) or "zero".
        note: a remark for the report.
        layer: the weight of the layer that it is solved with; "" where it is no part of one.
        densities: for each model the share of θ_t − θ_0 that stays; empty if the method keeps all.
        scale: λ.
        epsilons, gammas: the settings of "della" and of "breadcrumbs", for each model.
        scope: the part that must be merged at once: "entries", "rows" or "matrices".
    """

    name: str
    fate: str
    spec: Spec
    names: tuple[str, ...]
    weights: tuple[float, ...] = ()
    precisions: tuple[str, ...] = ()
    note: str = ""
    layer: str = ""
    densities: tuple[float, ...] = ()
    scale: float = 1.0
    epsilons: tuple[float, ...] = ()
    gammas: tuple[float, ...] = ()
    scope: str = ENTRIES

    @property
    def is_whole(self) -> bool:
        """Whether the whole tensor must be merged at once."""
        return self.scope == MATRICES

    @property
    def row_length(self) -> int:
        """The number of entries of a row, along the first axis; a vector is one row."""
        if len(self.spec.shape) < 2:
            return max(1, self.spec.numel)
        return max(1, self.spec.numel // max(1, self.spec.shape[0]))


@dataclass(frozen=True)
class MergePlan:
    """A merge that can be carried out.

    Attributes:
        job: the models, the method and the settings.
        base: θ_0, or None.
        models: the fine-tuned models.
        base_precision: H_0 without δ, or None.
        tensors: the tensors of the result, in the order of reading.
        tokens: the tokenizer of the result, and the rows of its tables.
        chunk: the number of a tensor's entries that a thread merges at a time.
        workers: the number of threads.
        memory: bytes of buffers that all threads use at most.
    """

    job: Job
    base: Source | None
    models: tuple[OpenModel, ...]
    base_precision: StoredPrecision | None
    tensors: tuple[TensorPlan, ...]
    tokens: Tokens
    chunk: int = CHUNK
    workers: int = 1
    memory: int = 0

    @cached_property
    def method(self) -> Method:
        """The method's row of the registry."""
        return self.job.row

    @cached_property
    def stores_transposed(self) -> bool:
        """Whether layers store [inputs, outputs], as Conv1D does."""
        return stores_transposed(self.reference.specs)

    @cached_property
    def selection(self) -> Selection:
        """The settings of the methods in :mod:`.selections`."""
        job = self.job
        epsilons = [model.epsilon for model in self.models if model.epsilon is not None]
        epsilon = epsilons[0] if epsilons else RAM_EPSILON
        if callable(epsilon):
            raise InputError(f"epsilon of {self.method.name} must be one number")
        return Selection(
            t=job.t,
            epsilon=float(epsilon),
            select_topk=job.select_topk,
            r=job.r,
            alpha=job.alpha,
        )

    @property
    def delta(self) -> float:
        """δ; 0 where the method has no H_0."""
        return float(self.job.delta) if self.method.uses_base_precision else 0.0

    def has_outputs(self, layer: str) -> bool:
        """Whether some H of a layer differs between the rows of its matrix, as "kron" does."""
        return any(precision.has_outputs(layer) for precision in self.precisions)

    def is_poorly_sampled(self, layer: str) -> bool:
        """Whether some model has fewer examples than a layer with factors has inputs."""
        return any(precision.is_poorly_sampled(layer) for precision in self.model_precisions)

    def factor_settings(self, layer: str) -> tuple[float | None, float, float | None]:
        """Shrink, power and damping of a layer's precisions with factors.

        Shrink is None, which means as measured, under three conditions: the user has not set it,
        all moments of the layer are singular, and there is no H_0 to fill what they leave out.
        Balanced precisions are taken as a whole, or their diagonals where they are poorly sampled.
        """
        shrink = self.job.shrink
        if self.job.balanced:
            if shrink is None:
                shrink = 0.0 if self.is_poorly_sampled(layer) else 1.0
            damping = self.job.damping
            if damping is None:
                damping = DAMPING if self.has_outputs(layer) else DAMPING_OF_GRAM
            return shrink, float(self.job.power), damping
        has_base_precision = self.base_precision is not None or self.delta > 0
        all_singular = all(precision.chance.get(layer) for precision in self.model_precisions)
        uses_measured_shrink = all_singular and not has_base_precision
        if shrink is None and not uses_measured_shrink:
            shrink = 1.0
        return shrink, float(self.job.power), self.job.damping

    @property
    def model_precisions(self) -> list[StoredPrecision]:
        """H_t of the models that have a precision."""
        return [model.precision for model in self.models if model.precision is not None]

    @property
    def precisions(self) -> list[StoredPrecision]:
        """All precisions; the base's is the first."""
        if self.base_precision is None:
            return self.model_precisions
        return [self.base_precision, *self.model_precisions]

    @cached_property
    def layers(self) -> dict[str, Joint]:
        """The layers that are solved as one matrix, by the names of their weights."""
        solved = {tensor.layer for tensor in self.tensors}
        return {
            layer: joint
            for precision in self.precisions
            for layer, (joint, _) in precision.layers.items()
            if layer in solved
        }

    @property
    def reference(self) -> Source:
        """The model whose names, shapes and files the result takes over."""
        return self.models[0].source if self.base is None else self.base

    @property
    def notes(self) -> list[str]:
        """Remarks about tokenizers and precisions, for the user."""
        names = [precision.name for precision in self.model_precisions]
        kinds = {precision.kind for precision in self.model_precisions if precision.kind}
        shared = sorted({name for name in names if names.count(name) > 1})
        notes = list(self.tokens.notes)
        notes += [f"the precision {name!r} stands for several models" for name in shared]
        n_averaged = sum(tensor.note == POORLY_SAMPLED for tensor in self.tensors)
        if n_averaged:
            notes.append(f"{n_averaged} tensors are averaged: {POORLY_SAMPLED}; shrink=1 takes it")
        if len(kinds) > 1:
            notes.append(f"precisions of different kinds, in other units: {some(sorted(kinds))}")
        return notes

    @property
    def bytes_written(self) -> int:
        """Bytes of tensors in the result."""
        return sum(tensor.spec.nbytes for tensor in self.tensors)

    @property
    def bytes_read(self) -> int:
        """Bytes of weights and precisions that the merge reads."""
        return sum(self.bytes_of(tensor) for tensor in self.tensors)

    def bytes_of(self, tensor: TensorPlan) -> int:
        """Bytes that the merge reads for one tensor; a layer's weight counts its factors too."""
        bytes_of_entries = tensor.spec.numel * stored_per_entry(self, tensor) * self.passes(tensor)
        bytes_of_entries += tensor.spec.numel * _damped_per_entry(self, tensor)
        is_weight_of_solved_layer = tensor.layer == tensor.name
        if not is_weight_of_solved_layer:
            return bytes_of_entries
        factors = sum(precision.factor_bytes(tensor.name) for precision in self.precisions)
        return bytes_of_entries + factors

    def step(self, tensor: TensorPlan) -> int:
        """The number of a tensor's entries that are merged at a time."""
        if tensor.layer or tensor.is_whole:
            return max(tensor.spec.numel, 1)
        if tensor.scope == ROWS:
            return max(1, self.chunk // tensor.row_length) * tensor.row_length
        return self.chunk

    def passes(self, tensor: TensorPlan) -> int:
        """How often a tensor is read.

        The merge reads it once. Inner products of the steps take one pass more. To find the
        smallest entry that stays takes two passes more.
        """
        if tensor.fate != MERGED:
            return 1
        if self.method.span is not None:
            return 2
        needs_limit = self.method.thinned in ("size", "middle") and min(tensor.densities) < 1
        return 3 if needs_limit else self.method.passes


def _damped_per_entry(plan: MergePlan, tensor: TensorPlan) -> int:
    """Bytes of precisions for each entry that are read once more, for their mean."""
    specs = [
        model.precision.spec(tensor.name)
        for model, kind in zip(plan.models, tensor.precisions, strict=False)
        if kind == OWN and model.precision is not None and model.precision.reads_twice
    ]
    if plan.base_precision is not None and plan.base_precision.reads_twice:
        specs.append(plan.base_precision.spec(tensor.name))
    return sum(spec.dtype.itemsize for spec in specs if spec is not None)


def stored_per_entry(plan: MergePlan, tensor: TensorPlan) -> int:
    """Bytes of all models and precisions for one entry of a tensor; factors are not counted."""
    if tensor.fate == COPIED:
        return plan.reference.specs[tensor.name].dtype.itemsize
    specs: list[Spec | None] = []
    if plan.base is not None:
        specs.append(plan.base.specs[tensor.name])
    for model, name, precision in zip(plan.models, tensor.names, tensor.precisions, strict=True):
        specs.append(model.source.specs[name])
        if precision == OWN and model.precision is not None:
            specs.append(model.precision.spec(tensor.name))
    if plan.base_precision is not None:
        specs.append(plan.base_precision.spec(tensor.name))
    return sum(spec.dtype.itemsize for spec in specs if spec is not None)
