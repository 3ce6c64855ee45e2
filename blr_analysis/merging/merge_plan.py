"""A merge that can be carried out: which tensors, and what they are read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from blr_analysis.backprop.matrices import Joint
from blr_analysis.checks import some
from blr_analysis.files import Source, Spec
from blr_analysis.merging.job import Job, Weight
from blr_analysis.merging.methods import Method
from blr_analysis.merging.precisions import StoredPrecision
from blr_analysis.merging.tokens import Tokens

CHUNK = 2**19  # entries of a tensor in hand at a time, at most
MERGED, AVERAGED, COPIED = "merged", "averaged", "copied"
# What stands for the precision of one task in one tensor.
ZERO, OWN, BASE = "zero", "own", "base"


@dataclass(frozen=True)
class OpenModel:
    """One fine-tuned model, opened.

    Attributes:
        source: θ_t.
        precision: H_t, or None.
        weight: α_t, a number or a function of the tensor's name.
        density: the share of θ_t − θ_0 that stays, the same.
        buffers: the names of tensors that are known to be no parameters.
        reads: by a tensor of the result, its name in this model.
    """

    source: Source
    precision: StoredPrecision | None
    weight: Weight
    density: Weight
    buffers: frozenset[str]
    reads: Mapping[str, str]


@dataclass(frozen=True)
class Item:
    """One tensor of the result.

    Attributes:
        name, fate: "merged", "averaged" (a running statistic, under every method) or "copied".
        spec: shape and the dtype that is written.
        reads: its name in each model, in order.
        weights: α_t, normalised where the method says so.
        curved: what stands for each H_t: "own", "base" (H_0 + δ) or "zero".
        note: what a reader of the report should know.
        layer: the weight of the layer whose matrix it is part of, where that is solved as one.
        densities, scale: of methods that leave a part of θ_t − θ_0 out: each model's share, and λ.
    """

    name: str
    fate: str
    spec: Spec
    reads: tuple[str, ...]
    weights: tuple[float, ...] = ()
    curved: tuple[str, ...] = ()
    note: str = ""
    layer: str = ""
    densities: tuple[float, ...] = ()
    scale: float = 1.0


@dataclass(frozen=True)
class MergePlan:
    """A merge that can be carried out.

    Attributes:
        job: what to merge with what, and how.
        base: θ_0, or None.
        parts: the fine-tuned models.
        base_precision: H_0 without δ, or None.
        items: the tensors of the result, in the order of reading.
        tokens: the tokenizer of the result, and the rows of its tables.
        chunk, workers: entries at a time, and threads.
        memory: bytes of buffers that this takes at most.
    """

    job: Job
    base: Source | None
    parts: tuple[OpenModel, ...]
    base_precision: StoredPrecision | None
    items: tuple[Item, ...]
    tokens: Tokens
    chunk: int = CHUNK
    workers: int = 1
    memory: int = 0

    @cached_property
    def method(self) -> Method:
        """The row of the registry."""
        return self.job.row

    @property
    def delta(self) -> float:
        """δ; 0 where the method has no H_0."""
        return float(self.job.delta) if self.method.uses_base_precision else 0.0

    def family(self, key: str) -> tuple[float | None, float, float | None]:
        """Shrink (None: as measured), power and damping of a layer's precisions with factors.
        Measured is where all of its moments are singular, and no H_0 holds what they leave out."""
        based = self.base_precision is not None or self.delta
        singular = not based and all(p.chance.get(key) for p in self.used)
        shrink = 1.0 if self.job.shrink is None and not singular else self.job.shrink
        return shrink, float(self.job.power), self.job.damping

    @property
    def used(self) -> list[StoredPrecision]:
        """The models' precisions."""
        return [p.precision for p in self.parts if p.precision is not None]

    @property
    def held(self) -> list[StoredPrecision]:
        """The precisions, the base's first."""
        return [*([] if self.base_precision is None else [self.base_precision]), *self.used]

    @cached_property
    def layers(self) -> dict[str, Joint]:
        """The layers that are solved as one matrix, by their weights."""
        joints = {k: j for p in self.held for k, (j, _) in p.layers.items()}
        used = {item.layer for item in self.items}
        return {key: joint for key, joint in joints.items() if key in used}

    @property
    def reference(self) -> Source:
        """The model whose names, shapes and files the result takes over."""
        return self.parts[0].source if self.base is None else self.base

    @property
    def notes(self) -> list[str]:
        """What a user should be told about the models."""
        names = [p.name for p in self.used]
        kinds = {p.kind for p in self.used if p.kind}
        twice = sorted({n for n in names if names.count(n) > 1})
        notes = list(self.tokens.notes)
        notes += [f"the precision {name!r} stands for several models" for name in twice]
        if len(kinds) > 1:
            notes.append(f"precisions of different kinds, in other units: {some(sorted(kinds))}")
        return notes

    @property
    def bytes_written(self) -> int:
        """Bytes of tensors in the result."""
        return sum(item.spec.nbytes for item in self.items)

    @property
    def bytes_read(self) -> int:
        """Bytes of weights and precisions that the merge reads."""
        return sum(self.bytes_of(item) for item in self.items)

    def bytes_of(self, item: Item) -> int:
        """What the merge reads for one tensor, with the factors of its layer at its weight."""
        factors = 0
        if item.layer == item.name:
            factors = sum(p.factor_bytes(item.name) for p in self.held)
        return item.spec.numel * stored_per_entry(self, item) * self.passes(item) + factors

    def passes(self, item: Item) -> int:
        """How often a tensor is read: once more for its products, twice for what is largest."""
        if item.fate != MERGED:
            return 1
        trims = self.method.thinned == "size" and min(item.densities) < 1
        return 1 + (self.method.span is not None) + 2 * trims


def stored_per_entry(plan: MergePlan, item: Item) -> int:
    """Bytes on disk that stand behind one entry of a tensor, factors apart."""
    if item.fate == COPIED:
        return plan.reference.specs[item.name].dtype.itemsize
    size = 0 if plan.base is None else plan.base.specs[item.name].dtype.itemsize
    for part, read, curved in zip(plan.parts, item.reads, item.curved, strict=True):
        size += part.source.specs[read].dtype.itemsize
        if curved == OWN and part.precision is not None:
            own = part.precision.spec(item.name)
            size += 0 if own is None else own.dtype.itemsize
    first = None if plan.base_precision is None else plan.base_precision.spec(item.name)
    return size + (0 if first is None else first.dtype.itemsize)
