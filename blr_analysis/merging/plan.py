"""Every tensor's fate, decided and checked before the first byte is written."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from blr_analysis.checks import positive_int, some
from blr_analysis.errors import InputError, ModelError, PosteriorError
from blr_analysis.merging.formula import BLOCK
from blr_analysis.merging.job import MISSING, Job, Weight
from blr_analysis.merging.matching import MERGEABLE, differs_somewhere, match, same_bytes
from blr_analysis.merging.methods import Method
from blr_analysis.merging.precisions import Precision
from blr_analysis.views import Tabular
from blr_analysis.weights import Source, Spec

MERGED, COPIED = "merged", "copied"
CHUNK = 2**18  # entries of a tensor in hand at a time, at most
WORKERS = 8
MAX_MEMORY = 256 * 2**20
SHARD = 5_000_000_000
# What stands for the precision of one task in one tensor.
ZERO, OWN, BASE = "zero", "own", "base"


@dataclass(frozen=True)
class Part:
    """One fine-tuned model, opened.

    Attributes:
        source: θ_t.
        precision: H_t, or None.
        weight: α_t, a number or a function of the tensor's name.
    """

    source: Source
    precision: Precision | None
    weight: Weight


@dataclass(frozen=True)
class Item:
    """One tensor of the result.

    Attributes:
        name, fate: "merged" or "copied".
        spec: shape and the dtype that is written.
        reads: its name in each model, in order.
        weights: α_t, normalised where the method says so.
        curved: what stands for each H_t: "own", "base" (H_0 + δ) or "zero".
        note: what a reader of the report should know.
    """

    name: str
    fate: str
    spec: Spec
    reads: tuple[str, ...]
    weights: tuple[float, ...]
    curved: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class Plan(Tabular):
    """A merge that can be carried out: ``table`` shows every tensor's fate.

    Attributes:
        method: the row of the registry.
        base: θ_0, or None.
        parts: the fine-tuned models.
        base_precision: H_0 without δ, or None.
        delta: δ.
        dtype: of the arithmetic.
        items: the tensors of the result, in the order of reading.
        chunk, workers: entries at a time, and threads.
        memory: bytes of buffers that this takes at most.
        job: the description that the plan was made from, where folders are merged.
    """

    method: Method
    base: Source | None
    parts: tuple[Part, ...]
    base_precision: Precision | None
    delta: float
    dtype: torch.dtype
    items: tuple[Item, ...]
    chunk: int
    workers: int
    memory: int
    job: Job | None = None

    @property
    def reference(self) -> Source:
        """The model whose names, shapes and files the result takes over."""
        return self.parts[0].source if self.base is None else self.base

    @property
    def bytes_written(self) -> int:
        """Bytes of tensors in the result."""
        return sum(item.spec.nbytes for item in self.items)

    @property
    def bytes_read(self) -> int:
        """Bytes of weights and precisions that the merge reads."""
        return sum(self.bytes_of(item) for item in self.items)

    def bytes_of(self, item: Item) -> int:
        """What the merge reads for one tensor."""
        return item.spec.numel * _stored_per_entry(self, item)


def make_plan(
    method: Method,
    base: Source | None,
    parts: Sequence[Part],
    *,
    base_precision: Precision | None = None,
    delta: float = 0.0,
    missing_precision: str = "error",
    normalize: bool | None = None,
    dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
    max_memory: int = MAX_MEMORY,
    threads: int | None = None,
) -> Plan:
    """Check everything that can be checked without reading all of the weights.

    Raises:
        InputError: settings that make no sense, or weights that are not finite or sum to 0 where
            they are divided by their sum.
        ModelError: models that are not the same, tensors that cannot be merged, or a fine-tuned
            model that equals its base.
        PosteriorError: precisions of another model, of other shapes, or missing.
    """
    _check_settings(method, base, parts, delta, missing_precision, dtype, out_dtype)
    base = base if method.uses_base else None
    curved = method.uses_base_precision
    reference = parts[0].source if base is None else base
    reads = [match(reference, part.source) for part in parts]
    for part, names in zip(parts, reads, strict=True):
        if base is not None and not differs_somewhere(base, part.source, names):
            raise ModelError(
                f"{part.source.name!r} equals its base {base.name!r} in every weight: there is "
                "nothing to merge. Is it the fine-tuned model?"
            )
    if method.uses_precisions:
        _check_precisions(reference, [p.precision for p in parts])
        _check_precisions(reference, [base_precision if curved else None])
    divide = method.normalize if normalize is None else normalize
    items = tuple(
        _item(name, reference, parts, [r[name] for r in reads], method, divide, out_dtype)
        for name in reference.specs
    )
    if method.uses_precisions and missing_precision == "error":
        _refuse_missing(items, parts)
    stand_in = BASE if missing_precision == "base" and curved else ZERO
    items = tuple(_with_stand_in(item, stand_in) for item in items)
    plan = Plan(
        method=method,
        base=base,
        parts=tuple(parts),
        base_precision=base_precision if curved else None,
        delta=float(delta) if curved else 0.0,
        dtype=dtype,
        items=items,
        chunk=CHUNK,
        workers=1,
        memory=0,
    )
    return _within(plan, max_memory, threads)


def _check_settings(
    method: Method,
    base: Source | None,
    parts: Sequence[Part],
    delta: float,
    missing: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
) -> None:
    if not parts:
        raise InputError("models is empty: name at least one fine-tuned model")
    if base is None and method.needs_base:
        raise InputError(f"method {method.name!r} needs the base that the models started from")
    if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0 <= delta < math.inf:
        raise InputError(f"delta must be a finite number ≥ 0, got {delta!r}")
    if missing not in MISSING:
        raise InputError(f"missing_precision must be one of {MISSING}, got {missing!r}")
    if dtype not in (torch.float32, torch.float64):
        raise InputError(f"dtype, of the arithmetic, must be float32 or float64, got {dtype!r}")
    if out_dtype is not None and out_dtype not in MERGEABLE:
        raise InputError(f"out_dtype must be one of {MERGEABLE} or None, got {out_dtype!r}")


def _check_precisions(reference: Source, precisions: Sequence[Precision | None]) -> None:
    for precision in (p for p in precisions if p is not None):
        names = [n for n in precision.stored if precision.stored[n] == n]
        foreign = [n for n in names if n not in reference.specs]
        known_elsewhere = {precision.stored[n] for n in precision.stored if n in reference.specs}
        foreign = [n for n in foreign if n not in known_elsewhere]
        if foreign:
            raise PosteriorError(
                f"the precision {precision.name!r} belongs to another model than "
                f"{reference.name!r}, which has no {some(foreign)}"
            )
        for name, spec in reference.specs.items():
            own = precision.spec(name)
            if own is not None and own.shape != spec.shape:
                raise PosteriorError(
                    f"the precision of {name!r} in {precision.name!r} is {list(own.shape)}, the "
                    f"weight {list(spec.shape)}"
                )
            if own is not None and own.dtype not in MERGEABLE:
                raise PosteriorError(
                    f"the precision of {name!r} in {precision.name!r} is of {own.dtype}: expected "
                    "floating-point numbers"
                )


def _item(
    name: str,
    reference: Source,
    parts: Sequence[Part],
    reads: Sequence[str],
    method: Method,
    divide: bool,
    out_dtype: torch.dtype | None,
) -> Item:
    spec = reference.specs[name]
    alphas = [_alpha(part, name) for part in parts]
    notes = [
        f"in {part.source.name}: {read}"
        for part, read in zip(parts, reads, strict=True)
        if read != name
    ]
    if spec.dtype not in MERGEABLE or spec.numel == 0:
        for part, read in zip(parts, reads, strict=True):
            if not same_bytes(reference, name, part.source, read):
                raise ModelError(
                    f"{name!r} is of {spec.dtype}, which is copied and not merged, but "
                    f"{part.source.name!r} holds other values than {reference.name!r}: merge "
                    "models that agree in it (quantised weights are merged before quantisation)"
                )
        notes.append("the same in all models")
        return Item(name, COPIED, spec, tuple(reads), tuple(alphas), (), "; ".join(notes))
    if divide or (method.uses_precisions and not method.uses_base_precision):
        total = sum(alphas)
        if not abs(total) > 1e-12:
            raise InputError(
                f"the weights of {name!r} sum to {total:g}, and {method.name!r} divides by their "
                "sum: give weights that sum to something else, or normalize: false"
            )
        alphas = [a / total for a in alphas] if divide else alphas
    curved = tuple(_curved(part, name) if method.uses_precisions else ZERO for part in parts)
    out = Spec(spec.shape, spec.dtype if out_dtype is None else out_dtype)
    return Item(name, MERGED, out, tuple(reads), tuple(alphas), curved, "; ".join(notes))


def _alpha(part: Part, name: str) -> float:
    alpha = float(part.weight(name) if callable(part.weight) else part.weight)
    if not math.isfinite(alpha):
        raise InputError(
            f"the weight of {part.source.name!r} for {name!r} is {alpha}: expected a finite number"
        )
    return alpha


def _curved(part: Part, name: str) -> str:
    if part.precision is None:
        return ""
    if part.precision.spec(name) is not None:
        return OWN
    return ZERO if name in part.precision.frozen else ""


def _refuse_missing(items: Sequence[Item], parts: Sequence[Part]) -> None:
    for k, part in enumerate(parts):
        lacking = [i.name for i in items if i.fate == MERGED and i.curved[k] == ""]
        if not lacking:
            continue
        if part.precision is None:
            raise PosteriorError(
                f"the precision of {part.source.name!r} is missing: name it, compute it with "
                "`blr-analysis fisher`, or say what stands for it with missing_precision: base "
                "(the base's) or zero (as uncertain as can be)"
            )
        raise PosteriorError(
            f"{part.precision.name!r} has no precision for {some(lacking)} of "
            f"{part.source.name!r}: compute it for the whole model, or say what stands for it with "
            "missing_precision: base (the base's) or zero (as uncertain as can be)"
        )


def _with_stand_in(item: Item, stand_in: str) -> Item:
    if "" not in item.curved:
        return item
    curved = tuple(c or stand_in for c in item.curved)
    note = f"precision missing: {stand_in}"
    return Item(
        item.name, item.fate, item.spec, item.reads, item.weights, curved,
        f"{item.note}; {note}" if item.note else note,
    )  # fmt: skip


def _stored_per_entry(plan: Plan, item: Item) -> int:
    """Bytes on disk that stand behind one entry of a tensor."""
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


def _within(plan: Plan, max_memory: int, threads: int | None) -> Plan:
    """The same plan with as many threads and as long pieces as the memory allows."""
    positive_int("max_memory", max_memory)
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    workers = min(cores, WORKERS) if threads is None else positive_int("threads", threads)
    acc = plan.dtype.itemsize
    stored = max((_stored_per_entry(plan, i) for i in plan.items), default=0)
    # What is read, H = S − δ and H_0 + δ computed from it, the result, and its rounded copy.
    each = stored + acc * (len(plan.parts) + 1) + 2 * acc
    fixed = 6 * BLOCK * acc

    def need(workers: int, chunk: int) -> int:
        return workers * (chunk * each + fixed)

    longest = max((i.spec.numel for i in plan.items), default=1)
    chunk = min(CHUNK, -(-longest // BLOCK) * BLOCK)
    while need(workers, chunk) > max_memory and chunk > BLOCK:
        chunk = max(BLOCK, chunk // 2 // BLOCK * BLOCK)
    while need(workers, chunk) > max_memory and workers > 1:
        workers -= 1
    if need(workers, chunk) > max_memory:
        raise InputError(
            f"max_memory={max_memory} bytes is too little for {len(plan.parts)} models at once: "
            f"{need(1, BLOCK)} are needed at least"
        )
    values = {**vars(plan), "chunk": chunk, "workers": workers, "memory": need(workers, chunk)}
    return Plan(**values)
