"""Layers that are matrix products: their gradients are sums of outer products.

The gradient for the column c of an example is G_c = Σ_t d_ct a_tᵀ, with the layer's inputs a_t and
the output gradients d_ct at its positions t (:mod:`~blr_analysis.backprop.factors`). Whatever a
:class:`Term` is asked for is computed from a and d by the cheapest of several formulas. Grams and
squares are in :mod:`~blr_analysis.backprop.factored_gram`, products with many vectors in
:mod:`~blr_analysis.backprop.factored_products`, and the basis of Kronecker factors in
:mod:`~blr_analysis.backprop.rotation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.backprop.factored_gram import add_square_sums, gram_numbers, weighted_gram
from blr_analysis.backprop.factored_products import (
    add_factored_sums,
    explicit_products,
    factored_products,
    keeps_factors,
)
from blr_analysis.backprop.factors import Factors
from blr_analysis.backprop.matrices import Basis, Joint, MatrixShape
from blr_analysis.backprop.rotation import rotated_factors, rotated_gram, rotated_matrices
from blr_analysis.backprop.terms import (
    Dense,
    Term,
    TermCost,
    Tree,
    by_rows,
    rank_one,
    slices,
)

PROJECTED_AT_ONCE = 3  # numbers for each position and projection: s·a_t, r·d_t, and a temporary


@dataclass(frozen=True)
class Outer(Factors):
    """The gradients G_c of a Linear, a convolution or Hugging Face's Conv1D, by their factors.

    Methods without a docstring are explained in :class:`Term`.
    """

    @property
    def matrix(self) -> MatrixShape | None:
        layout = self.layout
        if self.weight is None or layout.groups > 1 or layout.transposed:
            return None
        return layout

    def joined(self, other: Term) -> Outer | None:
        """Two calls of one layer, as one call with the positions of both; None for other terms."""
        if not isinstance(other, Outer) or other.joint != self.joint:
            return None
        inputs = torch.cat([self.inputs, other.inputs], dim=2)
        grads_of_both = zip(self.grads, other.grads, strict=True)
        grads = [torch.cat(pair, dim=2) for pair in grads_of_both]
        return Outer(self.joint, inputs, grads)

    def cost(self) -> TermCost:
        layout = self.layout
        n_positions = self.n_positions
        return TermCost(
            inputs=self.inputs.numel() / self.n_examples,
            gram=lambda n_columns: gram_numbers(layout, n_positions, n_columns),
        )

    def gram(self, variance: Mapping[str, Tensor], into: Tensor | None = None) -> Tensor:
        weight = None if self.weight is None else self.layout.matrix(variance[self.weight])
        bias = None
        if self.bias is not None:
            bias = variance[self.bias].reshape(self.layout.groups, self.layout.rows)
        return weighted_gram(self, weight, bias, into)

    @property
    def zeros(self) -> Tree:
        return {name: self.inputs.new_zeros(shape) for name, shape in self.joint.shapes.items()}

    def add_square_sum(self, into: Tree) -> None:
        weight = None if self.weight is None else self.layout.matrix(into[self.weight])
        bias = None if self.bias is None else into[self.bias]
        add_square_sums(self, weight, bias)

    def sum(self) -> Tree:
        d = sum(self.grads[1:], start=self.grads[0])  # Σ_c d_c
        sums: Tree = {}
        if self.weight is not None:
            left = d.transpose(0, 1).flatten(1, 2)
            right = self.inputs.transpose(0, 1).flatten(1, 2)
            sums[self.weight] = self.layout.parameter(torch.bmm(left.mT, right))
        if self.bias is not None:
            sums[self.bias] = d.sum((0, 2)).flatten()
        return sums

    def products(
        self,
        stack: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        scale: Mapping[str, Tensor] | None = None,
        room: int | None = None,
    ) -> Tensor:
        """⟨G_c, U_r⟩ = Σ_t d_ctᵀ (U_r a_t); the sum over t first where that is cheaper."""
        if self.weight is None:
            return super().products(stack, dtype=dtype, scale=scale, room=room)
        if not keeps_factors(self, len(stack[self.weight])):
            return explicit_products(self, stack, dtype, scale, room)
        return factored_products(self.cast(dtype), stack, scale, room)

    def combined(self, weights: Tensor, into: Tree) -> None:
        """Σ_c w_cr G_c = Σ_t (Σ_c w_cr d_ct) a_tᵀ; G_c first where that is cheaper."""
        if keeps_factors(self, weights.shape[-1]):
            add_factored_sums(self.cast(weights.dtype), weights, into)
        else:
            super().combined(weights, into)

    def joints(self) -> list[Joint]:
        joints = []
        if self.weight is not None:
            joints.append(Joint(self.weight, None, self.layout))
        if self.bias is not None:
            joints.append(by_rows(self.bias, (self.layout.groups * self.layout.rows,)))
        return joints

    def projected(self, joint: Joint, left: Tensor, right: Tensor, room: int) -> Tensor:
        """r_pᵀ G s_p = Σ_t (r_p·d_t)(s_p·a_t), with a bias as one more input of 1."""
        (d,) = self.grads
        is_bias_alone = joint.weight is None or joint.weight != self.weight
        if is_bias_alone:
            assert self.bias is not None
            bias = {self.bias: d.sum(2).flatten(1)}
            return rank_one(joint.join(bias), left, right, room)
        n_inputs = self.inputs.shape[-1]
        n_projections = left.shape[-1]
        positions_per_example = self.inputs[0, ..., 0].numel()
        size = room // (PROJECTED_AT_ONCE * n_projections * positions_per_example)
        projections = []
        for examples in slices(len(d), size):
            by_inputs = self.inputs[examples] @ right[:, :n_inputs]  # s·a_t
            if joint.bias is not None:
                by_inputs += right[:, -1:]
            by_grads = d[examples] @ left  # r·d_t
            projections.append(by_inputs.mul_(by_grads).sum((1, 2)))
        return torch.cat(projections)

    def factors(
        self, *, padded: bool = False, vocabulary: int = 0
    ) -> tuple[Joint, Tensor, Tensor] | None:
        is_layer_of_vocabulary = self.layout.rows == vocabulary
        if is_layer_of_vocabulary:
            return None
        right, left = self.second_moments(padded=padded)
        return self.joint, right, left

    def rotated(self, basis: Basis) -> Term:
        rotated = rotated_factors(self, basis)
        if rotated is not None:
            return Outer(rotated.joint, rotated.inputs, rotated.grads)
        return Dense({basis.key: rotated_matrices(self, basis).movedim(2, 1)})

    def rotated_gram(self, basis: Basis, variance: Tensor, into: Tensor | None = None) -> Tensor:
        return rotated_gram(self, basis, variance, into)
