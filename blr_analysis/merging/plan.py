"""The plan of a merge: models are opened and all is checked before the first byte is written."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

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
    AVERAGED,
    CHUNK,
    DAMPING,
    POORLY_SAMPLED,
    ZERO,
    MergePlan,
    OpenModel,
    TensorPlan,
    stored_per_entry,
)
from blr_analysis.merging.methods import MATRICES, ROWS
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

BUFFERED = 2**24  # bytes of buffers that a thread uses at most; more make nothing faster
ENTRIES_OF_ROWS = 2**18  # entries of a layer's rows that are merged together
SMALLEST_ROWS = 64  # rows of a layer that are merged together at least
WORKERS = 8  # threads at most, unless the user asks for more
MAX_MEMORY = 256 * 2**20  # bytes of buffers, unless the user allows more
FLOAT64_BYTES = 8
# Settings of a model that change its outputs and not the shapes of its weights.
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
# The largest value of each setting of a job; the smallest is 0.
LIMITS = {"delta": 1e38, "shrink": 1, "power": 1, "damping": 1e6, "seed": 2**63}
LIMITS |= {"t": 1e38, "select_topk": 1, "r": 1e6, "alpha": 1e6}


def make_plan(job: Job, *, max_memory: int = MAX_MEMORY, threads: int | None = None) -> MergePlan:
    """Open the models, and check everything that can be checked without reading all weights.

    Args:
        job: the merge.
        max_memory: the most bytes of buffers; Python and torch (some 0.2 GB) come on top.
        threads: their number; None: one per core, up to 8.

    Raises:
        InputError: a setting or weight is out of range, an adapter has no base, or tokenizers do
            not fit each other.
        ModelError: the models differ in their tensors, a tensor cannot be merged, or a fine-tuned
            model equals its base.
        PosteriorError: a precision is missing, has other shapes, or belongs to another model.
        StorageError: a folder or file is missing, truncated or of another format.
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
    tensors = tuple(_sampled_or_averaged(plan, tensor) for tensor in plan_tensors(plan))
    return _within(replace(plan, tensors=tensors), max_memory, threads)


def _sampled_or_averaged(plan: MergePlan, tensor: TensorPlan) -> TensorPlan:
    """The tensor, or its average where the default method has a poorly sampled "gram".

    Moments of inputs alone say too little there; Kronecker factors still have their diagonal.
    """
    job = plan.job
    takes_default = job.balanced and job.shrink is None and job.damping is None
    if not (tensor.layer and takes_default and plan.is_poorly_sampled(tensor.layer)):
        return tensor
    if plan.has_outputs(tensor.layer):
        return tensor
    total = sum(tensor.weights)
    return replace(
        tensor,
        fate=AVERAGED,
        weights=tuple(weight / total for weight in tensor.weights),
        precisions=(ZERO,) * len(tensor.precisions),
        layer="",
        note=POORLY_SAMPLED,
    )


def _unplanned(
    job: Job,
    members: Sequence[Member],
    sources: Sequence[Source],
    precisions: Sequence[StoredPrecision | None],
    tokens: Tokens,
) -> MergePlan:
    """The plan without its tensors, which are planned next."""
    has_base = job.base is not None
    uses_base = has_base and job.row.uses_base
    reference = sources[1] if has_base and not uses_base else sources[0]
    models = [
        OpenModel(
            source=source,
            precision=precision and precision.for_names(reference.specs),
            weight=member.weight,
            density=member.density,
            epsilon=member.epsilon,
            gamma=member.gamma,
            buffers=_buffers(member),
            names=match(reference, source),
        )
        for source, precision, member in zip(sources, precisions, members, strict=True)
    ]
    base = models.pop(0) if has_base else None
    if base is None or not uses_base:
        return MergePlan(job, None, tuple(models), None, (), tokens)
    return MergePlan(job, base.source, tuple(models), base.precision, (), tokens)


def _opened(job: Job) -> list[Source]:
    """The models, opened; the base is the first of them where there is one.

    A weight that one model unties from another is untied in all of them.
    """
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
    """Models and precisions whose token tables have as many rows as the result.

    A model borrows rows that it lacks from the first model that has them. The precision of borrowed
    rows is 0.
    """
    counted = list(zip(models, counts, strict=True))
    tables = token_tensors(counted)
    lengthened_precisions = []
    for precision, count in zip(precisions, counts, strict=True):
        if precision is not None:
            stored = {key for name, key in precision.stored.items() if name in tables}
            source = Lengthened(rows, (precision.source, count), (), stored, empty=precision.prior)
            precision = replace(precision, source=source)
        lengthened_precisions.append(precision)
    lengthened_models: list[Source] = [
        Lengthened(rows, model, counted, tables) for model in counted
    ]
    return lengthened_models, lengthened_precisions


def _check_models(plan: MergePlan) -> None:
    """Raise where a model equals its base, or a precision belongs to another model."""
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
    has_factors = any(precision.layers for precision in plan.precisions)
    only_diagonals = bool(plan.precisions) and not has_factors
    if only_diagonals and plan.job.shrink not in (None, 1):
        raise InputError("shrink needs precisions with factors: leave it out for diagonals")


def _check_precision(
    plan: MergePlan, precision: StoredPrecision | None, model: Source | None
) -> None:
    """Raise where a precision has other shapes than the result, or belongs to another model."""
    if precision is None:
        return
    check_fits(precision, plan.reference)
    if model is not None and not plan.job.trust:
        check_belongs(precision, model)


def _precision(job: Job, member: Member, model: Source) -> StoredPrecision | None:
    """The precision of a model, opened; None where it has none or the method takes none."""
    if member.precision is None or not job.row.uses_precisions:
        return None
    label = f"the precision of {model.name}"
    precision = open_precision(member.precision, member.n_data, label=label)
    damping = job.damping
    if job.balanced and damping is None:
        damping = DAMPING
    return precision.adjusted(job.power, damping, balanced=job.balanced)


def _buffers(member: Member) -> frozenset[str]:
    """The names of a module's buffers; empty for other models, whose buffers are unknown."""
    if not isinstance(member.model, nn.Module):
        return frozenset()
    return frozenset(name for name, _ in unwrapped(member.model).named_buffers())


def _check_settings(job: Job) -> None:
    """Raise :class:`InputError` where a setting is out of range or does not suit the method."""
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
    """The same plan with as many threads and as long pieces as the memory allows.

    Pieces are shortened first, then threads are given up.
    """
    positive_int("max_memory", max_memory)
    workers = min(_cores(), WORKERS) if threads is None else positive_int("threads", threads)
    memory = _Memory.of(plan)
    longest_tensor = max((tensor.spec.numel for tensor in plan.tensors), default=1)
    n_blocks = max(1, math.ceil(longest_tensor / BLOCK))
    chunk = min(CHUNK, n_blocks * BLOCK)
    while chunk > BLOCK and (
        chunk * memory.per_entry > BUFFERED or memory.needed(workers, chunk) > max_memory
    ):
        chunk = max(BLOCK, chunk // 2 // BLOCK * BLOCK)
    while memory.needed(workers, chunk) > max_memory and workers > 1:
        workers -= 1
    if memory.needed(workers, chunk) > max_memory:
        raise InputError(
            f"max_memory={max_memory} bytes is too little for {len(plan.models)} models: at least "
            f"{memory.needed(1, BLOCK)}"
        )
    return replace(plan, chunk=chunk, workers=workers, memory=memory.needed(workers, chunk))


class _Memory(NamedTuple):
    """The bytes that one thread of a merge needs.

    Attributes:
        per_entry: for each entry of a piece.
        arithmetic: for the buffers of the arithmetic.
        largest: for the largest layer, tensor or row that must be merged at once.
    """

    per_entry: int
    arithmetic: int
    largest: int

    @classmethod
    def of(cls, plan: MergePlan) -> _Memory:
        """The memory of a plan."""
        at_once = [_bytes_of_layer(plan, layer) for layer in plan.layers]
        at_once += [_bytes_of_scope(plan, tensor) for tensor in plan.tensors]
        return cls(_bytes_per_entry(plan), _bytes_per_block(plan), max(at_once, default=0))

    def needed(self, workers: int, chunk: int) -> int:
        """The bytes of so many threads with pieces of so many entries."""
        per_worker = max(chunk * self.per_entry + self.arithmetic, self.largest)
        return workers * per_worker


def _cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _bytes_per_entry(plan: MergePlan) -> int:
    """Bytes of buffers for each entry of a piece.

    They hold the entry as it is stored everywhere, H = S − δ of every model, H_0 + δ, the result
    and its rounded copy.
    """
    stored = max((stored_per_entry(plan, tensor) for tensor in plan.tensors), default=0)
    return stored + plan.job.dtype.itemsize * (len(plan.models) + 3)


def _bytes_per_block(plan: MergePlan) -> int:
    """Bytes of the buffers of the arithmetic, which works block by block."""
    n_buffers = 7  # as in blr_analysis.merging.formula
    arithmetic = n_buffers * BLOCK * plan.job.dtype.itemsize
    method = plan.method
    if not method.thinned and method.span is None and method.select is None:
        return arithmetic
    n_steps = 2 * len(plan.models) + 8  # all steps of a block, copies and masks of them
    return arithmetic + n_steps * BLOCK * FLOAT64_BYTES


def _bytes_of_scope(plan: MergePlan, tensor: TensorPlan) -> int:
    """Bytes for a tensor that is merged as a matrix or by rows; 0 if entries are merged alone.

    They hold the steps of all models, and singular vectors or masks of them.
    """
    n_models = len(plan.models)
    bytes_per_entry = plan.job.dtype.itemsize * (4 * n_models + 10)
    if tensor.scope == MATRICES:
        return FLOAT64_BYTES * (4 * n_models + 8) * tensor.spec.numel
    if tensor.scope == ROWS:
        return bytes_per_entry * max(tensor.row_length, BLOCK)
    return 0


def _bytes_of_layer(plan: MergePlan, layer: str) -> int:
    """:func:`bytes_of_layer` of a layer of the plan."""
    has_rows = any(precision.by_row(layer) for precision in plan.precisions)
    return bytes_of_layer(
        plan.layers[layer],
        len(plan.models),
        len(plan.precisions),
        has_outputs=plan.has_outputs(layer),
        has_rows=has_rows,
    )


def bytes_of_layer(
    joint: Joint, n_models: int, n_precisions: int, *, has_outputs: bool, has_rows: bool = False
) -> int:
    """Bytes for the factors of a layer, the solution of its equation, and its rows, in float64.

    Args:
        has_outputs: whether the precisions have factors of the outputs, as "kron" does.
        has_rows: whether each row adds a number to its eigenvalues, as in tied tables of "gram".
    """
    n_outputs = joint.layout.rows
    n_inputs = joint.layout.columns
    if joint.bias is not None:
        n_inputs += 1
    if has_outputs:
        factors = n_outputs * n_outputs + n_inputs * n_inputs + 2 * n_outputs * n_inputs
        matrices = (2 * n_models + 8) * n_outputs * n_inputs
        numbers = (n_precisions + 3) * factors + matrices
    else:
        copies_of_rows = 2 * n_models + 6
        if has_rows:
            copies_of_rows += 6
        moments = (n_precisions + 5) * n_inputs * n_inputs
        numbers = moments + copies_of_rows * rows_at_once(joint) * n_inputs
    return FLOAT64_BYTES * joint.layout.groups * numbers


def rows_at_once(joint: Joint) -> int:
    """The number of rows of a layer that are merged together where H is the same for all rows.

    It does not depend on the memory, and so the bits of the result do not either.
    """
    layout = joint.layout
    if layout.groups > 1 or layout.transposed:
        return layout.rows
    return min(layout.rows, max(SMALLEST_ROWS, ENTRIES_OF_ROWS // layout.columns))
