"""Influence from K numbers per example: random projections of factored gradients.

For a layer with gradient G = d aᵀ, the m-th number is (r_m · d)(s_m · a) with random signs r_m,
s_m: E[φ(G)ᵀψ(H)] = ⟨G, H⟩, and nothing of the size of the layer is formed on the training side.
The test side carries Σ exactly, and both sides are scaled inversely to each other, row by row and
column by column in the basis of Σ, such that gradients of the usual size come out with the least
product of norms: the product is unbiased, with an error that falls as 1/√K.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.backprop.matrices import Basis, Joint
from blr_analysis.backprop.terms import Term, rank_one
from blr_analysis.posterior.structures import Structure, Tree

ROUNDS = 8  # of balancing rows and columns


@dataclass(frozen=True)
class RankOne:
    """The random vectors ``[g, O, K]`` and ``[g, I, K]`` of one matrix, for either side."""

    joint: Joint
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Projection:
    """K random numbers for gradients over a posterior's parameters; see :func:`projection_for`."""

    size: int
    form: Structure
    sheets: Mapping[str, RankOne]
    room: int

    def train(self, terms: Sequence[Term]) -> Tensor:
        """φ of gradients in factored form (one column), ``[B, K]``."""
        parts = [
            term.projected(joint, *self.sheets[joint.key].train, self.room)
            for term, basis in self.form.paired(terms)
            for joint in (term.joints() if basis is None else [basis])
        ]
        return torch.stack(parts).sum(0)

    def test(self, solved: Tree) -> Tensor:
        """ψ of Σg ``[M, ...]`` by name, so that φψᵀ estimates gᵢᵀΣgⱼ, ``[M, K]``."""
        parts = [
            rank_one(sheet.joint.join(solved), *sheet.test, self.room)
            for sheet in self.sheets.values()
        ]
        return torch.stack(parts).sum(0) / self.size


def projection_for(
    form: Structure, terms: Sequence[Term], size: int, generator: torch.Generator, room: int
) -> Projection:
    """Random vectors for a posterior's structure.

    Args:
        terms: gradients of some examples (one column): the layouts of the layers, and how large
            gradients are in each direction of the basis.
    """
    sheets: dict[str, RankOne] = {}
    squares, variance = form.square_sums(terms), form.basis_variance()
    for term, basis in form.paired(terms):
        if basis is not None:
            scale = separable(variance[basis.key], squares[basis.key])
            sheets[basis.key] = _sheet(basis, basis, scale, size, generator)
            continue
        for joint in term.joints():
            scale = separable(joint.join(variance), joint.join(squares))
            sheets[joint.key] = _sheet(joint, None, scale, size, generator)
    return Projection(size, form, sheets, room)


def _sheet(
    joint: Joint,
    basis: Basis | None,
    scale: tuple[Tensor, Tensor],
    size: int,
    generator: torch.Generator,
) -> RankOne:
    """Random signs, scaled by α_o β_i and its inverse, and turned out of the basis."""
    alpha, beta = scale
    left, right = (_signs(s, size, generator) for s in (alpha, beta))

    def turned(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        if basis is None:
            return rows, columns
        return rows if basis.left is None else basis.left @ rows, basis.right @ columns

    train = turned(left * alpha, right * beta)
    return RankOne(joint, train, turned(left / alpha, right / beta))


def separable(variance: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """α ``[g, O, 1]`` and β ``[g, I, 1]`` that make a projection err least.

    The error of the projection is as large as ‖αβ ∘ G‖ ‖σ²/(αβ) ∘ H‖; for gradients of mean
    square w this is least where Σ α²β² w and Σ σ⁴ w / (α²β²) balance in every row and column.
    Both arguments are ``[g, O, I]``.
    """
    w = squares.double()
    w = w + 1e-3 * w.mean((-2, -1), keepdim=True) + torch.finfo(torch.float64).tiny
    v = variance.double().square() * w
    alpha = torch.ones_like(w[..., :1])  # α², [g, O, 1]
    beta = v.sum(-2, keepdim=True).div(w.sum(-2, keepdim=True)).sqrt()  # β², [g, 1, I]
    for _ in range(ROUNDS):
        alpha = ((v / beta).sum(-1, keepdim=True) / (w * beta).sum(-1, keepdim=True)).sqrt()
        beta = ((v / alpha).sum(-2, keepdim=True) / (w * alpha).sum(-2, keepdim=True)).sqrt()
    return alpha.sqrt().to(variance), beta.mT.sqrt().to(variance)


def _signs(like: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Random signs ``[g, n, K]``, the same on every device."""
    shape = (*like.shape[:-1], size)
    drawn = torch.randint(2, shape, generator=generator, device=generator.device)
    return drawn.to(like.device).to(like.dtype).mul_(2).sub_(1)
