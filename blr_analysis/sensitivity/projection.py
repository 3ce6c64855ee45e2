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

from blr_analysis.backprop.outer import MatrixShape, Outer
from blr_analysis.backprop.terms import Rows, Term
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.structures import Block, Kronecker, Spectral, Tree

ROUNDS = 8  # of balancing rows and columns


@dataclass(frozen=True)
class Pair:
    """Random vectors of one matrix: ``left`` ``[g, O, K]`` and ``right`` ``[g, I, K]``."""

    left: Tensor
    right: Tensor

    def factored(self, inputs: Tensor, grads: Tensor, joined: bool, room: int) -> Tensor:
        """Σ_t (r·d_t)(s·a_t) from a ``[B, g, T, I]`` and d ``[B, g, T, O]``, ``[B, K]``."""
        i, k = inputs.shape[-1], self.left.shape[-1]
        size = max(1, room // (3 * k * inputs[0, ..., 0].numel()))
        found = []
        for a, d in zip(inputs.split(size), grads.split(size), strict=True):
            seen = a @ self.right[:, :i]
            if joined:
                seen += self.right[:, -1:]
            found.append(seen.mul_(d @ self.left).sum((1, 2)))
        return torch.cat(found)

    def explicit(self, matrices: Tensor, room: int) -> Tensor:
        """The same of gradients ``[B, g, O, I]`` held as they are."""
        b, g, o, _ = matrices.shape
        k = self.left.shape[-1]
        found = matrices.new_zeros(b, k)
        rows = max(1, room // (2 * b * g * k))
        for start in range(0, o, rows):
            part = slice(start, start + rows)
            found += (matrices[:, :, part] @ self.right).mul_(self.left[:, part]).sum((1, 2))
        return found


@dataclass(frozen=True)
class Sheet:
    """The random vectors of one parameter, or of one Kronecker block, for either side."""

    layout: MatrixShape
    block: Block | None
    train: Pair
    test: Pair


@dataclass(frozen=True)
class Sketch:
    """K random numbers for gradients over a posterior's parameters; see :func:`sketch_for`."""

    size: int
    form: object
    sheets: Mapping[str, Sheet]
    room: int

    def train(self, terms: Sequence[Term]) -> Tensor:
        """φ of gradients in factored form (one column), ``[B, K]``."""
        parts: list[Tensor] = []
        for term, block in _paired(self.form, terms):
            if block is not None:
                parts.append(self._block_share(term, block))
            elif isinstance(term, Outer):
                parts += self._outer_shares(term)
            elif isinstance(term, Rows):
                parts.append(self._rows_share(term))
            else:
                parts += [self._explicit(n, g[:, 0], "train") for n, g in term.jacobian().items()]
        return torch.stack(parts).sum(0)

    def test(self, solved: Tree) -> Tensor:
        """ψ of Σg ``[M, ...]`` by name, so that φψᵀ estimates gᵢᵀΣgⱼ, ``[M, K]``."""
        parts = []
        for name, sheet in self.sheets.items():
            if sheet.block is None:
                parts.append(self._explicit(name, solved[name], "test"))
            else:
                parts.append(sheet.test.explicit(sheet.block.join(solved), self.room))
        return torch.stack(parts).sum(0) / self.size

    def _block_share(self, term: Term, block: Block) -> Tensor:
        pair = self.sheets[block.key].train
        if isinstance(term, Outer) and term.weight is not None:
            joined = term.bias is not None
            return pair.factored(term.inputs, term.grads[0], joined, self.room)
        return pair.explicit(block.join(term.jacobian())[:, 0], self.room)

    def _outer_shares(self, term: Outer) -> list[Tensor]:
        parts = []
        d = term.grads[0]
        if term.weight is not None:
            pair = self.sheets[term.weight].train
            parts.append(pair.factored(term.inputs, d, False, self.room))
        if term.bias is not None:
            parts.append(self._explicit(term.bias, d.sum(2).flatten(1), "train"))
        return parts

    def _rows_share(self, term: Rows) -> Tensor:
        pair, d = self.sheets[term.name].train, term.grads[0]
        size = max(1, self.room // (3 * d.shape[1] * self.size))
        parts = [
            (pair.left[0][ids] * (some @ pair.right[0])).sum(1)
            for ids, some in zip(term.ids.split(size), d.split(size), strict=True)
        ]
        return torch.cat(parts)

    def _explicit(self, name: str, gradient: Tensor, side: str) -> Tensor:
        sheet = self.sheets[name]
        pair = sheet.train if side == "train" else sheet.test
        return pair.explicit(sheet.layout.matrix(gradient), self.room)


def sketch_for(
    q: Posterior, terms: Sequence[Term], size: int, generator: torch.Generator, room: int
) -> Sketch:
    """Random vectors for a posterior.

    Args:
        terms: gradients of some examples (one column): the layouts of the layers, and how large
            gradients are in each direction of the basis.
    """
    sheets: dict[str, Sheet] = {}
    if isinstance(q.form, Spectral):
        squares = q.form.square_sums(terms)
    else:
        squares = {n: s for term in terms for n, s in term.square_sum().items()}
    diagonal = None if isinstance(q.form, Kronecker) else q.form.diagonal(inverse=True)
    for term, block in _paired(q.form, terms):
        if block is not None:
            assert isinstance(q.form, Kronecker)
            variance = 1 / q.form.values[block.key]
            scale = separable(variance, squares[block.key])
            sheets[block.key] = _sheet(block.layout, block, scale, size, generator)
            continue
        for name, layout in _layouts(term, q).items():
            own = 1 / q.form.values[name] if isinstance(q.form, Kronecker) else None
            variance = diagonal[name] if diagonal is not None else own
            assert variance is not None
            scale = separable(layout.matrix(variance), layout.matrix(squares[name]))
            sheets[name] = _sheet(layout, None, scale, size, generator)
    return Sketch(size, q.form, sheets, room)


def _paired(form: object, terms: Sequence[Term]) -> list[tuple[Term, Block | None]]:
    return form._paired(terms) if isinstance(form, Kronecker) else [(t, None) for t in terms]


def _layouts(term: Term, q: Posterior) -> dict[str, MatrixShape]:
    """How each parameter of a term is read as matrices: weights as the layer does, rest by rows."""
    found = {}
    for name in term.names:
        shape = tuple(q.mean[name].shape)
        if isinstance(term, Outer) and name == term.weight:
            found[name] = term.layout
        else:
            rows = shape[0] if shape else 1
            found[name] = MatrixShape(1, rows, q.mean[name].numel() // rows, shape)
    return found


def _sheet(
    layout: MatrixShape,
    block: Block | None,
    scale: tuple[Tensor, Tensor],
    size: int,
    generator: torch.Generator,
) -> Sheet:
    """Random signs, scaled by α_o β_i and its inverse, and turned out of the basis."""
    alpha, beta = scale
    left, right = (_signs(s, size, generator) for s in (alpha, beta))

    def turned(rows: Tensor, columns: Tensor) -> Pair:
        if block is None:
            return Pair(rows, columns)
        return Pair(block.left @ rows, block.right @ columns)

    train = turned(left * alpha, right * beta)
    return Sheet(layout, block, train, turned(left / alpha, right / beta))


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
