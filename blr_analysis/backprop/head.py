"""The layer that gives the outputs: its part of Σ_i J_iᵀ Λ_i J_i in closed form.

If c is a column of a root of Λ_i, the layer's gradient is c a_iᵀ, with the layer's inputs a_i. Then
the layer's left Kronecker factor, and its diagonal in the basis U_A, U_G of both factors, are

    Σ_i Λ_i,    Σ_i diag(U_Gᵀ Λ_i U_G) (U_Aᵀ a_i)²ᵀ.

With Λ_i = diag(s_i) − v_i v_iᵀ these sums need no root of Λ_i: N C² multiplications in place of
N C³.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blr_analysis.backprop.matrices import Basis
from blr_analysis.backprop.outer import Outer
from blr_analysis.backprop.terms import Term, Tree


@dataclass(frozen=True)
class Head(Outer):
    """A linear layer whose gradients at the outputs have Σ_c d_c d_cᵀ = diag(s) − v vᵀ.

    It has no gradients of single columns, only sums over all columns.

    Attributes:
        diagonal: s, ``[B, O]`` in float64, because probabilities near 1 cancel in s − v².
        vector: v, ``[B, O]`` in float64.
        basis: the basis U_A, U_G of the sums; None: the parameters themselves, U = I.
    """

    diagonal: Tensor
    vector: Tensor
    basis: Basis | None = None

    def second_moments(self, *, padded: bool = False) -> tuple[Tensor, Tensor]:
        """Σ_i a_i a_iᵀ and Σ_i Λ_i."""
        unit_gradient = self.inputs.new_ones(self.inputs.shape[:-1]).unsqueeze(-1)
        right, _ = Outer(self.joint, self.inputs, [unit_gradient]).second_moments(padded=padded)
        left = self.diagonal.sum(0).diag() - self.vector.mT @ self.vector
        return right, left.unsqueeze(0)

    def rotated(self, basis: Basis) -> Head:
        return replace(self, basis=basis)

    def add_square_sum(self, into: Tree) -> None:
        """Add Σ_i diag(U_Gᵀ Λ_i U_G) (U_Aᵀ a_i)²ᵀ."""
        basis = self.basis
        inputs = self.inputs.flatten(1)
        if self.bias is not None:
            inputs = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], dim=1)
        if basis is None:
            sums = self._diagonals(None).mT @ inputs.square()
            for name, part in self.joint.split(sums.unsqueeze(0)).items():
                into[name] += part
        else:
            rotated_inputs = inputs @ basis.right[0]
            rotation = None if basis.left is None else basis.left[0]
            into[basis.key] += self._diagonals(rotation).mT @ rotated_inputs.square()

    def _diagonals(self, rotation: Tensor | None) -> Tensor:
        """diag(U_Gᵀ Λ_i U_G) with the rotation U_G ``[O, O]``, None for I: ``[B, O]``."""
        diagonal = self.diagonal
        vector = self.vector
        if rotation is not None:
            rotation = rotation.double()
            diagonal = diagonal @ rotation.square()
            vector = vector @ rotation
        return (diagonal - vector.square()).clamp_min(0).to(self.inputs)


def with_head(
    terms: Sequence[Term], weight: str | None, parts: tuple[Tensor, Tensor] | None
) -> list[Term]:
    """The terms, with a :class:`Head` in the place of the term of the last layer.

    Args:
        weight: the name of the last layer's weight; None: no term is replaced.
        parts: s and v of Λ = diag(s) − v vᵀ; None: no term is replaced.
    """
    if weight is None or parts is None:
        return list(terms)
    diagonal, vector = parts

    def replaced(term: Term) -> Term:
        if isinstance(term, Outer) and weight in term.names:
            return Head(term.joint, term.inputs, [], diagonal, vector)
        return term

    return [replaced(term) for term in terms]
