"""Every model opened and every tensor's fate decided before the first byte is written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from blr_analysis.adapters import Untied, is_adapter
from blr_analysis.backprop.matrices import Joint
from blr_analysis.checks import one_of, positive_int
from blr_analysis.errors import InputError, ModelError
from blr_analysis.files import Source, read_config
from blr_analysis.merging.formula import BLOCK
from blr_analysis.merging.job import MISSING_PRECISION, Job, Member
from blr_analysis.merging.merge_plan import (
    CHUNK,
    MergePlan,
    OpenModel,
    TensorPlan,
    stored_per_entry,
)
from blr_analysis.merging.methods import MATRICES, ROWS, TENSORS
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
    is_place,
    match,
    open_model,
    token_tensors,
)
from blr_analysis.merging.tensor_plans import plan_tensors
from blr_analysis.merging.tokens import Tokens, tokens_of
from blr_analysis.models import unwrapped

BUFFERED = 2**24  # bytes of buffers a thread, where no fewer are asked for
ENTRIES_OF_ROWS = 2**18  # entries of a layer's rows that are merged together
WORKERS = 8
MAX_MEMORY = 256 * 2**20
# What changes a model's outputs and not the shapes of its weights.
SAME = (
    "model_type",
    "num_attention_heads",
    "num_key_value_heads",
    "n_head",
    "hidden_act",
    "activation_function",
    "rope_theta",
    "rope_scaling",
)
# The largest value of a setting, which is at least 0.
LIMITS = {"delta": 1e38, "shrink": 1, "power": 1, "damping": 1e6, "seed": 2**63}
LIMITS |= {"t": 1e38, "select_topk": 1, "r": 1e6, "alpha": 1e6}


def make_plan(job: Job, *, max_memory: int = MAX_MEMORY, threads: int | None = None) -> MergePlan:
    """Open and check everything that can be checked without reading all of the weights.

    Args:
        job: what to merge with what.
        max_memory: bytes of buffers, at most; Python and torch themselves (some 0.2 GB) come on
            top of that.
        threads: None: one per core, up to 8.

    Raises:
        InputError: settings or weights that make no sense, adapters without a base, tokenizers
            that do not fit each other.
        ModelError: models that are not the same, tensors that cannot be merged, or a fine-tuned
            model that equals its base.
        PosteriorError: precisions of another model, of other shapes, or missing.
        StorageError: folders or files that are missing, truncated or foreign.
    """
    _check_settings(job)
    _compare_configs(job)
    members = list(job.members)
    if job.base is not None:
        precision = job.base_precision if job.row.uses_base_precision else None
        members.insert(0, Member(job.base, precision))
    sources = _opened(job)
    precisions = [
        _precision(job, member, source) for member, source in zip(members, sources, strict=True)
    ]
    tokens = tokens_of([member.model for member in members], sources, job.tokenizer_source)
    if tokens.rows is not None:
        sources, precisions = _lengthened(tokens.rows, tokens.counts, sources, precisions)
    plan = _unplanned(job, members, sources, precisions, tokens)
    _check_models(plan)
    return _within(replace(plan, tensors=plan_tensors(plan)), max_memory, threads)


def _unplanned(
    job: Job,
    members: Sequence[Member],
    sources: Sequence[Source],
    precisions: Sequence[StoredPrecision | None],
    tokens: Tokens,
) -> MergePlan:
    """A plan whose tensors are still to be planned."""
    has_base = job.base is not None
    uses_base = has_base and job.row.uses_base
    reference = sources[1] if has_base and not uses_base else sources[0]
    models = [
        OpenModel(
            source,
            precision,
            member.weight,
            member.density,
            member.epsilon,
            member.gamma,
            _buffers(member),
            match(reference, source),
        )
        for source, precision, member in zip(sources, precisions, members, strict=True)
    ]
    base = models.pop(0) if has_base else None
    if base is None or not uses_base:
        return MergePlan(job, None, tuple(models), None, (), tokens)
    return MergePlan(job, base.source, tuple(models), base.precision, (), tokens)


def _opened(job: Job) -> list[Source]:
    """The models, the base first where there is one."""
    base = None if job.base is None else open_model(job.base, "base")
    models = [
        open_model(member.model, f"models[{t}]", base) for t, member in enumerate(job.members)
    ]
    sources = models if base is None else [base, *models]
    untied: dict[str, str] = {}
    for source in sources:
        untied |= getattr(source, "untied", {})
    return [Untied(source, untied) for source in sources] if untied else sources


def _lengthened(
    rows: int,
    counts: Sequence[int],
    models: Sequence[Source],
    precisions: Sequence[StoredPrecision | None],
) -> tuple[list[Source], list[StoredPrecision | None]]:
    """Models with the rows of tokens that they lack borrowed from others, the first first, and
    precisions that say nothing of these rows."""
    counted = list(zip(models, counts, strict=True))
    tables = token_tensors(counted)
    longer = []
    for precision, count in zip(precisions, counts, strict=True):
        if precision is not None:
            stored = {key for name, key in precision.stored.items() if name in tables}
            source = Lengthened(rows, (precision.source, count), (), stored, empty=precision.prior)
            precision = replace(precision, source=source)
        longer.append(precision)
    return [Lengthened(rows, model, counted, tables) for model in counted], longer


def _check_models(plan: MergePlan) -> None:
    """Raise where a model is no fine-tuned one, or a precision belongs to another model."""
    base = plan.base
    for model in plan.models:
        if base is not None and not differs_somewhere(base, model.source, model.names):
            raise ModelError(
                f"every weight of {model.source.name!r} equals its base {base.name!r}: is it the "
                "fine-tuned model?"
            )
    _check_precision(plan, plan.base_precision, base)
    for model in plan.models:
        _check_precision(plan, model.precision, model.source)
    if not plan.precisions or any(precision.layers for precision in plan.precisions):
        return
    if plan.job.shrink not in (None, 1):
        raise InputError("shrink is of precisions with factors: leave it out of diagonals")


def _check_precision(
    plan: MergePlan, precision: StoredPrecision | None, model: Source | None
) -> None:
    """Raise where a precision has other shapes than the result, or is of another model."""
    if precision is None:
        return
    check_fits(precision, plan.reference)
    if model is not None and not plan.job.trust:
        check_belongs(precision, model)


def _precision(job: Job, member: Member, model: Source) -> StoredPrecision | None:
    if member.precision is None or not job.row.uses_precisions:
        return None
    label = f"the precision of {model.name}"
    return open_precision(member.precision, member.n_data, label=label).adjusted(
        job.power, job.damping
    )


def _buffers(member: Member) -> frozenset[str]:
    """The tensors that are known to be no parameters."""
    if not isinstance(member.model, nn.Module):
        return frozenset()
    return frozenset(name for name, _ in unwrapped(member.model).named_buffers())


def _check_settings(job: Job) -> None:
    method = job.row
    if not job.members:
        raise InputError("models is empty: name at least one fine-tuned model")
    if method.models not in (None, len(job.members)):
        count = "one model with the base" if method.models == 1 else f"{method.models} models"
        raise InputError(f"{job.method} merges {count}, got {len(job.members)} models")
    if job.base is None and method.needs_base:
        raise InputError(f"method {job.method!r} needs the base that the models started from")
    if method.name == "nearswap" and job.t is None:
        raise InputError("nearswap needs t, the largest change of an entry")
    if job.select_topk == 0:
        raise InputError("select_topk must be above 0: it is the share of entries that stay")
    one_of("missing_precision", job.missing_precision, MISSING_PRECISION)
    for name, limit in LIMITS.items():
        value = getattr(job, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value <= limit):
            raise InputError(f"{name} must be between 0 and {limit:g}, got {value!r}")
    if job.dtype not in (torch.float32, torch.float64):
        raise InputError(f"dtype, of the arithmetic, must be float32 or float64, got {job.dtype!r}")
    if job.out_dtype is not None and job.out_dtype not in MERGEABLE:
        raise InputError(f"out_dtype must be one of {MERGEABLE} or None, got {job.out_dtype!r}")


def _compare_configs(job: Job) -> None:
    """Raise :class:`ModelError` where folders are of models that compute differently."""
    models = [job.base, *(member.model for member in job.members)]
    folders = [Path(model).expanduser() for model in models if is_place(model)]
    configs = {folder: read_config(folder) for folder in folders if not is_adapter(folder)}
    configs = {folder: config for folder, config in configs.items() if config}
    for folder, config in configs.items():
        if config.get("quantization_config"):
            raise ModelError(f"{str(folder)!r} is quantised: merge the models before that")
        first_folder, first_config = next(iter(configs.items()))
        different = [key for key in SAME if first_config.get(key) != config.get(key)]
        if different:
            key = different[0]
            raise ModelError(
                f"{str(folder)!r} and {str(first_folder)!r} are different architectures: in "
                f"config.json {key} is {config.get(key)!r} and {first_config.get(key)!r}"
            )


def _within(plan: MergePlan, max_memory: int, threads: int | None) -> MergePlan:
    """The same plan with as many threads and as long pieces as the memory allows."""
    positive_int("max_memory", max_memory)
    workers = min(_cores(), WORKERS) if threads is None else positive_int("threads", threads)
    per_entry = _bytes_per_entry(plan)
    per_block = _bytes_per_block(plan)
    at_once = [_bytes_of_layer(plan, layer) for layer in plan.layers]
    at_once += [_bytes_of_scope(plan, tensor) for tensor in plan.tensors]
    per_layer = max(at_once, default=0)

    def need(workers: int, chunk: int) -> int:
        return workers * max(chunk * per_entry + per_block, per_layer)

    longest = max((tensor.spec.numel for tensor in plan.tensors), default=1)
    blocks = max(1, -(-longest // BLOCK))
    chunk = min(CHUNK, blocks * BLOCK)
    while chunk > BLOCK and (chunk * per_entry > BUFFERED or need(workers, chunk) > max_memory):
        chunk = max(BLOCK, chunk // 2 // BLOCK * BLOCK)
    while need(workers, chunk) > max_memory and workers > 1:
        workers -= 1
    if need(workers, chunk) > max_memory:
        raise InputError(
            f"max_memory={max_memory} bytes is too little for {len(plan.models)} models: at least "
            f"{need(1, BLOCK)}"
        )
    return replace(plan, chunk=chunk, workers=workers, memory=need(workers, chunk))


def _cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _bytes_per_entry(plan: MergePlan) -> int:
    """Bytes that an entry of a tensor takes: what is read, H = S − δ and H_0 + δ computed from it,
    the result, and its rounded copy."""
    stored = max((stored_per_entry(plan, tensor) for tensor in plan.tensors), default=0)
    return stored + plan.job.dtype.itemsize * (len(plan.models) + 3)


def _bytes_per_block(plan: MergePlan) -> int:
    """Bytes of the buffers of the arithmetic."""
    arithmetic = 7 * BLOCK * plan.job.dtype.itemsize
    if not plan.method.thinned and plan.method.span is None:
        return arithmetic
    return arithmetic + (2 * len(plan.models) + 8) * BLOCK * 8  # all steps of a block, in float64


def _bytes_of_scope(plan: MergePlan, tensor: TensorPlan) -> int:
    """Bytes of what must be merged at once: steps, and the singular vectors or masks of them."""
    models = len(plan.models)
    if tensor.scope == MATRICES:
        return 8 * (4 * models + 8) * tensor.spec.numel
    if tensor.scope == TENSORS:
        return plan.job.dtype.itemsize * (4 * models + 10) * tensor.spec.numel
    if tensor.scope == ROWS:
        return plan.job.dtype.itemsize * (4 * models + 10) * max(tensor.row_length, BLOCK)
    return 0


def _bytes_of_layer(plan: MergePlan, layer: str) -> int:
    """Bytes that a layer's factors, solve and rows take, in float64."""
    joint = plan.layers[layer]
    groups = joint.layout.groups
    outputs = joint.layout.rows
    inputs = joint.layout.columns + (joint.bias is not None)
    models = len(plan.models)
    precisions = len(plan.precisions)
    if any(precision.has_outputs(layer) for precision in plan.precisions):
        factors = outputs * outputs + inputs * inputs + 2 * outputs * inputs
        matrices = (2 * models + 8) * outputs * inputs
        return 8 * groups * ((precisions + 3) * factors + matrices)
    per_number = 2 * models + 6
    if any(precision.by_row(layer) for precision in plan.precisions):
        per_number += 6
    moments = (precisions + 5) * inputs * inputs
    return 8 * groups * (moments + per_number * rows_at_once(joint) * inputs)


def rows_at_once(joint: Joint) -> int:
    """Rows of a layer's matrix that are merged together where all have one matrix H: always the
    same, so that the result's bits do not depend on the memory."""
    layout = joint.layout
    if layout.groups > 1 or layout.transposed:
        return layout.rows
    return min(layout.rows, max(64, ENTRIES_OF_ROWS // layout.columns))
