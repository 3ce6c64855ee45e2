"""The layers of a merge that are solved as one matrix: read, solved by rows, and written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from blr_analysis.backprop.matrices import Joint, MatrixShape
from blr_analysis.files import Scratch, Source
from blr_analysis.merging.layers import Part, Solved, Solver, solver
from blr_analysis.merging.merge_plan import BASE, OWN, MergePlan, TensorPlan
from blr_analysis.merging.piece import Sink, check_finite
from blr_analysis.merging.plan import rows_at_once


class LayerMerger:
    """Merges layers by their equations, one after the other.

    Attributes:
        plan: what to do.
        sink: where results are written.
        scratch: the buffers of the thread.
    """

    def __init__(self, plan: MergePlan, sink: Sink, scratch: Scratch) -> None:
        self.plan = plan
        self.sink = sink
        self.scratch = scratch

    def merge(self, layer: str) -> Solved:
        """Solve a layer's equation, some rows of its matrix at a time, and write the result."""
        plan = self.plan
        joint = plan.layers[layer]
        tensors = {tensor.name: tensor for tensor in plan.tensors if tensor.layer == layer}
        solve = self._solver(layer, joint, tensors[layer])
        total = Solved()
        for low, piece in self._row_pieces(layer, joint):
            base = None if plan.base is None else self._matrix(plan.base, piece, low)
            models = [self._matrix(model.source, piece, low, model.names) for model in plan.models]
            reference = base if plan.method.uses_base_precision else None
            result, solution = solve(reference, models, low)
            total = replace(solution, undefined=total.undefined + solution.undefined)
            check_finite(plan, tensors[layer], result, base, models)
            for name, values in piece.split(result).items():
                written = values.reshape(-1).to(tensors[name].spec.dtype)
                self.sink.put(name, first_entry(piece, name, low), written)
        return total

    def _row_pieces(self, layer: str, joint: Joint) -> Iterator[tuple[int, Joint]]:
        """The layer's rows in pieces that fit into memory: the first row, and the rows' layer."""
        rows = joint.layout.rows
        needs_all_rows = self.plan.has_outputs(layer)
        rows_per_piece = rows if needs_all_rows else rows_at_once(joint)
        if rows_per_piece == rows:
            yield 0, joint
            return
        for low in range(0, rows, rows_per_piece):
            yield low, rows_of(joint, min(rows_per_piece, rows - low))

    def _solver(self, layer: str, joint: Joint, tensor: TensorPlan) -> Solver:
        """The function that merges rows of a layer, with the precisions of all models in it."""
        plan = self.plan
        settings = plan.factor_settings(layer)
        parts: list[Part] = []
        for model, weight, kind in zip(plan.models, tensor.weights, tensor.precisions, strict=True):
            factors = None
            if kind == OWN and model.precision is not None:
                factors = model.precision.factors(layer, *settings, balanced=plan.job.balanced)
            parts.append(Part(weight, factors, takes_base=kind == BASE))
        base_factors = None
        if plan.base_precision is not None and layer in plan.base_precision.layers:
            base_factors = plan.base_precision.factors(layer, *settings)
        columns = joint.layout.columns
        if joint.bias is not None:
            columns += 1
        shape = (joint.layout.groups, joint.layout.rows, columns)
        return solver(parts, base_factors, plan.delta, shape)

    def _matrix(
        self, source: Source, piece: Joint, low: int, names: Mapping[str, str] | None = None
    ) -> Tensor:
        """Rows of a layer's matrix in one model, from row ``low`` on, in float64."""
        parameters = {}
        for name, shape in piece.shapes.items():
            start = first_entry(piece, name, low)
            stored_name = name if names is None else names[name]
            values = source.read(stored_name, start, start + math.prod(shape), self.scratch)
            parameters[name] = values.to("cpu", torch.float64, copy=True).view(shape)
        return piece.join(parameters)


def first_entry(piece: Joint, name: str, low: int) -> int:
    """The number of the entry at which row ``low`` of a layer begins in one of its parameters."""
    if low == 0:
        return 0
    shape = piece.shapes[name]
    entries_per_row = math.prod(shape) // shape[0]
    return low * entries_per_row


def rows_of(joint: Joint, count: int) -> Joint:
    """``count`` rows of a layer, as a layer of their own."""
    columns = joint.layout.columns
    return replace(joint, layout=MatrixShape(1, count, columns, (count, columns)))
