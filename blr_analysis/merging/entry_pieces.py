"""The tensors of a merge that are merged entry by entry, or by rows, whole tensors or matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.files import Scratch
from blr_analysis.merging import sparse
from blr_analysis.merging.formula import PrecisionValue, combine_into
from blr_analysis.merging.merge_plan import AVERAGED, COPIED, MergePlan, TensorPlan
from blr_analysis.merging.methods import MATRICES, ROWS
from blr_analysis.merging.piece import (
    Inputs,
    Piece,
    Sink,
    check_finite,
    check_inputs,
    read_inputs,
)
from blr_analysis.merging.selections import drop_by_size, middle


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
        needs_all_at_once = tensor.is_whole or tensor.scope == ROWS
        if needs_all_at_once:
            self._merge_entries(tensor, piece.start, piece.stop, None)
            return 0
        measures = self._measures(tensor)
        undefined = 0
        for start in range(piece.start, piece.stop, self.plan.chunk):
            stop = min(start + self.plan.chunk, piece.stop)
            undefined += self._merge_entries(tensor, start, stop, measures)
        return undefined

    def _merge_entries(
        self, tensor: TensorPlan, start: int, stop: int, measures: Sequence[float] | None
    ) -> int:
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
        measures: Sequence[float] | None,
        result: Tensor,
    ) -> int:
        """Merge into ``result``; the number of entries that have no precision."""
        if tensor.fate == AVERAGED:
            zeros = [0.0] * len(inputs.models)
            weights = tensor.weights
            combine_into(result, None, inputs.models, weights, zeros, 0.0, self.scratch)
            return 0
        if self.method.matrix is not None and tensor.scope == MATRICES:
            self._combine_matrices(tensor, inputs, result)
            return 0
        if self.method.select is not None:
            self._combine_selected(tensor, inputs, result)
            return 0
        if self.method.thinned:
            self._combine_thinned(tensor, start, inputs, measures, result)
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

    def _combine_selected(self, tensor: TensorPlan, inputs: Inputs, result: Tensor) -> None:
        """θ_0 plus the step that :mod:`blr_analysis.merging.selections` gives."""
        assert inputs.base is not None and self.method.select is not None
        check_inputs(self.plan, tensor, inputs.base, inputs.models)
        shape = tensor.spec.shape if tensor.is_whole else (-1,)
        base = inputs.base.to(self.dtype)
        steps = torch.stack(inputs.steps(self.dtype))
        step = self.method.select(
            base.view(shape), steps.view(len(steps), *shape), self.plan.selection
        )
        torch.add(base, step.reshape(-1), out=result)

    def _rounded(self, result: Tensor, dtype: torch.dtype) -> Tensor:
        """The result, rounded to the dtype that is written."""
        if result.dtype == dtype:
            return result
        return self.scratch.array("rounded", len(result), dtype, result.device).copy_(result)

    def _measures(self, tensor: TensorPlan) -> list[float] | None:
        """What a method must measure on a whole tensor before it merges the first entry.

        Returns:
            For each model its coefficient in the sum, or the size from which its entries stay; None
            where nothing is measured, and one pass over the tensor is enough.
        """
        if self.plan.passes(tensor) == 1:
            return None
        if self.method.span is not None:
            weights = torch.tensor(tensor.weights, dtype=torch.float64)
            try:
                return self.method.span(self._products(tensor), weights).tolist()
            except InputError as error:
                raise InputError(f"{tensor.name!r}: {error}") from error
        return self._limits(tensor)

    def _limits(self, tensor: TensorPlan) -> list[float]:
        """For each model the size of the smallest entry that stays, see :func:`sparse.limits`."""

        def sizes_by_block() -> Iterator[list[Tensor]]:
            for inputs in self._blocks(tensor):
                steps = inputs.steps(self.dtype)
                precisions = self._precisions_or_ones(inputs)
                yield [
                    sparse.sizes(step, precision).cpu()
                    for step, precision in zip(steps, precisions, strict=True)
                ]

        counts = [max(1, int(density * tensor.spec.numel)) for density in tensor.densities]
        return list(sparse.limits(sizes_by_block, counts))

    def _blocks(self, tensor: TensorPlan) -> Iterator[Inputs]:
        """A whole tensor, block by block."""
        for start, stop in sparse.blocks(0, tensor.spec.numel):
            yield read_inputs(self.plan, tensor, start, stop, self.scratch)

    def _products(self, tensor: TensorPlan) -> Tensor:
        """V Vᵀ of the models' steps, in float64."""
        count = len(tensor.weights)
        gram = torch.zeros(count, count, dtype=torch.float64)
        for inputs in self._blocks(tensor):
            steps = torch.stack(inputs.steps(torch.float64)).cpu()
            gram += steps @ steps.mT
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
        limits: Sequence[float] | None,
        result: Tensor,
    ) -> None:
        """:func:`blr_analysis.merging.sparse.combine_sparse`, block by block."""
        must_see_rows = self.method.thinned in ("rank", "middle")
        thinned = self._thinned_by_rows(tensor, start, inputs) if must_see_rows else None
        for low, high in sparse.blocks(0, len(result)):
            block = inputs.block(low, high)
            assert block.base is not None
            precisions = self._precisions_or_ones(block)
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
        self, tensor: TensorPlan, start: int, block: Inputs, limits: Sequence[float] | None
    ) -> list[Tensor]:
        """The steps of a block; entries that are dropped by chance or by size are 0."""
        steps = block.steps(self.dtype)
        if self.method.thinned == "chance":
            self._drop_by_chance(tensor, start, steps)
        elif limits is not None:
            precisions = self._precisions_or_ones(block)
            for step, precision, limit in zip(steps, precisions, limits, strict=True):
                sparse.zero_below(int(limit), step, sparse.sizes(step, precision))
        return steps

    def _thinned_by_rows(self, tensor: TensorPlan, start: int, inputs: Inputs) -> list[Tensor]:
        """The thinned steps, by the methods that must see whole rows or tensors for it."""
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
        """DARE: random entries of each θ_t − θ_0 become 0, the others are rescaled, in place."""
        job = self.plan.job
        for t, (step, density) in enumerate(zip(steps, tensor.densities, strict=True)):
            mask = sparse.random_mask(density, len(step), job.seed, t, tensor.name, start)
            step *= mask.to(step)
            if job.rescale:
                step /= density
