"""The layer that gives the outputs: its share of Σ_i J_iᵀ Λ_i J_i in closed form, and the few
columns that its inputs let through to the layers below.

With Λ = diag(s) − v vᵀ the C columns of a root of Λ are not needed there. Below, at inputs a of I
numbers, Σ_c (Wᵀ c)(Wᵀ c)ᵀ = Wᵀ Λ W has a root of I columns, those of c_k = Λ W u_k / √λ_k for its
eigenvectors u_k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.backprop.matrices import Basis
from blr_analysis.backprop.outer import Outer
from blr_analysis.backprop.terms import Tree, slices

MANY = 64  # outputs, from which on the closed form is faster
FEWER = 5  # times fewer columns than outputs, for the eigenvectors to pay
CACHED = 2**18  # numbers that are made and used at once, so that they stay in the cache


@dataclass(frozen=True)
class Head(Outer):
    """Σ_c G_c ⊗ G_c of a linear layer with Σ_c d_c d_cᵀ = diag(s) − v vᵀ: its sums, no columns.

    ``scale`` s and ``low`` v: ``[B, O]`` in float64, as probabilities near 1 cancel in s − v².
    """

    scale: Tensor
    low: Tensor
    basis: Basis | None = None

    def second_moments(self, *, padded: bool = False) -> tuple[Tensor, Tensor]:
        unit = self.inputs.new_ones(self.inputs.shape[:-1]).unsqueeze(-1)
        right, _ = Outer(self.joint, self.inputs, [unit]).second_moments(padded=padded)
        return right, (self.scale.sum(0).diag() - self.low.mT @ self.low).unsqueeze(0)

    def rotated(self, basis: Basis) -> Head:
        return Head(self.joint, self.inputs, self.grads, self.scale, self.low, basis)

    def add_square_sum(self, into: Tree) -> None:
        """Add Σ_i diag(U_Gᵀ Λ_i U_G) (U_Aᵀ a_i)²ᵀ."""
        s, v, a = self.scale, self.low, self.inputs.flatten(1)
        basis = self.basis
        if basis is not None and basis.left is not None:
            left = basis.left[0].double()
            s, v = s @ left.square(), v @ left
        squares = (s - v.square()).clamp_min(0).to(a)
        one = [] if self.bias is None else [a.new_ones(len(a), 1)]
        if basis is None:
            sums = squares.mT @ torch.cat([a.square(), *one], dim=1)
            for name, share in self.joint.split(sums.unsqueeze(0)).items():
                into[name] += share
        else:
            a = torch.cat([a, *one], dim=1) @ basis.right[0]
            into[basis.key] += squares.mT @ a.square()


def pays(inputs: int, outputs: int) -> bool:
    """Whether a root of I columns takes less than the C columns of a root of Λ."""
    return outputs >= max(MANY, FEWER * inputs)


def few_columns(weight: Tensor, scale: Tensor, low: Tensor) -> Tensor | None:
    """c_k with Σ_k (Wᵀ c_k)(Wᵀ c_k)ᵀ = Wᵀ Λ W, ``[B, I, C]``; None where I is not much below C."""
    c, i = weight.shape
    if not pays(i, c):
        return None
    w, columns = weight.double(), []
    for some in slices(len(scale), CACHED // (c * i)):
        s, v = scale[some].unsqueeze(-1), low[some].unsqueeze(-1)
        seen = s * w - v * (v.mT @ w)  # Λ W, [b, C, I]
        values, vectors = torch.linalg.eigh(w.mT @ seen)
        least = torch.finfo(w.dtype).eps * i * values[:, -1:]
        roots = torch.where(values > least, values, torch.inf).rsqrt()
        columns.append((vectors * roots.unsqueeze(1)).mT.to(weight) @ seen.mT.to(weight))
    return torch.cat(columns)
