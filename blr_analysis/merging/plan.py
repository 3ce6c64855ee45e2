"""Every folder opened and every tensor's fate decided before the first byte is written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from blr_analysis.backprop.matrices import Joint
from blr_analysis.checks import positive_int, some
from blr_analysis.errors import InputError, ModelError
from blr_analysis.files import Folder, Source, read_config
from blr_analysis.merging.fates import COPIED, MERGED, OWN, Item, OpenModel, fates
from blr_analysis.merging.formula import BLOCK
from blr_analysis.merging.job import MISSING, Job, MergeSettings
from blr_analysis.merging.layers import NOISE
from blr_analysis.merging.lora import is_adapter, open_adapter
from blr_analysis.merging.matching import MERGEABLE, differs_somewhere, match
from blr_analysis.merging.methods import Method
from blr_analysis.merging.precisions import (
    StoredPrecision,
    check_belongs,
    check_fits,
    open_precision,
)
from blr_analysis.merging.vocabularies import Retokenized, untied
from blr_analysis.views import Tabular

CHUNK = 2**19  # entries of a tensor in hand at a time, at most
HELD = 2**24  # bytes that they take with what is computed of them, if no fewer are asked for
ROWS = 2**18  # entries of a layer's rows that are merged together
WORKERS = 8
MAX_MEMORY = 256 * 2**20
SHARD = 5_000_000_000


@dataclass(frozen=True)
class MergePlan(Tabular):
    """A merge that can be carried out: ``table`` shows every tensor's fate.

    Attributes:
        settings: how to merge; of folders a :class:`Job`.
        base: θ_0, or None.
        parts: the fine-tuned models.
        base_precision: H_0 without δ, or None.
        items: the tensors of the result, in the order of reading.
        chunk, workers: entries at a time, and threads.
        memory: bytes of buffers that this takes at most.
    """

    settings: MergeSettings
    base: Source | None
    parts: tuple[OpenModel, ...]
    base_precision: StoredPrecision | None
    items: tuple[Item, ...]
    chunk: int = CHUNK
    workers: int = 1
    memory: int = 0
    library: ClassVar[str] = "transformers"  # which loads the result

    @property
    def job(self) -> Job:
        """What the folders are merged by."""
        assert isinstance(self.settings, Job)
        return self.settings

    @cached_property
    def method(self) -> Method:
        """The row of the registry."""
        return self.settings.row

    @property
    def delta(self) -> float:
        """δ; 0 where the method has no H_0."""
        return float(self.settings.delta) if self.method.uses_base_precision else 0.0

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic."""
        return self.settings.dtype

    def family(self, key: str) -> tuple[float | None, float, float | None]:
        """Shrink (None: as measured), power and damping of a layer's precisions with factors.
        Measured is where all of its moments are singular, and no H_0 holds what they leave out."""
        how, based = self.settings, self.base_precision is not None or self.delta
        singular = not based and all(p.chance.get(key) for p in self.used)
        shrink = 1.0 if how.shrink is None and not singular else how.shrink
        return shrink, float(how.power), how.damping

    @property
    def held(self) -> list[StoredPrecision]:
        """The precisions, the base's first."""
        every = [self.base_precision, *(part.precision for part in self.parts)]
        return [p for p in every if p is not None]

    @property
    def used(self) -> list[StoredPrecision]:
        """The models' precisions."""
        return [p.precision for p in self.parts if p.precision is not None]

    @property
    def of_few(self) -> list[str]:
        """Which of them are moments of so few examples that much of them is chance."""
        said = []
        for p in self.used:
            if p.noise > NOISE:
                shrunk = any(self.family(key)[0] is None for key in p.chance)
                then = ", and shrunk as measured: take more" if shrunk else ": take more, or shrink"
                said.append(
                    f"{p.name}: of so few examples that {p.noise:.0%} of a layer's moments is "
                    f"chance{then}"
                )
        return said

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
        notes = [f"{p.source.name}: {note}" for p in self.parts for note in p.source.notes]
        used = self.used
        kinds = sorted({p.kind for p in used if p.kind})
        if len(kinds) > 1:
            notes.append(
                f"precisions of different kinds weigh against each other: {', '.join(kinds)}; "
                "their units may differ"
            )
        notes += self.of_few
        names = [p.name for p in used]
        notes += [
            f"the precision {name!r} stands for several models"
            for name in sorted({n for n in names if names.count(n) > 1})
        ]
        return notes

    @property
    def bytes_written(self) -> int:
        """Bytes of tensors in the result."""
        return sum(map(self.bytes_for, self.items))

    def bytes_for(self, item: Item) -> int:
        """Bytes that are written for one tensor."""
        return item.spec.nbytes

    @property
    def bytes_read(self) -> int:
        """Bytes of weights and precisions that the merge reads."""
        return sum(self.bytes_of(item) for item in self.items)

    def bytes_of(self, item: Item) -> int:
        """What the merge reads for one tensor, with the factors of its layer at its weight."""
        factors = 0
        if item.layer == item.name:
            factors = sum(p.factor_bytes(item.name) for p in self.held)
        return item.spec.numel * _stored_per_entry(self, item) * self.passes(item) + factors

    def passes(self, item: Item) -> int:
        """How often a tensor is read: once more for its products, twice for what is largest."""
        if item.fate != MERGED:
            return 1
        trims = self.method.thinned == "size" and min(item.densities) < 1
        return 1 + (self.method.span is not None) + 2 * trims


def make_plan(
    settings: MergeSettings,
    base: Source | None,
    parts: Sequence[OpenModel],
    *,
    base_precision: StoredPrecision | None = None,
    max_memory: int = MAX_MEMORY,
    threads: int | None = None,
) -> MergePlan:
    """Check everything that can be checked without reading all of the weights.

    Raises:
        InputError: settings that make no sense, or weights that are not finite or sum to 0 where
            they are divided by their sum.
        ModelError: models that are not the same, tensors that cannot be merged, or a fine-tuned
            model that equals its base.
        PosteriorError: precisions of another model, of other shapes, or missing.
    """
    method = settings.row
    _check_settings(settings, base, parts)
    if base is not None and not method.uses_base:
        match(base, parts[0].source)  # which gives configuration and tokenizer all the same
    base = base if method.uses_base else None
    curved = method.uses_base_precision
    reference = parts[0].source if base is None else base
    if not reference.specs:
        raise ModelError(f"{reference.name!r} holds no tensors")
    reads = [match(reference, part.source) for part in parts]
    for part, names in zip(parts, reads, strict=True):
        if base is not None and not differs_somewhere(base, part.source, names):
            raise ModelError(
                f"every weight of {part.source.name!r} equals its base {base.name!r}: is it the "
                "fine-tuned model?"
            )
    if method.uses_precisions:
        first = [base_precision] if curved else []
        held = [p for p in (*(p.precision for p in parts), *first) if p is not None]
        for precision in held:
            check_fits(precision, reference)
        unused = {"damping": settings.damping, "shrink": settings.shrink not in (None, 1)}
        for name, given in unused.items():
            if given and held and not any(p.layers for p in held):
                raise InputError(f"{name} is of precisions with factors: leave it out of diagonals")
        for part in parts:
            if part.precision is not None and not settings.trust:
                check_belongs(part.precision, part.source)
        if base is not None and base_precision is not None and curved and not settings.trust:
            check_belongs(base_precision, base)
        parts = [
            p if p.precision is None else replace(p, precision=p.precision.raised(settings.power))
            for p in parts
        ]
        base_precision = base_precision and base_precision.raised(settings.power)
    for part in parts:
        _check_filters(part, reference)
    items = fates(
        reference,
        parts,
        reads,
        settings,
        based=base is not None,
        base_precision=base_precision if curved else None,
    )
    prior = base_precision if curved else None
    plan = MergePlan(settings, base, tuple(parts), prior, items)
    return _within(plan, max_memory, threads)


def _check_filters(part: OpenModel, reference: Source) -> None:
    """Raise :class:`InputError` where a weight's filter is in no tensor's name."""
    asked = [getattr(given, "unused", None) for given in (part.weight, part.density)]
    rules = [rule for unused in asked if unused is not None for rule in unused(reference.specs)]
    for rule in rules:
        parts = {p for name in reference.specs for p in (name, *name.split("."))}
        near = get_close_matches(rule.part, parts, 3, 0.5) or sorted(parts, key=len)[-1:]
        raise InputError(
            f"{rule.place or part.source.name}: no tensor's name holds the filter {rule.part!r}: "
            f"did you mean {some(near)}?"
        )


def _check_settings(
    settings: MergeSettings, base: Source | None, parts: Sequence[OpenModel]
) -> None:
    delta, missing = settings.delta, settings.missing_precision
    dtype, out_dtype = settings.dtype, settings.out_dtype
    if not parts:
        raise InputError("models is empty: name at least one fine-tuned model")
    if settings.row.models not in (None, len(parts)):
        raise InputError(f"{settings.method} merges {settings.row.models} models, got {len(parts)}")
    if base is None and settings.row.needs_base:
        raise InputError(f"method {settings.method!r} needs the base that the models started from")
    if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0 <= delta < 1e38:
        raise InputError(f"delta must be ≥ 0 and fit into float32, got {delta!r}")
    if missing not in MISSING:
        raise InputError(f"missing_precision must be one of {MISSING}, got {missing!r}")
    if dtype not in (torch.float32, torch.float64):
        raise InputError(f"dtype, of the arithmetic, must be float32 or float64, got {dtype!r}")
    shrink = 1.0 if settings.shrink is None else settings.shrink
    for name, value in {"shrink": shrink, "power": settings.power}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise InputError(f"{name} must be between 0 and 1, got {value!r}")
    damping = settings.damping
    if damping is not None and not (isinstance(damping, int | float) and 0 <= damping < 1e6):
        raise InputError(f"damping must be at least 0, or None, got {damping!r}")
    if out_dtype is not None and out_dtype not in MERGEABLE:
        raise InputError(f"out_dtype must be one of {MERGEABLE} or None, got {out_dtype!r}")


def _stored_per_entry(plan: MergePlan, item: Item) -> int:
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


def _within(plan: MergePlan, max_memory: int, threads: int | None) -> MergePlan:
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
    fixed = 7 * BLOCK * acc
    if plan.method.thinned or plan.method.span is not None:  # all steps of a block, in float64
        fixed += (2 * len(plan.parts) + 8) * BLOCK * 8

    layers = [_layer_need(plan, key) for key in plan.layers]

    def need(workers: int, chunk: int) -> int:
        return workers * max(chunk * each + fixed, *layers, 0)

    longest = max((i.spec.numel for i in plan.items), default=1)
    chunk = min(CHUNK, max(1, -(-longest // BLOCK)) * BLOCK)
    while (chunk * each > HELD or need(workers, chunk) > max_memory) and chunk > BLOCK:
        chunk = max(BLOCK, chunk // 2 // BLOCK * BLOCK)
    while need(workers, chunk) > max_memory and workers > 1:
        workers -= 1
    if need(workers, chunk) > max_memory:
        raise InputError(
            f"max_memory={max_memory} bytes is too little for {len(plan.parts)} models: at least "
            f"{need(1, BLOCK)}"
        )
    return replace(plan, chunk=chunk, workers=workers, memory=need(workers, chunk))


def _layer_need(plan: MergePlan, key: str) -> int:
    """Bytes that the largest layer's factors, solve and rows take, in float64."""
    joint, count = plan.layers[key], len(plan.parts)
    g, o = joint.layout.groups, joint.layout.rows
    i = joint.layout.columns + (joint.bias is not None)
    held = len(plan.held)
    if any(p.has_outputs(key) for p in plan.held):
        factors = (held + 3) * g * (o * o + i * i + 2 * o * i)
        return 8 * (factors + (2 * count + 8) * g * o * i)
    rows, each = rows_at_once(joint), 2 * count + 6
    if any(p.by_row(key) for p in plan.held):
        each += 6
    return 8 * ((held + 5) * g * i * i + each * g * rows * i)


def rows_at_once(joint: Joint) -> int:
    """Rows of a layer's matrix that are merged together where all have one matrix H: always the
    same, so that the result's bits do not depend on the memory."""
    layout = joint.layout
    if layout.groups > 1 or layout.transposed:
        return layout.rows
    return min(layout.rows, max(64, ROWS // layout.columns))


# What changes a model's outputs and not the shapes of its weights.
SAME = (
    "num_attention_heads",
    "num_key_value_heads",
    "n_head",
    "hidden_act",
    "activation_function",
    "rope_theta",
    "rope_scaling",
)


def plan_folders(
    job: Job, *, max_memory: int = MAX_MEMORY, threads: int | None = None
) -> MergePlan:
    """Open and check everything that a merge of folders needs; nothing is written.

    Args:
        job: what to merge with what.
        max_memory: bytes of buffers, at most; Python and torch themselves (some 0.2 GB) come on
            top of that.
        threads: None: one per core, up to 8.

    Raises:
        InputError: settings or weights that make no sense, adapters without a base.
        ModelError: models that do not fit together, or one that equals its base.
        PosteriorError: precisions that do not fit their model, or are missing.
        StorageError: folders or files that are missing, truncated or foreign.
    """
    method = job.row
    base = None if job.base is None else Folder.open(job.base)
    every = {m.model: open_model(m.model, base) for m in job.members}
    every = untied(every if base is None or job.base is None else {**every, job.base: base})
    if job.vocabulary is not None:
        every = {place: Retokenized(job.vocabulary, place, every) for place in every}
    base = None if job.base is None else every[job.base]
    parts = []
    for member in job.members:
        precision = None
        if method.uses_precisions and member.precision is not None:
            precision = open_precision(member.precision, member.n_data)
            if job.vocabulary is not None:
                precision = precision.retokenized(job.vocabulary, member.model)
        parts.append(OpenModel(every[member.model], precision, member.weight, member.density))
    first = None
    if method.uses_base_precision and job.base_precision is not None:
        first = open_precision(job.base_precision)
        if job.vocabulary is not None and job.base is not None:
            first = first.retokenized(job.vocabulary, job.base)
    _compare_configs(job)
    return make_plan(job, base, parts, base_precision=first, max_memory=max_memory, threads=threads)


def reference_folder(job: Job) -> Path:
    """The folder whose configuration and other files the result takes over."""
    if job.base is not None:
        return job.base
    plain = [m.model for m in job.members if not is_adapter(m.model)]
    return plain[0]


def fit_config(plan: MergePlan, config: dict[str, Any]) -> None:
    """Write into a configuration how many tokens the result has, and whether its head is its
    embedding."""
    vocabulary = plan.job.vocabulary
    headed = any(item.name.endswith("lm_head.weight") for item in plan.items)
    for section in (config, config.get("text_config") or {}):
        if section.get("tie_word_embeddings") and headed:
            section["tie_word_embeddings"] = False
        if vocabulary is not None and "vocab_size" in section:
            section["vocab_size"] = vocabulary.size


def open_model(model: Path, base: Source | None) -> Source:
    """A folder's tensors; an adapter's, applied to ``base``."""
    if not is_adapter(model):
        return Folder.open(model)
    if base is None:
        raise InputError(f"{str(model)!r} is an adapter: name its base model")
    return open_adapter(model, base, dtype=torch.float32)


def _compare_configs(job: Job) -> None:
    folders = [m.model for m in job.members if not is_adapter(m.model)]
    if job.base is not None:
        folders.insert(0, job.base)
    configs = {folder: config for folder in folders if (config := read_config(folder))}
    for folder, config in configs.items():
        if config.get("quantization_config"):
            raise ModelError(
                f"{str(folder)!r} is quantised (quantization_config): merge the models "
                "before, then quantise"
            )
    kinds = {str(c["model_type"]): f for f, c in configs.items() if "model_type" in c}
    if len(kinds) > 1:
        listed = ", ".join(f"{str(folder)!r} ({kind})" for kind, folder in kinds.items())
        raise ModelError(f"the models are of different architectures: {listed}")
    for folder, config in configs.items():
        place, known = next(iter(configs.items()))
        odd = [k for k in SAME if known.get(k) != config.get(k)]
        if odd and known.get("model_type") == config.get("model_type"):
            raise ModelError(
                f"{str(folder)!r} computes otherwise than {str(place)!r} with the same weights: in "
                f"config.json {odd[0]} is {config.get(odd[0])!r} and {known.get(odd[0])!r}"
            )
