"""The two factors of a layer that is a matrix product: its inputs and its output gradients.

G_c = Σ_t d_ct a_tᵀ needs only the layer's inputs a and the output gradients d of every column c.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from blr_analysis.backprop.matmul import batch_product, product
from blr_analysis.backprop.matrices import Joint, MatrixShape
from blr_analysis.backprop.terms import Term, Tree, slices

TALL_ROWS = 512
"""Output gradients with so many rows are multiplied one column at a time: a product with fewer rows
is slow, so that several columns share one."""


@dataclass(frozen=True)
class Factors(Term):
    """The factors of G_c = Σ_t d_ct a_tᵀ (and of Σ_t d_ct for the bias), for B examples.

    ``inputs`` a: ``[B, g, T, I]``; ``grads`` d: K tensors ``[B, g, T, O]``. T runs over sequence
    or image positions and over the calls of a shared module, so sharing is exact.
    """

    joint: Joint
    inputs: Tensor
    grads: list[Tensor]

    @property
    def weight(self) -> str | None:
        return self.joint.weight

    @property
    def bias(self) -> str | None:
        return self.joint.bias

    @property
    def layout(self) -> MatrixShape:
        return self.joint.layout

    @property
    def names(self) -> tuple[str, ...]:
        return self.joint.names

    @property
    def n_examples(self) -> int:
        return len(self.inputs)

    @property
    def n_columns(self) -> int:
        return len(self.grads)

    @property
    def n_positions(self) -> int:
        return self.inputs.shape[2]

    def part(self, chosen: slice) -> Self:
        """The factors of some of the examples."""
        return replace(self, inputs=self.inputs[chosen], grads=[d[chosen] for d in self.grads])

    def divided(self, size: int) -> Iterator[Self]:
        """The factors of at most ``size`` examples at a time.

        Every tensor is split once for all parts, which is faster than slicing it for each.
        """
        splits = [x.split(max(1, size)) for x in (self.inputs, *self.grads)]
        for inputs, *grads in zip(*splits, strict=True):
            part = replace(self, inputs=inputs, grads=grads)
            vars(part)["shared_columns"] = self.shared_columns
            yield part

    def columns(self, chosen: slice) -> Self:
        """The factors of some of the columns."""
        return replace(self, grads=self.grads[chosen])

    def rows(self, chosen: slice) -> Self:
        """The factors of some rows of the matrix."""
        shape = (chosen.stop - chosen.start, self.layout.columns)
        joint = replace(self.joint, layout=MatrixShape(1, *shape, shape))
        return replace(self, joint=joint, grads=[d[..., chosen] for d in self.grads])

    def cast(self, dtype: torch.dtype) -> Self:
        """The factors in another precision."""
        grads = [d.to(dtype) for d in self.grads]
        return replace(self, inputs=self.inputs.to(dtype), grads=grads)

    @cached_property
    def shared_columns(self) -> Tensor | None:
        """The columns ``[K, g, O]`` where all examples share them; None where they differ.

        They do at the layer that gives the outputs, where the columns are the unit vectors.
        Autograd expands such gradients, so that their stride over the examples is 0.
        """
        if self.n_positions > 1 or any(d.stride(0) for d in self.grads):
            return None
        return torch.cat([d[:1] for d in self.grads]).squeeze(2)

    def stacked(self) -> Tensor:
        """The output gradients as one tensor ``[B, g, K, T, O]``."""
        return torch.stack(self.grads, dim=2)

    def stacks(self) -> Iterator[Tensor]:
        """The output gradients ``[k, B, g, T, O]``, one column at a time; several where each has
        few rows."""
        n_rows = self.grads[0][..., 0].numel()
        for chosen in slices(self.n_columns, TALL_ROWS // n_rows):
            columns = self.grads[chosen]
            yield columns[0].unsqueeze(0) if len(columns) == 1 else torch.stack(columns)

    def matrices(self) -> Tensor:
        """G_c = Σ_t d_ct a_tᵀ for every column, ``[B, g, K, O, I]``."""
        b, g, t, i = self.inputs.shape
        if t == 1:
            return self.stacked().mT * self.inputs.unsqueeze(2)
        k = self.n_columns
        o = self.grads[0].shape[-1]
        if k == 1:
            d = self.grads[0].reshape(b * g, t, o).mT.contiguous()
        elif self.grads[0].stride(-1) == 1:
            d = torch.stack(self.grads, dim=3).reshape(b * g, t, k * o).mT
        else:  # positions are last in memory, as of images
            d = torch.stack([d.mT for d in self.grads], dim=2).reshape(b * g, k * o, t)
        a = self.inputs.reshape(b * g, t, i)
        return batch_product(d, a).view(b, g, k, o, i)

    def bias_grads(self) -> Tensor:
        """Σ_t d_ct, the gradients of the bias, ``[B, g, K, O]``."""
        return torch.stack([d.sum(2) for d in self.grads], dim=2)

    def jacobian(self) -> Tree:
        gradients: Tree = {}
        if self.weight is not None:
            gradients[self.weight] = self.layout.parameter(self.matrices().movedim(2, 1))
        if self.bias is not None:
            gradients[self.bias] = self.bias_grads().movedim(2, 1).flatten(2)
        return gradients

    def joint_matrices(self) -> Tensor:
        """G with the gradient of the bias as a last input column, ``[B, g, K, O, I (+1)]``."""
        if self.bias is None:
            return self.matrices()
        if self.weight is None:
            return self.bias_grads().unsqueeze(-1)
        return torch.cat([self.matrices(), self.bias_grads().unsqueeze(-1)], dim=-1)

    def used_positions(self) -> Tensor:
        """The positions on which some column depends, bool ``[B, T]``."""
        used_by_column = [(d != 0).any(-1).any(1) for d in self.grads]  # [B, T] each
        return torch.stack(used_by_column).any(0)

    def second_moments(self, *, padded: bool = False) -> tuple[Tensor, Tensor]:
        """Σ a aᵀ (with a 1 joined to a for the bias) and Σ d dᵀ: ``[g, I', I']``, ``[g, O, O]``.

        Sums run over examples and positions, and over columns for d. ``padded`` leaves out
        positions on which no column depends, so that padding does not count.
        """
        _, g, _, i = self.inputs.shape
        a = self.inputs.transpose(0, 1).reshape(g, -1, i)
        ones = a.new_ones(*a.shape[:-1], 1)
        if padded:
            ones = ones * self.used_positions().reshape(1, -1, 1)
            a = a * ones
        if self.weight is None:
            a = ones
        elif self.bias is not None:
            a = torch.cat([a, ones], dim=-1)
        of_grads = a.new_zeros(())
        for stack in self.stacks():
            d = stack.movedim(2, 0).flatten(1, 3)
            of_grads = of_grads + product(d.mT, d)
        return product(a.mT, a), of_grads
