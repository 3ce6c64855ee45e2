"""Eigenvalue-corrected Kronecker factors: a precision that keeps correlations within a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blr_analysis.backprop.outer import (
    MatrixShape,
    Outer,
    flat_gram,
    matrix_square_sum,
    rotated,
    rotated_gram,
)
from blr_analysis.backprop.terms import Dense, Term
from blr_analysis.errors import InputError
from blr_analysis.posterior.prior import Given, Prior
from blr_analysis.posterior.structures.contract import Spectral, Tree, total


@dataclass(frozen=True)
class Block:
    """Eigenvectors of one layer's Kronecker factors; the bias is joined as a last input."""

    weight: str | None
    bias: str | None
    layout: MatrixShape
    right: Tensor  # U_A [g, I', I'] of the layer's inputs
    left: Tensor  # U_G [g, O, O] of its output gradients

    @property
    def key(self) -> str:
        name = self.weight or self.bias
        assert name is not None
        return name

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(n for n in (self.weight, self.bias) if n is not None)

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

    def turned(self, term: Term) -> Tensor:
        """The gradients of a dense term in this block's basis, ``[B, g, K, O, I']``."""
        joint = self.join(term.jacobian()).movedim(1, 2)
        return self.left.mT.unsqueeze(1) @ joint @ self.right.unsqueeze(1)

    def split(self, joint: Tensor) -> Tree:
        """The inverse of :meth:`join`."""
        found: Tree = {}
        if self.weight is not None:
            part = joint if self.bias is None else joint[..., :-1]
            found[self.weight] = self.layout.parameter(part)
        if self.bias is not None:
            found[self.bias] = joint[..., -1].flatten(-2)
        return found


@dataclass(frozen=True)
class Kronecker(Spectral):
    """Eigenvalue-corrected K-FAC (George et al., 2018): per layer S = (U_G ⊗ U_A) diag(s) (·)ᵀ.

    Layers that are no matrix products (norms, embeddings, unknown modules) keep a diagonal.
    ``values`` are keyed by the block's weight, ``[g, O, I']``, or by parameter name.
    """

    blocks: tuple[Block, ...]
    values: dict[str, Tensor]
    plain: dict[str, tuple[int, ...]]  # parameters outside the blocks
    order: tuple[str, ...]
    kind = "kron"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:  # type: ignore[override]
        found = dict(self.plain)
        for block in self.blocks:
            if block.weight is not None:
                found[block.weight] = block.layout.shape
            if block.bias is not None:
                found[block.bias] = (block.layout.groups * block.layout.rows,)
        return {n: found[n] for n in self.order}

    def forward(self, v: Tree) -> Tree:
        turned = {n: v[n] for n in self.plain}
        for block in self.blocks:
            turned[block.key] = block.left.mT @ block.join(v) @ block.right
        return turned

    def backward(self, v: Tree) -> Tree:
        turned = {n: v[n] for n in self.plain}
        for block in self.blocks:
            turned.update(block.split(block.left @ v[block.key] @ block.right.mT))
        return {n: turned[n] for n in self.order}

    def with_values(self, values: dict[str, Tensor]) -> Kronecker:
        return replace(self, values=values)

    def prior_values(self, prior: Prior | Given) -> dict[str, float | Tensor]:
        delta = Prior.of_any(prior)
        found = {n: delta.of(n) for n in self.plain}
        for block in self.blocks:
            each = [torch.as_tensor(delta.of(n), dtype=torch.float64) for n in block.names]
            low, high = min(float(p.min()) for p in each), max(float(p.max()) for p in each)
            if low != high:
                raise InputError(
                    f"a Kronecker posterior needs one prior precision for all of {block.names}, "
                    f"got {low:g} … {high:g}; use structure='diag' for a prior per weight"
                )
            found[block.key] = low
        return found

    def diagonal(self, *, inverse: bool = False) -> Tree:
        found = {n: 1 / self.values[n] if inverse else self.values[n].clone() for n in self.plain}
        for block in self.blocks:
            s = self.values[block.key]
            s = 1 / s if inverse else s
            found.update(block.split(block.left.square() @ s @ block.right.square().mT))
        return {n: found[n] for n in self.order}

    def gram(self, terms: Sequence[Term]) -> Tensor:
        parts = []
        for term, block in self._paired(terms):
            if block is None:
                parts.append(term.gram({n: 1 / self.values[n] for n in term.names}))
                continue
            variance = 1 / self.values[block.key]
            if isinstance(term, Outer):
                parts.append(rotated_gram(term, block.right, block.left, variance))
            else:
                parts.append(flat_gram(block.turned(term), variance.unsqueeze(1)))
        return total(parts)

    def square_sums(self, terms: Sequence[Term]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for term, block in self._paired(terms):
            if block is None:
                found.update(term.square_sum())
                continue
            if isinstance(term, Outer):
                turned = rotated(term, block.right, block.left)
            else:
                turned = block.turned(term)
            if isinstance(turned, Outer):
                found[block.key] = matrix_square_sum(turned)
            else:
                found[block.key] = turned.square().sum((0, 2))
        return found

    def _paired(self, terms: Sequence[Term]) -> list[tuple[Term, Block | None]]:
        """Each term with its block; None: its parameters are outside the blocks.

        Terms that cover other parameters than one block does are made dense and regrouped.
        """
        by_names = {block.names: block for block in self.blocks}
        found: list[tuple[Term, Block | None]] = []
        loose: Tree = {}
        for term in terms:
            block = by_names.get(term.names)
            if isinstance(term, Outer) and block is not None:
                found.append((term, block))
            elif all(n in self.plain for n in term.names):
                found.append((term, None))
            else:
                loose.update(term.jacobian())
        for block in self.blocks:
            held = [n for n in block.names if n in loose]
            if held:
                lead = loose[held[0]].shape[:2]
                columns = {
                    n: loose.pop(n)
                    if n in held
                    else self.values[block.key].new_zeros(*lead, *self.shapes[n])
                    for n in block.names
                }
                found.append((Dense(columns), block))
        return [*found, (Dense(loose), None)] if loose else found

    def tensors(self) -> dict[str, Tensor]:
        stored = {}
        keys = {block.key for block in self.blocks}
        for name, s in self.values.items():
            stored[f"{name}.eigenvalues" if name in keys else name] = s
        for block in self.blocks:
            stored[f"{block.key}.input_eigenvectors"] = block.right
            stored[f"{block.key}.output_eigenvectors"] = block.left
        return stored

    def to(self, device: torch.device, dtype: torch.dtype) -> Kronecker:
        blocks = tuple(
            replace(b, right=b.right.to(device, dtype), left=b.left.to(device, dtype))
            for b in self.blocks
        )
        values = {n: s.to(device, dtype) for n, s in self.values.items()}
        return replace(self, blocks=blocks, values=values)
