"""A piece of a merge: entries of one tensor, read from all models, and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blr_analysis.errors import ModelError
from blr_analysis.files import Scratch
from blr_analysis.merging.formula import PrecisionValue
from blr_analysis.merging.layers import Solved
from blr_analysis.merging.merge_plan import BASE, OWN, MergePlan, TensorPlan


class Sink(Protocol):
    """Where merged pieces are written. Several threads call it, never twice for one entry."""

    def put(self, name: str, start: int, values: Tensor) -> None:
        """Take entries ``[start, start + len(values))`` of a tensor, in its dtype."""


@dataclass(frozen=True)
class Piece:
    """Entries ``[start, stop)`` of a tensor.

    The weight of a layer that is solved stands for all tensors of the layer.
    """

    tensor: TensorPlan
    start: int
    stop: int


@dataclass(frozen=True)
class MergedPiece:
    """The report of a piece that was merged.

    Attributes:
        tensor: the tensor's name.
        layer: the layer that was solved, or "".
        bytes_read: from disk.
        undefined_entries: the number of entries that task arithmetic was used for.
        solution: how the layer was solved; None where it was no layer.
    """

    tensor: str
    layer: str
    bytes_read: int
    undefined_entries: int
    solution: Solved | None = None


@dataclass(frozen=True)
class Inputs:
    """A piece of a tensor in all models, with the precisions of its entries.

    Attributes:
        base: θ_0, or None.
        models: θ_t.
        base_precision: H_0 + δ, a number where there is no H_0.
        precisions: H_t, a number where a model has no precision.
    """

    base: Tensor | None
    models: list[Tensor]
    base_precision: PrecisionValue
    precisions: list[PrecisionValue]

    @property
    def device(self) -> torch.device:
        """Where the piece is merged."""
        return self.models[0].device

    def steps(self, dtype: torch.dtype) -> list[Tensor]:
        """θ_t − θ_0, or θ_t without a base."""
        base = 0.0 if self.base is None else self.base.to(dtype)
        return [model.to(dtype) - base for model in self.models]

    def block(self, low: int, high: int) -> Inputs:
        """Entries ``[low, high)`` of the piece, for methods that use no H_0."""
        entries = slice(low, high)
        precisions: list[PrecisionValue] = [
            precision[entries] if isinstance(precision, Tensor) else precision
            for precision in self.precisions
        ]
        base = None if self.base is None else self.base[entries]
        return Inputs(base, [model[entries] for model in self.models], 0.0, precisions)


def read_inputs(
    plan: MergePlan, tensor: TensorPlan, start: int, stop: int, scratch: Scratch
) -> Inputs:
    """Entries ``[start, stop)`` of a tensor, in the base, the models and the precisions."""
    base = None
    if plan.base is not None:
        base = plan.base.read(tensor.name, start, stop, scratch)
    models = [
        model.source.read(name, start, stop, scratch)
        for model, name in zip(plan.models, tensor.names, strict=True)
    ]
    device = models[0].device if base is None else base.device
    base_precision = _read_base_precision(plan, tensor.name, start, stop, scratch)
    if isinstance(base_precision, Tensor):
        base_precision = base_precision.to(device)
    precisions: list[PrecisionValue] = []
    for model, kind in zip(plan.models, tensor.precisions, strict=True):
        if kind == OWN and model.precision is not None:
            values = model.precision.read(tensor.name, start, stop, scratch, plan.job.dtype)
            precisions.append(values.to(device))
        elif kind == BASE:
            precisions.append(base_precision)
        else:
            precisions.append(0.0)
    return Inputs(base, [model.to(device) for model in models], base_precision, precisions)


def _read_base_precision(
    plan: MergePlan, name: str, start: int, stop: int, scratch: Scratch
) -> PrecisionValue:
    """H_0 + δ of some entries, or δ where there is no H_0."""
    precision = plan.base_precision
    if precision is None or precision.spec(name) is None:
        return plan.delta
    values = precision.read(name, start, stop, scratch, plan.job.dtype)
    if plan.delta == 0:
        return values
    return values.to(plan.job.dtype) + plan.delta


def check_finite(
    plan: MergePlan,
    tensor: TensorPlan,
    result: Tensor,
    base: Tensor | None,
    models: Sequence[Tensor],
) -> None:
    """Raise where a result holds NaN or inf, or numbers that its dtype cannot hold."""
    limit = torch.finfo(tensor.spec.dtype).max
    low, high = torch.aminmax(result)
    if bool(low >= -limit) and bool(high <= limit):
        return
    check_inputs(plan, tensor, base, models)
    raise ModelError(
        f"the merge of {tensor.name!r} does not fit into {tensor.spec.dtype}: give a delta, "
        "other weights or a wider out_dtype"
    )


def check_inputs(
    plan: MergePlan, tensor: TensorPlan, base: Tensor | None, models: Sequence[Tensor]
) -> None:
    """Raise where the base or a model holds NaN or inf."""
    inputs = {}
    if plan.base is not None and base is not None:
        inputs[plan.base.name] = base
    for model, values in zip(plan.models, models, strict=True):
        inputs[model.source.name] = values
    for name, values in inputs.items():
        if not is_finite(values):
            raise ModelError(
                f"{tensor.name!r} of {name!r} holds NaN or inf: the training diverged, or the "
                "file is damaged"
            )


def is_finite(values: Tensor) -> bool:
    """Whether no entry is NaN or inf. A finite sum shows it in a tenth of the time."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())
