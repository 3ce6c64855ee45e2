"""The layer that gives the outputs: its share of Σ_i J_iᵀ Λ_i J_i in closed form.

The layer's gradient for a column c of a root of Λ_i is c a_iᵀ, with the layer's inputs a_i. Its
share of the Kronecker factors and of the diagonal in their basis is

    Σ_i Λ_i,    Σ_i diag(U_Gᵀ Λ_i U_G) (U_Aᵀ a_i)²ᵀ.

With Λ = diag(s) − v vᵀ these sums need no root of Λ: N C² multiplications in place of N C³.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.backprop.matrices import Basis
from blr_analysis.backprop.outer import Outer
from blr_analysis.backprop.terms import Term, Tree


@dataclass(frozen=True)
class Head(Outer):
    """A linear layer with Σ_c d_c d_cᵀ = diag(s) − v vᵀ, which gives sums over columns alone.

    Attributes:
        scale: s, ``[B, O]`` in float64, because probabilities near 1 cancel in s − v².
        low: v, likewise.
        basis: the basis U_A, U_G of the sums; None: that of the parameters.
    """

    scale: Tensor
    low: Tensor
    basis: Basis | None = None

    def second_moments(self, *, padded: bool = False) -> tuple[Tensor, Tensor]:
        unit = self.inputs.new_ones(self.inputs.shape[:-1]).unsqueeze(-1)
        right, _ = Outer(self.joint, self.inputs, [unit]).second_moments(padded=padded)
        left = self.scale.sum(0).diag() - self.low.mT @ self.low
        return right, left.unsqueeze(0)

    def rotated(self, basis: Basis) -> Head:
        return Head(self.joint, self.inputs, self.grads, self.scale, self.low, basis)

    def add_square_sum(self, into: Tree) -> None:
        """Add Σ_i diag(U_Gᵀ Λ_i U_G) (U_Aᵀ a_i)²ᵀ, with U = I where no basis is set."""
        basis = self.basis
        inputs = self.inputs.flatten(1)
        if self.bias is not None:
            inputs = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], dim=1)
        if basis is None:
            sums = self._diagonals(None).mT @ inputs.square()
            for name, share in self.joint.split(sums.unsqueeze(0)).items():
                into[name] += share
        else:
            turned = inputs @ basis.right[0]
            into[basis.key] += self._diagonals(basis.left).mT @ turned.square()

    def _diagonals(self, left: Tensor | None) -> Tensor:
        """diag(U_Gᵀ Λ_i U_G), ``[B, O]``."""
        scale = self.scale
        low = self.low
        if left is not None:
            turn = left[0].double()
            scale = scale @ turn.square()
            low = low @ turn
        return (scale - low.square()).clamp_min(0).to(self.inputs)


def with_head(
    terms: Sequence[Term], weight: str | None, parts: tuple[Tensor, Tensor] | None
) -> list[Term]:
    """The terms, with a :class:`Head` in the place of the term of ``weight``.

    ``parts``: s and v of Λ = diag(s) − v vᵀ. Where it is None, or ``weight`` is, the terms are
    returned as they are.
    """
    if weight is None or parts is None:
        return list(terms)
    return [
        Head(term.joint, term.inputs, [], *parts)
        if isinstance(term, Outer) and weight in term.names
        else term
        for term in terms
    ]
