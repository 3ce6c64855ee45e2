"""What an index keeps of a gradient: a small matrix for every matrix of parameters.

For a layer G = Σ_t d_t a_tᵀ, in the eigenvectors of the posterior's Kronecker factors,

    z = Σ_t (Q U_Gᵀ d_t) (P U_Aᵀ a_t)ᵀ,     w_iᵀ w_j ≈ z_iᵀ z_j,     w = Σ^½ g

so that the gradient itself is never formed. Q and P whiten, and add up the rows, or the columns,
with random signs in few places (a count sketch). They whiten by α_o and β_i, whose products have
the sums of 1 / √s_oi over rows and over columns, weighted by the data. A matrix that has room for
all its numbers is whitened number by number: then z_iᵀ z_j is exact.

Sources: Charikar, Chen & Farach-Colton, "Finding frequent items in data streams", 2002; Choe et
al., "What is your data worth to GPT?", 2024 (projections of both sides).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from blr_analysis.backprop.matrices import Basis
from blr_analysis.backprop.outer import Outer
from blr_analysis.backprop.rows import Rows
from blr_analysis.backprop.terms import Apart, Term
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.structures.contract import Spectral
from blr_analysis.posterior.structures.kronecker import Kronecker
from blr_analysis.sensitivity.index.places import data_of, energies, places_of, rooms


def random_signs(count: int, seed: int = 0) -> Tensor:
    """±1, from the raw bits of PCG64, which are the same in all versions of NumPy.

    >>> random_signs(4).tolist()
    [-1, 1, -1, 1]
    """
    words = np.random.PCG64(seed).random_raw(-(-count // 64))
    bits = np.unpackbits(words.astype("<u8").view(np.uint8))
    return 2 * torch.from_numpy(bits[:count].astype(np.int8)) - 1


def folded(x: Tensor, size: int) -> Tensor:
    """``[..., n]`` added up in ``size`` places, number k in place k modulo these.

    >>> folded(torch.arange(5), 2)
    tensor([6, 4])
    """
    if x.shape[-1] == size:
        return x
    missing = -x.shape[-1] % size
    filled = pad(x, (0, missing)) if missing else x
    return filled.unflatten(-1, (-1, size)).sum(-2)


@dataclass(frozen=True)
class Side:
    """How the rows, or the columns, of a matrix are whitened and added up.

    Attributes:
        scale: by which each is multiplied, with a random sign, ``[g, n]``.
        size: the places that they are added up in.
        turn: the same with the eigenvectors before, as one matrix ``[g, n, size]``; None: they stay
            as they are.
    """

    scale: Tensor
    size: int
    turn: Tensor | None

    @classmethod
    def of_basis(cls, scale: Tensor, size: int, vectors: Tensor | None) -> Side:
        """With these eigenvectors ``[g, n, n]``, if any."""
        turn = None if vectors is None else folded(vectors * scale.unsqueeze(1), size)
        return cls(scale, size, turn)

    @property
    def length(self) -> int:
        """n."""
        return self.scale.shape[-1]

    def is_projected_after(self, x: Tensor, other_size: int) -> bool:
        """Whether vectors x ``[B, g, T, n]`` are cheaper to project when they were summed over T,
        into ``other_size`` vectors."""
        if self.turn is None:
            return False
        t = x.shape[2]
        n = self.length
        before = t * n * self.size + t * self.size * other_size
        after = t * n * other_size + other_size * n * self.size
        return after < before

    def joined(self, x: Tensor) -> Tensor:
        """``[B, g, T, n]`` of all rows of eigenvectors; what one is missing for, a bias, is 1."""
        missing = self.length - x.shape[-1]
        return pad(x, (0, missing), value=1.0) if missing else x

    def of(self, x: Tensor) -> Tensor:
        """``[B, g, T, n]`` → ``[B, g, T, size]``; what one row of eigenvectors is missing for, a
        bias, is 1."""
        if self.turn is None:
            return folded(x * self.scale.unsqueeze(1), self.size)
        n = x.shape[-1]
        turn = self.turn.to(x.dtype)
        if len(turn) == 1:
            turned = (x.squeeze(1) @ turn[0, :n]).unsqueeze(1)
        else:
            turned = x @ turn[:, :n]
        if turn.shape[1] > n:
            turned += turn[:, n].unsqueeze(1)
        return turned


@dataclass(frozen=True)
class MatrixSketch:
    """What stands for the gradient of one matrix.

    Attributes:
        left: of the rows.
        right: of the columns.
        whitening: 1 / √s of every number, where there is room for all, ``[g, O, I]``.
    """

    left: Side
    right: Side
    whitening: Tensor | None

    @classmethod
    def of(
        cls, precision: Tensor, delta: float, basis: Basis | None, room: float, seed: int
    ) -> MatrixSketch:
        """Of a matrix ``[g, O, I]`` of eigenvalues.

        Args:
            seed: of its random signs.
        """
        groups, rows, columns = precision.shape
        left_size, right_size = places_of((groups, rows, columns), room)
        is_whole = (left_size, right_size) == (rows, columns)
        if is_whole:
            left_scale = precision.new_ones(groups, rows)
            right_scale = precision.new_ones(groups, columns)
        else:
            left_scale, right_scale = whitening_of_sides(precision, delta)
            left_signs = random_signs(groups * rows, 2 * seed).view(groups, rows)
            right_signs = random_signs(groups * columns, 2 * seed + 1).view(groups, columns)
            left_scale = left_scale * left_signs.to(left_scale)
            right_scale = right_scale * right_signs.to(right_scale)
        return cls(
            Side.of_basis(left_scale, left_size, None if basis is None else basis.left),
            Side.of_basis(right_scale, right_size, None if basis is None else basis.right),
            precision.rsqrt() if is_whole else None,
        )

    @property
    def size(self) -> int:
        """Numbers of z."""
        return len(self.left.scale) * self.left.size * self.right.size

    def of_factors(self, d: Tensor, a: Tensor) -> Tensor:
        """Of Σ_t d_t a_tᵀ: ``[B, g, T, O]``, ``[B, g, T, I]`` → ``[B, size]``.

        The sum over t comes before the longer side is projected where that is cheaper.
        """
        if self.right.is_projected_after(a, self.left.size):
            return self._flat(self.right.of(self.left.of(d).mT @ self.right.joined(a)))
        if self.left.is_projected_after(d, self.right.size):
            return self._flat(self.left.of(self.right.of(a).mT @ self.left.joined(d)).mT)
        return self._flat(self.left.of(d).mT @ self.right.of(a))

    def of_matrices(self, matrices: Tensor) -> Tensor:
        """Of gradients ``[B, g, O, I]``."""
        return self._flat(self.left.of(self.right.of(matrices).mT).mT)

    def of_table(self, ids: Tensor, d: Tensor) -> Tensor:
        """Of tables with the rows d ``[B, T, I]`` at these ids ``[B, T]``, and 0 elsewhere."""
        columns = self.right.of(d.unsqueeze(1)).squeeze(1)
        columns = columns * self.left.scale[0, ids].unsqueeze(-1)
        place = (ids % self.left.size).unsqueeze(-1).expand_as(columns)
        z = columns.new_zeros(len(ids), 1, self.left.size, self.right.size)
        z[:, 0].scatter_add_(1, place, columns)
        return self._flat(z)

    def _flat(self, z: Tensor) -> Tensor:
        if self.whitening is not None:
            z = z * self.whitening
        return z.flatten(1)


def whitening_of_sides(precision: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """α ``[g, O]`` and β ``[g, I]``: (α_o β_i)² stands for 1 / s_oi, with the same mean over the
    data of every row and every column.

    >>> s = torch.tensor([[[2.0, 4.0], [4.0, 8.0]]])
    >>> a, b = whitening_of_sides(s, 0.0)
    >>> torch.allclose((a.unsqueeze(2) * b.unsqueeze(1)) ** -2, s)
    True
    """
    data = data_of(precision, delta)
    squares = data / precision  # of w, by rows and columns
    left = squares.sum(2) / data.sum(2)
    right = squares.sum(1) / data.mul_(left.unsqueeze(2)).sum(1)
    return left.sqrt(), right.sqrt()


@dataclass(frozen=True)
class Sketch:
    """What stands for a whole gradient.

    Attributes:
        posterior: under which gradients are compared.
        matrices: by the names that the posterior's basis has for them.
        starts: where each begins in z.
        size: numbers of z.
    """

    posterior: Posterior
    matrices: dict[str, MatrixSketch]
    starts: dict[str, int]
    size: int

    @classmethod
    def of(cls, q: Posterior, total: int) -> Sketch:
        """In so many numbers at most, but for one of every matrix."""
        assert isinstance(q.form, Spectral)
        bases: dict[str, Basis] = {}
        if isinstance(q.form, Kronecker):
            bases = {block.key: block for block in q.form.blocks}
        precisions = {
            name: values if name in bases else by_rows(values)
            for name, values in q.form.values.items()
        }
        sizes = {name: precision.numel() for name, precision in precisions.items()}
        room = rooms(sizes, energies(q), total)
        delta = q.form.prior_values(q.prior)
        matrices = {
            name: MatrixSketch.of(precision, delta[name], bases.get(name), room[name], number)
            for number, (name, precision) in enumerate(precisions.items())
        }
        ends = np.cumsum([0, *(matrix.size for matrix in matrices.values())]).tolist()
        starts = dict(zip(matrices, ends, strict=False))
        return cls(q, matrices, starts, ends[-1])

    @property
    def is_exact(self) -> bool:
        """Whether there is room for all numbers."""
        return all(matrix.whitening is not None for matrix in self.matrices.values())

    def of_terms(self, terms: list[Term]) -> Tensor:
        """z of gradients of one column, ``[B, size]``."""
        like = next(iter(self.posterior.mean.values()))
        z = like.new_zeros(terms[0].n_examples, self.size)
        for term, basis in self.posterior.form.paired(terms):
            for name, part in self._parts(term, basis):
                start = self.starts[name]
                z[:, start : start + part.shape[1]] += part
        return z

    def _parts(self, term: Term, basis: Basis | None) -> Iterator[tuple[str, Tensor]]:
        if isinstance(term, Apart):
            for part in term.parts:
                yield from self._parts(part, basis)
        elif basis is None:
            yield from self._parts_in_own_basis(term)
        else:
            yield basis.key, self._part_in_basis(term, basis)

    def _part_in_basis(self, term: Term, basis: Basis) -> Tensor:
        matrix = self.matrices[basis.key]
        if isinstance(term, Rows) and basis.left is None:
            return matrix.of_table(term.ids, term.grads[0])
        if isinstance(term, Outer):
            has_weight = term.weight is not None
            inputs = term.inputs if has_weight else term.inputs[..., :0]
            return matrix.of_factors(term.grads[0], inputs)
        return matrix.of_matrices(basis.join(term.jacobian())[:, 0])

    def _parts_in_own_basis(self, term: Term) -> Iterator[tuple[str, Tensor]]:
        if isinstance(term, Rows):
            yield term.name, self.matrices[term.name].of_table(term.ids, term.grads[0])
        elif isinstance(term, Outer) and term.weight is not None and term.layout.groups == 1:
            matrix = self.matrices[term.weight]
            if term.layout.transposed:
                yield term.weight, matrix.of_factors(term.inputs, term.grads[0])
            else:
                yield term.weight, matrix.of_factors(term.grads[0], term.inputs)
            if term.bias is not None:
                bias = term.grads[0].sum(2, keepdim=True)
                yield term.bias, self.matrices[term.bias].of_matrices(bias)
        else:
            for name, gradient in term.jacobian().items():
                matrices = torch.stack([by_rows(example) for example in gradient[:, 0]])
                yield name, self.matrices[name].of_matrices(matrices)


def by_rows(values: Tensor) -> Tensor:
    """A parameter as one matrix of its rows ``[1, O, I]``; a vector as one row."""
    rows = values.shape[0] if values.ndim > 1 else 1
    return values.reshape(1, rows, -1)
