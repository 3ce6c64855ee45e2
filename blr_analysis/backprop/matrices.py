"""How parameters are read as matrices: one by one, a weight with its bias, in a rotated basis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class MatrixShape:
    """How a parameter is read as ``groups`` matrices ``[O, I]``: Linear, Conv, transposed."""

    groups: int
    rows: int
    columns: int
    shape: tuple[int, ...]
    transposed: bool = False

    def matrix(self, parameter: Tensor) -> Tensor:
        """Parameter ``[..., *shape]`` → ``[..., g, O, I]``."""
        lead = parameter.shape[: parameter.ndim - len(self.shape)]
        if self.transposed:
            return parameter.mT.unsqueeze(-3)
        return parameter.reshape(*lead, self.groups, self.rows, self.columns)

    def parameter(self, matrix: Tensor) -> Tensor:
        """``[..., g, O, I]`` → ``[..., *shape]``."""
        if self.transposed:
            return matrix.squeeze(-3).mT
        return matrix.reshape(*matrix.shape[:-3], *self.shape)


@dataclass(frozen=True)
class Joint:
    """A weight, a bias, or both as one matrix ``[g, O, I']`` with the bias as a last column."""

    weight: str | None
    bias: str | None
    layout: MatrixShape

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Joint:
        """The joint of which :meth:`record` made this entry."""
        layout = MatrixShape(
            groups=entry["groups"],
            rows=entry["rows"],
            columns=entry["columns"],
            shape=tuple(entry["shape"]),
            transposed=entry["transposed"],
        )
        return Joint(entry["weight"], entry["bias"], layout)

    def record(self) -> dict[str, Any]:
        """The joint as JSON can store it, for :meth:`read`."""
        layout = asdict(self.layout) | {"shape": list(self.layout.shape)}
        return {"weight": self.weight, "bias": self.bias} | layout

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    def key(self) -> str:
        """The name of the joint: the weight's, or without a weight the bias's."""
        return self.names[0]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.weight is not None:
            shapes[self.weight] = self.layout.shape
        if self.bias is not None:
            shapes[self.bias] = (self.layout.groups * self.layout.rows,)
        return shapes

    def join(self, v: Mapping[str, Tensor]) -> Tensor:
        """Weight and bias as one matrix ``[..., g, O, I']``."""
        parts = []
        if self.weight is not None:
            parts.append(self.layout.matrix(v[self.weight]))
        if self.bias is not None:
            bias = v[self.bias]
            shape = (*bias.shape[:-1], self.layout.groups, self.layout.rows, 1)
            parts.append(bias.reshape(shape))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def split(self, joint: Tensor) -> dict[str, Tensor]:
        """The inverse of :meth:`join`."""
        parts = {}
        if self.weight is not None:
            part = joint if self.bias is None else joint[..., :-1]
            parts[self.weight] = self.layout.parameter(part)
        if self.bias is not None:
            parts[self.bias] = joint[..., -1].flatten(-2)
        return parts


@dataclass(frozen=True)
class Basis(Joint):
    """A layer's matrices in the eigenvectors of its Kronecker factors, U_Gᵀ G U_A."""

    right: Tensor  # U_A [g, I', I'] of the layer's inputs
    left: Tensor | None = None  # U_G [g, O, O] of its output gradients; None: the identity
    inputs: float | None = None  # the mean eigenvalue of Σ a aᵀ; None: unknown
    chance: float = 0.0  # which part of the off-diagonals of Σ a aᵀ is chance; 0: not measured

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(g, O, I')``."""
        return len(self.right), self.layout.rows, self.right.shape[-1]

    def turn(self, matrices: Tensor) -> Tensor:
        """U_Gᵀ G U_A, from matrices G ``[..., g, O, I']``."""
        if self.left is not None:
            matrices = self.left.mT @ matrices
        return matrices @ self.right

    def back(self, matrices: Tensor) -> Tensor:
        """U_G G U_Aᵀ, the inverse of :meth:`turn`."""
        if self.left is not None:
            matrices = self.left @ matrices
        return matrices @ self.right.mT

    def squares(self, values: Tensor) -> Tensor:
        """The diagonal of U diag(s) Uᵀ, U = U_G ⊗ U_A, from the values s ``[g, O, I']``."""
        if self.left is not None:
            values = self.left.square() @ values
        return values @ self.right.square().mT

    def to(self, device: torch.device, dtype: torch.dtype) -> Basis:
        left = None if self.left is None else self.left.to(device, dtype)
        return replace(self, right=self.right.to(device, dtype), left=left)
