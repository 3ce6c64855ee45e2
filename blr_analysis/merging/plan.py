"""Every model opened and every tensor's fate decided before the first byte is written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from blr_analysis.backprop.matrices import Joint
from blr_analysis.checks import one_of, positive_int
from blr_analysis.errors import InputError, ModelError
from blr_analysis.files import Source, read_config
from blr_analysis.merging.fates import fates
from blr_analysis.merging.formula import BLOCK
from blr_analysis.merging.items import CHUNK, MergePlan, OpenModel, stored_per_entry
from blr_analysis.merging.job import MISSING, Job, Member
from blr_analysis.merging.lora import is_adapter, is_place, open_model
from blr_analysis.merging.precisions import (
    StoredPrecision,
    check_belongs,
    check_fits,
    open_precision,
)
from blr_analysis.merging.sources import (
    MERGEABLE,
    Lengthened,
    differs_somewhere,
    match,
    token_tensors,
)
from blr_analysis.merging.tokens import tokens_of
from blr_analysis.task import unwrapped

HELD = 2**24  # bytes that they take with what is computed of them, if no fewer are asked for
ROWS = 2**18  # entries of a layer's rows that are merged together
WORKERS = 8
MAX_MEMORY = 256 * 2**20
# What changes a model's outputs and not the shapes of its weights.
SAME = (
    *("model_type", "num_attention_heads", "num_key_value_heads", "n_head", "hidden_act"),
    *("activation_function", "rope_theta", "rope_scaling"),
)


def make_plan(job: Job, *, max_memory: int = MAX_MEMORY, threads: int | None = None) -> MergePlan:
    """Open and check everything that can be checked without reading all of the weights.

    Args:
        job: what to merge with what.
        max_memory: bytes of buffers, at most; Python and torch themselves (some 0.2 GB) come on
            top of that.
        threads: None: one per core, up to 8.

    Raises:
        InputError: settings or weights that make no sense, adapters without a base.
        ModelError: models that are not the same, tensors that cannot be merged, or a fine-tuned
            model that equals its base.
        PosteriorError: precisions of another model, of other shapes, or missing.
        StorageError: folders or files that are missing, truncated or foreign.
    """
    _check_settings(job)
    _compare_configs(job)
    members = list(job.members)
    if job.base is not None:
        first = job.base_precision if job.row.uses_base_precision else None
        members.insert(0, Member(job.base, first))
    models = [] if job.base is None else [open_model(job.base, "base")]
    for t, member in enumerate(job.members):
        models.append(open_model(member.model, f"models[{t}]", *models[: job.base is not None]))
    precisions = [_precision(job, m, s) for m, s in zip(members, models, strict=True)]
    tokens = tokens_of([m.model for m in members], models, job.tokenizer_source)
    if tokens.rows is not None:
        models, precisions = _lengthened(tokens.rows, tokens.counts, models, precisions)
    based = job.base is not None and job.row.uses_base
    reference = models[0] if based or job.base is None else models[1]
    parts = [
        OpenModel(s, p, m.weight, m.density, _buffers(m), match(reference, s))
        for s, p, m in zip(models, precisions, members, strict=True)
    ]
    base = parts.pop(0) if job.base is not None else None  # else only of files
    plan = MergePlan(
        job, base.source if based and base else None, tuple(parts),
        base.precision if based and base else None, (), tokens,
    )  # fmt: skip
    _check_parts(plan)
    return _within(replace(plan, items=fates(plan)), max_memory, threads)


def _lengthened(
    rows: int,
    counts: Sequence[int],
    models: Sequence[Source],
    precisions: Sequence[StoredPrecision | None],
) -> tuple[list[Source], list[StoredPrecision | None]]:
    """Models with the rows of tokens that they lack borrowed from others, the first first, and
    precisions that say nothing of these rows."""
    known = list(zip(models, counts, strict=True))
    tables = token_tensors(known)
    longer = []
    for precision, count in zip(precisions, counts, strict=True):
        if precision is not None:
            stored = {key for name, key in precision.stored.items() if name in tables}
            source = Lengthened(rows, (precision.source, count), (), stored, empty=precision.prior)
            precision = replace(precision, source=source)
        longer.append(precision)
    return [Lengthened(rows, model, known, tables) for model in known], longer


def _check_parts(plan: MergePlan) -> None:
    """Raise where a model is no fine-tuned one, or a precision belongs to another model."""
    base, job = plan.base, plan.job
    for part in plan.parts:
        if base is not None and not differs_somewhere(base, part.source, part.reads):
            raise ModelError(
                f"every weight of {part.source.name!r} equals its base {base.name!r}: is it the "
                "fine-tuned model?"
            )
    pairs = [(plan.base_precision, base), *((p.precision, p.source) for p in plan.parts)]
    for precision, model in pairs:
        if precision is not None:
            check_fits(precision, plan.reference)
        if precision is not None and model is not None and not job.trust:
            check_belongs(precision, model)
    plain = plan.held and not any(p.layers for p in plan.held)
    for name, given in {"damping": job.damping, "shrink": job.shrink not in (None, 1)}.items():
        if given and plain:
            raise InputError(f"{name} is of precisions with factors: leave it out of diagonals")


def _precision(job: Job, member: Member, model: Source) -> StoredPrecision | None:
    if member.precision is None or not job.row.uses_precisions:
        return None
    label = f"the precision of {model.name}"
    return open_precision(member.precision, member.n_data, label=label).raised(job.power)


def _buffers(member: Member) -> frozenset[str]:
    """The tensors that are known to be no parameters."""
    own = unwrapped(member.model) if isinstance(member.model, nn.Module) else None
    return frozenset() if own is None else frozenset(n for n, _ in own.named_buffers())


def _check_settings(job: Job) -> None:
    method = job.row
    if not job.members:
        raise InputError("models is empty: name at least one fine-tuned model")
    if method.models not in (None, len(job.members)):
        raise InputError(f"{job.method} merges {method.models} models, got {len(job.members)}")
    if job.base is None and method.needs_base:
        raise InputError(f"method {job.method!r} needs the base that the models started from")
    one_of("missing_precision", job.missing_precision, MISSING)
    bounds = {"delta": 1e38, "shrink": 1, "power": 1, "damping": 1e6, "seed": 2**63}
    for name, most in bounds.items():
        value = getattr(job, name)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most
        if value is not None and not fits:
            raise InputError(f"{name} must be between 0 and {most:g}, got {value!r}")
    if job.dtype not in (torch.float32, torch.float64):
        raise InputError(f"dtype, of the arithmetic, must be float32 or float64, got {job.dtype!r}")
    if job.out_dtype is not None and job.out_dtype not in MERGEABLE:
        raise InputError(f"out_dtype must be one of {MERGEABLE} or None, got {job.out_dtype!r}")


def _compare_configs(job: Job) -> None:
    """Raise :class:`ModelError` where folders are of models that compute differently."""
    every = [job.base, *(m.model for m in job.members)]
    folders = [Path(p).expanduser() for p in every if is_place(p) and not is_adapter(p)]
    configs = {folder: config for folder in folders if (config := read_config(folder))}
    for folder, config in configs.items():
        if config.get("quantization_config"):
            raise ModelError(f"{str(folder)!r} is quantised: merge the models before that")
        place, known = next(iter(configs.items()))
        if odd := [k for k in SAME if known.get(k) != config.get(k)]:
            raise ModelError(
                f"{str(folder)!r} and {str(place)!r} are different architectures: in config.json "
                f"{odd[0]} is {config.get(odd[0])!r} and {known.get(odd[0])!r}"
            )


def _within(plan: MergePlan, max_memory: int, threads: int | None) -> MergePlan:
    """The same plan with as many threads and as long pieces as the memory allows."""
    positive_int("max_memory", max_memory)
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    workers = min(cores, WORKERS) if threads is None else positive_int("threads", threads)
    acc = plan.job.dtype.itemsize
    stored = max((stored_per_entry(plan, i) for i in plan.items), default=0)
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
