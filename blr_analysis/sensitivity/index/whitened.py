"""Gradients g of examples as w = Σ^½ g in the posterior's own basis, tile by tile.

The influence of example i on example j is w_iᵀ w_j.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from blr_analysis.backprop.matrices import MatrixShape
from blr_analysis.backprop.terms import Term, slices
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.structures.contract import Spectral
from blr_analysis.sensitivity.index.blocks import BLOCK
from blr_analysis.sensitivity.index.signs import random_signs

TILE = 2**18  # numbers of gradients that are made and used at once, so that they stay in the cache

Roots = Mapping[str, tuple[int, Tensor]]  # of every matrix: place of its first number, ±Σ^½


class Tile(NamedTuple):
    """Some numbers of w of some examples.

    Attributes:
        examples: which of the examples.
        start: the place of the first number in w.
        numbers: ``[b, n]``.
    """

    examples: slice
    start: int
    numbers: Tensor


def signed_roots(q: Posterior, *, whole_blocks: bool) -> Roots:
    """Of every matrix in the posterior's basis the place of its first number, and Σ^½ there times
    random signs; with ``whole_blocks`` every matrix begins with a new block."""
    assert isinstance(q.form, Spectral)
    step = BLOCK if whole_blocks else 1
    starts: dict[str, int] = {}
    count = 0
    for name, precision in q.form.values.items():
        starts[name] = count
        count += -(-precision.numel() // step) * step
    signs = random_signs(count)
    roots: dict[str, tuple[int, Tensor]] = {}
    for name, precision in q.form.values.items():
        start = starts[name]
        matrix_signs = signs[start : start + precision.numel()].to(precision).view_as(precision)
        roots[name] = (start, precision.rsqrt().mul_(matrix_signs))
    return roots


def whitened(terms: Iterable[Term], roots: Roots) -> Iterator[Tile]:
    """w of gradients of one column in the posterior's basis."""
    for term in terms:
        for rows in _row_runs(term.matrix):
            row_roots = {name: _root_of(*roots[name], term.matrix, rows) for name in term.names}
            row_term = term if term.matrix is None else term.rows(rows)
            size = sum(root.numel() for _, root in row_roots.values())
            for examples in slices(term.n_examples, TILE // size):
                for name, gradients in row_term.part(examples).jacobian().items():
                    start, root = row_roots[name]
                    yield Tile(examples, start, _times(gradients[:, 0].flatten(1), root))


def _row_runs(layout: MatrixShape | None) -> Iterable[slice]:
    """Rows of a matrix that make a tile, in whole blocks."""
    if layout is None:
        return [slice(None)]
    return slices(layout.rows, max(1, TILE // (BLOCK * layout.columns)) * BLOCK)


def _root_of(
    start: int, root: Tensor, layout: MatrixShape | None, rows: slice
) -> tuple[int, Tensor]:
    """The place of the first number of these rows, and their flat numbers."""
    if layout is None:
        return start, root.flatten()
    row_size = root.numel() // layout.rows
    return start + rows.start * row_size, root.view(layout.rows, row_size)[rows].flatten()


def _times(gradients: Tensor, root: Tensor) -> Tensor:
    """The product, in place where the type allows: nothing else refers to these gradients."""
    return gradients.mul_(root) if gradients.dtype == root.dtype else gradients * root
