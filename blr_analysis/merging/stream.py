"""Carrying a plan out: pieces of tensors through threads, from the sources into a sink."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from blr_analysis.backprop.matrices import Joint, MatrixShape
from blr_analysis.errors import InputError, ModelError
from blr_analysis.files import Scratch, Source
from blr_analysis.merging import sparse
from blr_analysis.merging.formula import PrecisionValue, combine_into
from blr_analysis.merging.layers import Part, Solved, Solver, solver
from blr_analysis.merging.merge_plan import AVERAGED, BASE, COPIED, OWN, MergePlan, TensorPlan
from blr_analysis.merging.methods import MATRICES, ROWS
from blr_analysis.merging.plan import rows_at_once
from blr_analysis.merging.selections import drop_by_size, middle


class Sink(Protocol):
    """Where merged pieces go; called by several threads, never twice for one entry."""

    def put(self, name: str, start: int, values: Tensor) -> None:
        """Take entries ``[start, start + len(values))`` of a tensor, in its dtype."""


class Memory:
    """Whole tensors in memory; a sink like :class:`blr_analysis.files.Shards`."""

    def __init__(self, tensors: Sequence[TensorPlan], devices: Mapping[str, torch.device]) -> None:
        self.tensors = {
            tensor.name: torch.empty(
                tensor.spec.shape, dtype=tensor.spec.dtype, device=devices[tensor.name]
            )
            for tensor in tensors
        }

    def put(self, name: str, start: int, values: Tensor) -> None:
        self.tensors[name].view(-1)[start : start + len(values)] = values


@dataclass
class Outcome:
    """What a merge came upon.

    Attributes:
        fallback: by tensor, the entries without a precision.
        solves: by layer, how its equation was solved.
    """

    fallback: Counter[str] = field(default_factory=Counter)
    solves: dict[str, Solved] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """Entries ``[start, stop)`` of a tensor; of a layer that is solved, all of its tensors."""

    tensor: TensorPlan
    start: int
    stop: int


@dataclass(frozen=True)
class MergedPiece:
    """What became of a piece.

    Attributes:
        tensor: its name.
        layer: the layer that was solved, or "".
        bytes_read: from disk.
        undefined_entries: those where task arithmetic stands.
        solution: how the layer was solved.
    """

    tensor: str
    layer: str
    bytes_read: int
    undefined_entries: int
    solution: Solved | None = None


def stream(plan: MergePlan, sink: Sink, report_progress: Callable[[int], object]) -> Outcome:
    """Merge every tensor of the plan; the result does not depend on threads or piece lengths.

    Args:
        plan: what to do.
        sink: where the result goes.
        report_progress: called with the bytes read, after every piece.

    Returns:
        The entries where task arithmetic stands, and the layers' residuals.

    Raises:
        ModelError: NaN or inf in a model or in the result.
        PosteriorError: NaN, inf or negative numbers in a precision.
        StorageError: a file that cannot be read or written.
    """
    outcome = Outcome()
    thread_local = threading.local()

    def merge_piece(piece: Piece) -> MergedPiece:
        if not hasattr(thread_local, "worker"):
            thread_local.worker = _Worker(plan, sink)
        return thread_local.worker.merge_piece(piece)

    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)  # pieces run side by side already
    pool = ThreadPoolExecutor(plan.workers)
    try:
        for piece in pool.map(merge_piece, _pieces(plan)):
            if piece.undefined_entries:
                outcome.fallback[piece.tensor] += piece.undefined_entries
            if piece.solution is not None:
                outcome.solves[piece.layer] = piece.solution
            report_progress(piece.bytes_read)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads_before)
    return outcome


def _pieces(plan: MergePlan) -> Iterator[Piece]:
    """The pieces of all tensors; a layer stands where its weight is."""
    for tensor in plan.tensors:
        is_solved_elsewhere = tensor.layer not in ("", tensor.name)
        if is_solved_elsewhere:
            continue
        size = tensor.spec.numel
        must_be_whole = bool(tensor.layer) or plan.passes(tensor) > 1 or tensor.is_whole
        step = max(size, 1) if must_be_whole else plan.chunk
        if tensor.scope == ROWS:
            step = max(1, plan.chunk // tensor.row_length) * tensor.row_length
        for start in range(0, size, step):
            yield Piece(tensor, start, min(start + step, size))


@dataclass(frozen=True)
class _Inputs:
    """A piece of a tensor in all models, and what stands for its precisions.

    Attributes:
        base: θ_0, or None.
        models: θ_t.
        base_precision: H_0 + δ.
        precisions: H_t.
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
        """θ_t − θ_0, or θ_t."""
        start = 0.0 if self.base is None else self.base.to(dtype)
        return [model.to(dtype) - start for model in self.models]

    def block(self, low: int, high: int) -> _Inputs:
        """Entries ``[low, high)`` of the piece, for methods that have no H_0."""
        entries = slice(low, high)
        precisions: list[PrecisionValue] = [
            precision[entries] if isinstance(precision, Tensor) else precision
            for precision in self.precisions
        ]
        base = None if self.base is None else self.base[entries]
        return _Inputs(base, [model[entries] for model in self.models], 0.0, precisions)


class _Worker:
    """What one thread does, in buffers of its own."""

    def __init__(self, plan: MergePlan, sink: Sink) -> None:
        self.plan = plan
        self.sink = sink
        self.scratch = Scratch()
        self.dtype = plan.job.dtype
        self.method = plan.method

    def merge_piece(self, piece: Piece) -> MergedPiece:
        """Merge a piece and put it into the sink."""
        tensor = piece.tensor
        entries = piece.stop - piece.start
        bytes_read = self.plan.bytes_of(tensor) * entries // max(tensor.spec.numel, 1)
        if tensor.layer:
            solution = self._merge_layer(tensor.layer)
            undefined = solution.undefined
            return MergedPiece(tensor.name, tensor.layer, bytes_read, undefined, solution)
        if tensor.is_whole or tensor.scope == ROWS:
            self._merge_entries(tensor, piece.start, piece.stop, None)
            return MergedPiece(tensor.name, "", bytes_read, 0)
        measures = self._measures(tensor)  # coefficients or limits; None where neither is needed
        undefined = 0
        for start in range(piece.start, piece.stop, self.plan.chunk):
            stop = min(start + self.plan.chunk, piece.stop)
            undefined += self._merge_entries(tensor, start, stop, measures)
        return MergedPiece(tensor.name, "", bytes_read, undefined)

    def _read(self, tensor: TensorPlan, start: int, stop: int) -> _Inputs:
        plan = self.plan
        base = None
        if plan.base is not None:
            base = plan.base.read(tensor.name, start, stop, self.scratch)
        models = [
            model.source.read(name, start, stop, self.scratch)
            for model, name in zip(plan.models, tensor.names, strict=True)
        ]
        device = models[0].device if base is None else base.device
        base_precision = self._read_base_precision(tensor, start, stop, device)
        precisions: list[PrecisionValue] = []
        for model, kind in zip(plan.models, tensor.precisions, strict=True):
            if kind == OWN and model.precision is not None:
                values = model.precision.read(tensor.name, start, stop, self.scratch, self.dtype)
                precisions.append(values.to(device))
            elif kind == BASE:
                precisions.append(base_precision)
            else:
                precisions.append(0.0)
        return _Inputs(base, [model.to(device) for model in models], base_precision, precisions)

    def _read_base_precision(
        self, tensor: TensorPlan, start: int, stop: int, device: torch.device
    ) -> PrecisionValue:
        """H_0 + δ."""
        precision = self.plan.base_precision
        delta = self.plan.delta
        if precision is None or precision.spec(tensor.name) is None:
            return delta
        values = precision.read(tensor.name, start, stop, self.scratch, self.dtype).to(device)
        if delta == 0:
            return values
        return values.to(self.dtype) + delta

    def _merge_entries(
        self, tensor: TensorPlan, start: int, stop: int, measures: Sequence[float] | None
    ) -> int:
        """Merge some entries and put them into the sink; how many have no precision."""
        if tensor.fate == COPIED:
            values = self.plan.reference.read(tensor.name, start, stop, self.scratch)
            self.sink.put(tensor.name, start, values)
            return 0
        inputs = self._read(tensor, start, stop)
        result = self.scratch.array("result", stop - start, self.dtype, inputs.device)
        undefined = self._combine(tensor, start, inputs, measures, result)
        rounded = self._rounded(result, tensor.spec.dtype)
        may_be_infinite = not bool(rounded.sum().isfinite())  # finite entries can overflow too
        if may_be_infinite:
            self._check_finite(tensor, result, inputs.base, inputs.models)
        self.sink.put(tensor.name, start, rounded)
        return undefined if self.method.uses_precisions else 0

    def _combine(
        self,
        tensor: TensorPlan,
        start: int,
        inputs: _Inputs,
        measures: Sequence[float] | None,
        result: Tensor,
    ) -> int:
        """Merge into ``result``; how many entries have no precision to weigh by."""
        if tensor.fate == AVERAGED:
            zeros = [0.0] * len(inputs.models)
            weights = tensor.weights
            combine_into(result, None, inputs.models, weights, zeros, 0.0, self.scratch)
            return 0
        if self._combine_steps(tensor, start, inputs, measures, result):
            return 0
        weights = tensor.weights if measures is None else measures
        return combine_into(
            result,
            inputs.base,
            inputs.models,
            weights,
            inputs.precisions,
            inputs.base_precision,
            self.scratch,
        )

    def _combine_steps(
        self,
        tensor: TensorPlan,
        start: int,
        inputs: _Inputs,
        measures: Sequence[float] | None,
        result: Tensor,
    ) -> bool:
        """Merge by the methods that change the steps θ_t − θ_0; False where the method is none."""
        if self.method.matrix is not None and tensor.scope == MATRICES:
            self._combine_matrices(tensor, inputs, result)
        elif self.method.select is not None:
            self._combine_selected(tensor, inputs, result)
        elif self.method.thinned:
            self._combine_thinned(tensor, start, inputs, measures, result)
        else:
            return False
        return True

    def _combine_matrices(self, tensor: TensorPlan, inputs: _Inputs, result: Tensor) -> None:
        """θ_0 + λ times the merged step of a weight, as a matrix in float64.

        The methods take a weight as [outputs, inputs]; where layers store [inputs, outputs], it is
        turned.
        """
        assert inputs.base is not None and self.method.matrix is not None
        self._check_inputs(tensor, inputs.base, inputs.models)
        shape = tensor.spec.shape
        steps = [step.cpu().view(shape[0], -1) for step in inputs.steps(torch.float64)]
        if self.plan.stores_transposed:
            steps = [step.mT for step in steps]
        options = {}
        if self.method.takes("damping") and self.plan.job.damping is not None:
            options["damping"] = self.plan.job.damping
        merged = self.method.matrix(steps, tensor.weights, **options)
        if self.plan.stores_transposed:
            merged = merged.mT
        step = merged.reshape(-1).mul(tensor.scale).to(inputs.device)
        result.copy_(inputs.base.double().add_(step))

    def _combine_selected(self, tensor: TensorPlan, inputs: _Inputs, result: Tensor) -> None:
        """θ_0 plus the step that :mod:`blr_analysis.merging.selections` gives."""
        assert inputs.base is not None and self.method.select is not None
        self._check_inputs(tensor, inputs.base, inputs.models)
        shape = (-1,)
        if tensor.is_whole:
            shape = tensor.spec.shape
        base = inputs.base.to(self.dtype)
        steps = torch.stack(inputs.steps(self.dtype))
        step = self.method.select(
            base.view(shape), steps.view(len(steps), *shape), self.plan.selection
        )
        torch.add(base, step.reshape(-1), out=result)

    def _rounded(self, result: Tensor, dtype: torch.dtype) -> Tensor:
        """The result in the dtype that is written."""
        if result.dtype == dtype:
            return result
        return self.scratch.array("rounded", len(result), dtype, result.device).copy_(result)

    def _measures(self, tensor: TensorPlan) -> list[float] | None:
        """What a method needs to know of a whole tensor before it merges the first entry.

        Returns:
            The coefficients of the sum, or by model the limit of the entries that stay; None where
            one pass over the tensor is enough.
        """
        if self.plan.passes(tensor) == 1:
            return None
        if self.method.span is not None:
            weights = torch.tensor(tensor.weights, dtype=torch.float64)
            try:
                return self.method.span(self._products(tensor), weights).tolist()
            except InputError as error:
                raise InputError(f"{tensor.name!r}: {error}") from error

        def sizes_by_block() -> Iterator[list[Tensor]]:
            for inputs in self._blocks(tensor):
                pairs = zip(inputs.steps(self.dtype), self._weighing(inputs), strict=True)
                yield [sparse.sizes(step, precision).cpu() for step, precision in pairs]

        remaining = [max(1, int(density * tensor.spec.numel)) for density in tensor.densities]
        return list(sparse.limits(sizes_by_block, remaining))

    def _blocks(self, tensor: TensorPlan) -> Iterator[_Inputs]:
        """A whole tensor, block by block."""
        for start, stop in sparse.blocks(0, tensor.spec.numel):
            yield self._read(tensor, start, stop)

    def _products(self, tensor: TensorPlan) -> Tensor:
        """V Vᵀ of the models' steps, in float64."""
        count = len(tensor.weights)
        gram = torch.zeros(count, count, dtype=torch.float64)
        for inputs in self._blocks(tensor):
            steps = torch.stack(inputs.steps(torch.float64)).cpu()
            gram += steps @ steps.mT
        return gram

    def _weighing(self, inputs: _Inputs) -> list[PrecisionValue]:
        """H_t, or 1 where the method does not weigh by precisions."""
        if self.method.uses_precisions:
            return inputs.precisions
        return [1.0] * len(inputs.models)

    def _combine_thinned(
        self,
        tensor: TensorPlan,
        start: int,
        inputs: _Inputs,
        limits: Sequence[float] | None,
        result: Tensor,
    ) -> None:
        """:func:`blr_analysis.merging.sparse.combine_sparse`, block by block."""
        thinned = self._thinned_by_size(tensor, start, inputs)
        for low, high in sparse.blocks(0, len(result)):
            block = inputs.block(low, high)
            assert block.base is not None
            precisions = self._weighing(block)
            if thinned is not None:
                steps = [step[low:high] for step in thinned]
            else:
                steps = self._thinned_steps(tensor, start + low, block, limits)
            sparse.combine_sparse(
                result[low:high],
                block.base.to(self.dtype),
                steps,
                tensor.weights,
                precisions,
                elect=self.method.elect,
                normalize=self.plan.job.divides,
                scale=tensor.scale,
            )

    def _thinned_steps(
        self, tensor: TensorPlan, start: int, block: _Inputs, limits: Sequence[float] | None
    ) -> list[Tensor]:
        """The steps of a block without what goes by chance, or is below a limit."""
        steps = block.steps(self.dtype)
        if self.method.thinned == "chance":
            self._drop_by_chance(tensor, start, steps)
        elif limits is not None:
            for step, precision, limit in zip(steps, self._weighing(block), limits, strict=True):
                sparse.zero_below(int(limit), step, sparse.sizes(step, precision))
        return steps

    def _thinned_by_size(
        self, tensor: TensorPlan, start: int, inputs: _Inputs
    ) -> list[Tensor] | None:
        """The steps of whole rows or tensors, of methods that must see these; else None."""
        if self.method.thinned not in ("rank", "middle"):
            return None
        job = self.plan.job
        steps = inputs.steps(self.dtype)
        if self.method.thinned == "middle":
            settings = zip(steps, tensor.densities, tensor.gammas, strict=True)
            return [middle(step, density, gamma) for step, density, gamma in settings]
        length = tensor.row_length
        thinned = []
        for t, step in enumerate(steps):
            rows = drop_by_size(
                step.view(-1, length),
                tensor.densities[t],
                tensor.epsilons[t],
                rescale=job.rescale,
                key=f"{job.seed}\0{t}\0{tensor.name}",
                first_row=start // length,
            )
            thinned.append(rows.reshape(-1))
        return thinned

    def _drop_by_chance(self, tensor: TensorPlan, start: int, steps: Sequence[Tensor]) -> None:
        """DARE: entries of each θ_t − θ_0 become 0, and the others larger, in place."""
        job = self.plan.job
        for t, (step, density) in enumerate(zip(steps, tensor.densities, strict=True)):
            mask = sparse.random_mask(density, len(step), job.seed, t, tensor.name, start)
            step *= mask.to(step)
            if job.rescale:
                step /= density

    def _merge_layer(self, layer: str) -> Solved:
        """Solve one layer's equation, some rows of its matrix at a time."""
        plan = self.plan
        joint = plan.layers[layer]
        tensors = {tensor.name: tensor for tensor in plan.tensors if tensor.layer == layer}
        rows = joint.layout.rows
        needs_all_rows = any(precision.has_outputs(layer) for precision in plan.precisions)
        rows_per_piece = rows if needs_all_rows else rows_at_once(joint)
        solve = self._solver(layer, joint, tensors[layer])
        layer_solution = Solved()
        for low in range(0, rows, rows_per_piece):
            piece = joint
            if rows_per_piece != rows:
                piece = _rows_of(joint, min(rows_per_piece, rows - low))
            base = None if plan.base is None else self._matrix(plan.base, piece, low)
            models = [self._matrix(model.source, piece, low, model.names) for model in plan.models]
            reference = base if self.method.uses_base_precision else None
            result, piece_solution = solve(reference, models, low)
            undefined = layer_solution.undefined + piece_solution.undefined
            layer_solution = replace(piece_solution, undefined=undefined)
            self._check_finite(tensors[layer], result, base, models)
            for name, values in piece.split(result).items():
                written = values.reshape(-1).to(tensors[name].spec.dtype)
                self.sink.put(name, _offset(piece, name, low), written)
        return layer_solution

    def _solver(self, layer: str, joint: Joint, tensor: TensorPlan) -> Solver:
        """What merges rows of a layer, with the precisions of all models."""
        plan = self.plan
        settings = plan.factor_settings(layer)
        parts: list[Part] = []
        for model, weight, kind in zip(plan.models, tensor.weights, tensor.precisions, strict=True):
            factors = None
            if kind == OWN and model.precision is not None:
                factors = model.precision.factors(layer, *settings)
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
        """Rows of a layer's matrix in one model, in float64."""
        parameters = {}
        for name, shape in piece.shapes.items():
            start = _offset(piece, name, low)
            stored_name = name if names is None else names[name]
            values = source.read(stored_name, start, start + math.prod(shape), self.scratch)
            parameters[name] = values.to("cpu", torch.float64, copy=True).view(shape)
        return piece.join(parameters)

    def _check_finite(
        self, tensor: TensorPlan, result: Tensor, base: Tensor | None, models: Sequence[Tensor]
    ) -> None:
        """Raise where a result holds NaN or inf, or numbers that its dtype cannot hold."""
        limit = torch.finfo(tensor.spec.dtype).max
        low, high = torch.aminmax(result)
        if bool(low >= -limit) and bool(high <= limit):
            return
        self._check_inputs(tensor, base, models)
        raise ModelError(
            f"the merge of {tensor.name!r} does not fit into {tensor.spec.dtype}: give a delta, "
            "other weights or a wider out_dtype"
        )

    def _check_inputs(
        self, tensor: TensorPlan, base: Tensor | None, models: Sequence[Tensor]
    ) -> None:
        """Raise where the base or a model holds NaN or inf."""
        inputs = {}
        if self.plan.base is not None and base is not None:
            inputs[self.plan.base.name] = base
        for model, values in zip(self.plan.models, models, strict=True):
            inputs[model.source.name] = values
        for name, values in inputs.items():
            if not bool(values.isfinite().all()):
                raise ModelError(
                    f"{tensor.name!r} of {name!r} holds NaN or inf: the training diverged, or the "
                    "file is damaged"
                )


def _offset(piece: Joint, name: str, low: int) -> int:
    """Where row ``low`` of a layer begins in one of its parameters."""
    shape = piece.shapes[name]
    if low == 0:
        return 0
    return low * math.prod(shape) // shape[0]


def _rows_of(joint: Joint, count: int) -> Joint:
    """Some rows of a layer's one matrix as a layer of their own."""
    columns = joint.layout.columns
    return replace(joint, layout=MatrixShape(1, count, columns, (count, columns)))
