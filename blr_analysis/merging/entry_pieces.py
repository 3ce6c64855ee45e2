"""The tensors of a merge that are merged entry by entry, or by rows or matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.files import Scratch
from blr_analysis.merging import sparse
from blr_analysis.merging.formula import BLOCK, PrecisionValue, combine_into
from blr_analysis.merging.merge_plan import AVERAGED, COPIED, MERGED, MergePlan, TensorPlan
from blr_analysis.merging.methods import ENTRIES, MATRICES, ROWS
from blr_analysis.merging.piece import (
    Inputs,
    Piece,
    Sink,
    check_finite,
    check_inputs,
    read_inputs,
)
from blr_analysis.merging.selections import Blocks, Select, drop_by_size

SELECTED = BLOCK // 4  # entries of rows at a time whose divergences are computed in float64


@dataclass(frozen=True)
class Measures:
    """What a method has measured on a whole tensor.

    Attributes:
        coefficients: of each model in the sum; empty: its weight.
        limits: of each model, the sizes of the smallest and the largest entry that stay.
        select: the step of the merge, from a block of the base and the models' steps.
    """

    coefficients: Sequence[float] = ()
    limits: Sequence[tuple[int, int]] = ()
    select: Select | None = None


class EntryMerger:
    """Merges entries of tensors by the method of a plan.

    Attributes:
        plan: what to do.
        sink: where results are written.
        scratch: the buffers of the thread.
        dtype: that of the arithmetic.
        method: the method.
    """

    def __init__(self, plan: MergePlan, sink: Sink, scratch: Scratch) -> None:
        self.plan = plan
        self.sink = sink
        self.scratch = scratch
        self.dtype = plan.job.dtype
        self.method = plan.method

    def merge(self, piece: Piece) -> int:
        """Merge a piece and write the result.

        Returns:
            The number of entries without a precision, where task arithmetic stands.
        """
        tensor = piece.tensor
        measures = self._measures(tensor)
        step = self.plan.step(tensor)
        undefined = 0
        for start in range(piece.start, piece.stop, step):
            stop = min(start + step, piece.stop)
            undefined += self._merge_entries(tensor, start, stop, measures)
        return undefined

    def _merge_entries(self, tensor: TensorPlan, start: int, stop: int, measures: Measures) -> int:
        """Merge some entries and write them; the number of them without a precision."""
        if tensor.fate == COPIED:
            values = self.plan.reference.read(tensor.name, start, stop, self.scratch)
            self.sink.put(tensor.name, start, values)
            return 0
        inputs = read_inputs(self.plan, tensor, start, stop, self.scratch)
        result = self.scratch.array("result", stop - start, self.dtype, inputs.device)
        undefined = self._combine(tensor, start, inputs, measures, result)
        rounded = self._rounded(result, tensor.spec.dtype)
        # The sum of one infinite entry is infinite. So may be the sum of finite ones, and then
        # the check finds nothing.
        may_be_infinite = not bool(rounded.sum().isfinite())
        if may_be_infinite:
            check_finite(self.plan, tensor, result, inputs.base, inputs.models)
        self.sink.put(tensor.name, start, rounded)
        return undefined if self.method.uses_precisions else 0

    def _combine(
        self,
        tensor: TensorPlan,
        start: int,
        inputs: Inputs,
        measures: Measures,
        result: Tensor,
    ) -> int:
        """Merge into ``result``; the number of entries that have no precision."""
        if tensor.fate == AVERAGED:
            zeros = [0.0] * len(inputs.models)
            weights = tensor.weights
            combine_into(
                result, None, inputs.models, weights, zeros, 0.0, self.scratch, counts=False
            )
            return 0
        if self.method.matrix is not None and tensor.scope == MATRICES:
            self._combine_matrices(tensor, inputs, result)
            return 0
        if measures.select is not None:
            self._combine_selected(tensor, inputs, measures.select, result)
            return 0
        if self.method.thinned:
            self._combine_thinned(tensor, start, inputs, measures, result)
            return 0
        weights = measures.coefficients or tensor.weights
        return combine_into(
            result,
            inputs.base,
            inputs.models,
            weights,
            inputs.precisions,
            inputs.base_precision,
            self.scratch,
            counts=self.method.uses_precisions,
        )

    def _combine_matrices(self, tensor: TensorPlan, inputs: Inputs, result: Tensor) -> None:
        """θ_0 + λ times the merged step of a weight, as a matrix in float64.

        The methods take a weight as [outputs, inputs]. It is transposed where layers store it as
        [inputs, outputs].
        """
        assert inputs.base is not None and self.method.matrix is not None
        check_inputs(self.plan, tensor, inputs.base, inputs.models)
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
        result.copy_(inputs.base.double() + step)

    def _combine_selected(
        self, tensor: TensorPlan, inputs: Inputs, select: Select, result: Tensor
    ) -> None:
        """θ_0 plus the step that :mod:`blr_analysis.merging.selections` gives, block by block."""
        assert inputs.base is not None
        check_inputs(self.plan, tensor, inputs.base, inputs.models)
        for low, high in self._block_bounds(tensor, len(result)):
            base, steps = self._shaped(tensor, inputs.block(low, high))
            step = select(base, steps)
            torch.add(base.view(-1), step.view(-1), out=result[low:high])

    def _rounded(self, result: Tensor, dtype: torch.dtype) -> Tensor:
        """The result, rounded to the dtype that is written."""
        if result.dtype == dtype:
            return result
        return self.scratch.array("rounded", len(result), dtype, result.device).copy_(result)

    def _measures(self, tensor: TensorPlan) -> Measures:
        """What the method must know of a whole tensor before it merges the first entry."""
        if tensor.fate != MERGED:
            return Measures()
        if self.method.select is not None:
            blocks = Blocks(lambda: self._shaped_blocks(tensor), tensor.spec.numel)
            return Measures(select=self.method.select(blocks, self.plan.selection))
        if self.plan.passes(tensor) == 1:
            return Measures()
        if self.method.span is not None:
            weights = torch.tensor(tensor.weights, dtype=torch.float64)
            try:
                coefficients = self.method.span(self._products(tensor), weights)
            except InputError as error:
                raise InputError(f"{tensor.name!r}: {error}") from error
            return Measures(coefficients=coefficients.tolist())
        return Measures(limits=self._limits(tensor))

    def _limits(self, tensor: TensorPlan) -> list[tuple[int, int]]:
        """For each model the sizes of the smallest and the largest entry that stay.

        They are those of :func:`sparse.limits`. Of "middle", the share γ of largest entries is left
        out, or less where too few would stay.
        """
        numel = tensor.spec.numel
        counts = [int(density * numel) for density in tensor.densities]
        if self.method.thinned == "size":
            ranks = [[max(1, count)] for count in counts]
        else:
            n_above = [
                min(int(gamma * numel), numel - count)
                for gamma, count in zip(tensor.gammas, counts, strict=True)
            ]
            ranks = [
                [above + max(1, count), above + 1]
                for above, count in zip(n_above, counts, strict=True)
            ]

        def sizes_by_block() -> Iterator[list[Tensor]]:
            for inputs in self._blocks(tensor):
                _, steps = self._steps(inputs, self.dtype)
                precisions = self._precisions_or_ones(inputs)
                yield [
                    sparse.sizes(step, precision).cpu()
                    for step, precision in zip(steps, precisions, strict=True)
                ]

        limits = sparse.limits(sizes_by_block, ranks)
        if self.method.thinned == "size":
            return [(smallest, sparse.NO_LIMIT) for (smallest,) in limits]
        return [
            (smallest if count else sparse.NO_LIMIT, largest)
            for (smallest, largest), count in zip(limits, counts, strict=True)
        ]

    def _block_bounds(self, tensor: TensorPlan, stop: int) -> Iterator[tuple[int, int]]:
        """The blocks of the first ``stop`` entries, of whole rows where rows are merged at once."""
        length = BLOCK
        if tensor.scope == ROWS:
            entries = BLOCK if self.method.select is None else SELECTED
            length = max(1, entries // tensor.row_length) * tensor.row_length
        for low in range(0, stop, length):
            yield low, min(low + length, stop)

    def _blocks(self, tensor: TensorPlan) -> Iterator[Inputs]:
        """A whole tensor, block by block."""
        for start, stop in self._block_bounds(tensor, tensor.spec.numel):
            yield read_inputs(self.plan, tensor, start, stop, self.scratch)

    def _shaped_blocks(self, tensor: TensorPlan) -> Iterator[tuple[Tensor, Tensor]]:
        """A whole tensor, block by block, as :meth:`_shaped`."""
        for inputs in self._blocks(tensor):
            yield self._shaped(tensor, inputs)

    def _shaped(self, tensor: TensorPlan, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """θ_0 and the stacked θ_t − θ_0 of a block; in the tensor's shape where rows matter."""
        base, steps = self._steps(inputs, self.dtype)
        assert base is not None
        if tensor.scope == ENTRIES:
            return base, steps
        shape = (-1, *tensor.spec.shape[1:]) if len(tensor.spec.shape) > 1 else (-1,)
        return base.view(shape), steps.view(len(steps), *shape)

    def _steps(self, inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
        """θ_0 and the θ_t − θ_0 of a block as rows of a matrix; without a base the θ_t.

        They lie in buffers that the next block uses again.
        """
        count = len(inputs.models)
        numel = len(inputs.models[0])
        device = inputs.device
        steps = self.scratch.array("steps", count * numel, dtype, device).view(count, numel)
        base = None
        if inputs.base is not None:
            base = self.scratch.array("base", numel, dtype, device).copy_(inputs.base)
        for step, model in zip(steps, inputs.models, strict=True):
            step.copy_(model)
            if base is not None:
                step.sub_(base)
        return base, steps

    def _products(self, tensor: TensorPlan) -> Tensor:
        """V Vᵀ of the models' steps, in float64."""
        count = len(tensor.weights)
        gram = torch.zeros(count, count, dtype=torch.float64)
        for inputs in self._blocks(tensor):
            _, steps = self._steps(inputs, torch.float64)
            gram += (steps @ steps.mT).cpu()
        return gram

    def _precisions_or_ones(self, inputs: Inputs) -> list[PrecisionValue]:
        """H_t, or 1 where the method does not weigh by precisions."""
        if self.method.uses_precisions:
            return inputs.precisions
        return [1.0] * len(inputs.models)

    def _combine_thinned(
        self,
        tensor: TensorPlan,
        start: int,
        inputs: Inputs,
        measures: Measures,
        result: Tensor,
    ) -> None:
        """:func:`blr_analysis.merging.sparse.combine_sparse`, block by block."""
        for low, high in self._block_bounds(tensor, len(result)):
            block = inputs.block(low, high)
            base, steps = self._steps(block, self.dtype)
            assert base is not None
            precisions = self._precisions_or_ones(block)
            sparse.combine_sparse(
                result[low:high],
                base,
                self._thinned(tensor, start + low, steps, precisions, measures),
                tensor.weights,
                precisions,
                elect=self.method.elect,
                normalize=self.plan.job.divides,
                scale=tensor.scale,
            )

    def _thinned(
        self,
        tensor: TensorPlan,
        start: int,
        steps: Tensor,
        precisions: Sequence[PrecisionValue],
        measures: Measures,
    ) -> list[Tensor]:
        """The steps of a block; entries that do not stay are 0."""
        if self.method.thinned == "rank":
            return self._drop_by_rank(tensor, start, steps)
        if self.method.thinned == "chance":
            self._drop_by_chance(tensor, start, steps)
        for step, precision, limits in zip(steps, precisions, measures.limits, strict=False):
            sparse.zero_outside(step, sparse.sizes(step, precision), *limits)
        return list(steps)

    def _drop_by_rank(self, tensor: TensorPlan, start: int, steps: Tensor) -> list[Tensor]:
        """DELLA: random entries become 0, more of those that are small in their row."""
        thinned = []
        for t, step in enumerate(steps):
            rows = drop_by_size(
                step.view(-1, tensor.row_length),
                tensor.densities[t],
                tensor.epsilons[t],
                rescale=self.plan.job.rescale,
                key=self._key(tensor, t),
                start=start,
            )
            thinned.append(rows.view(-1))
        return thinned

    def _drop_by_chance(self, tensor: TensorPlan, start: int, steps: Tensor) -> None:
        """DARE: random entries of each θ_t − θ_0 become 0, the others are rescaled, in place."""
        for t, (step, density) in enumerate(zip(steps, tensor.densities, strict=True)):
            drawn = sparse.draws(self._key(tensor, t), start, start + len(step)).to(step)
            step *= torch.lt(drawn, density, out=drawn)
            if self.plan.job.rescale:
                step /= density

    def _key(self, tensor: TensorPlan, model: int) -> str:
        """What seeds the draws of a tensor of a model."""
        return f"{self.plan.job.seed}\0{model}\0{tensor.name}"
