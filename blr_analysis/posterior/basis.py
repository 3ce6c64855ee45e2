"""Gradients in the basis in which Σ is cheapest to apply.

For diagonal and Kronecker precisions Σ = U diag(1/s) Uᵀ: once a layer's factored gradients are
rotated (inputs by U_A, output gradients by U_G), Σ is one division per weight. Structures without
such a basis keep the parameters' own, and solve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from blr_analysis.backprop.outer import MatrixShape, Outer, rotated
from blr_analysis.backprop.terms import Dense, Term
from blr_analysis.posterior.structures import Block, Kronecker, Spectral, Structure, Tree


def in_basis(form: Structure, terms: Sequence[Term]) -> list[Term]:
    """Uᵀ G of every term, named and shaped as the structure's eigenvalues are."""
    if not isinstance(form, Kronecker):
        return list(terms)
    return [term if block is None else _rotated(term, block) for term, block in form._paired(terms)]


def basis_shapes(form: Structure) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a vector in the basis."""
    if isinstance(form, Spectral):
        return {n: tuple(s.shape) for n, s in form.values.items()}
    return dict(form.shapes)


def basis_solve(form: Structure, v: Tree) -> Tree:
    """Σ v in the basis, for v with any leading dimensions."""
    if isinstance(form, Spectral):
        return {n: v[n] / s for n, s in form.values.items()}
    return form.solve(v)


def rotation_cost(form: Structure) -> tuple[int, int]:
    """Multiplications to rotate one factored gradient, and one that is held explicitly."""
    if not isinstance(form, Kronecker):
        return 0, 0
    factored = explicit = 0
    for block in form.blocks:
        g, o, i = len(block.left), block.left.shape[-1], block.right.shape[-1]
        factored += g * (o * o + i * i)
        explicit += g * o * i * (o + i)
    return factored, explicit


def _rotated(term: Term, block: Block) -> Term:
    turned: Outer | Tensor
    turned = (
        rotated(term, block.right, block.left) if isinstance(term, Outer) else block.turned(term)
    )
    shape = (len(block.left), block.left.shape[-1], block.right.shape[-1])
    if isinstance(turned, Outer):
        return replace(turned, weight=block.key, layout=MatrixShape(*shape, shape))
    return Dense({block.key: turned.movedim(2, 1)})
