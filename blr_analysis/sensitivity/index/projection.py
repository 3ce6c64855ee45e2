"""Gradients of a task's examples, compressed as an index keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.engine import chunks
from blr_analysis.backprop.matrices import Basis
from blr_analysis.backprop.outer import Outer
from blr_analysis.backprop.terms import Term, slices
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.sensitivity.corrections import check_finite
from blr_analysis.sensitivity.index.block_count import best_block_count, block_squares
from blr_analysis.sensitivity.index.blocks import BLOCK
from blr_analysis.sensitivity.index.compressed import Compressed, Compression
from blr_analysis.sensitivity.index.whitened import Roots, Tile, whitened
from blr_analysis.sensitivity.influence.blocks import Cotangent, loss_gradient, loss_terms
from blr_analysis.task import Task

TOGETHER = 2**22  # numbers of z that are made at once
LARGE = 2**20  # parameters, from which on gradients are turned in bfloat16
TRIED = 16  # examples whose blocks tell how many are stored

Parts = Iterable[tuple[Tensor, Mapping[str, Tensor]]]  # some examples, and tensors of their rows


@dataclass(frozen=True)
class Projection:
    """How the gradients of a task's examples are compressed.

    Attributes:
        task: whose examples.
        posterior: under which gradients are compared.
        roots: Σ^½ of the posterior (``compression.roots``).
        cotangent: ∂(quantity)/∂f of an example.
        half: whether gradients are turned into the basis, and formed, in bfloat16.
    """

    task: Task
    posterior: Posterior
    compression: Compression
    roots: Roots
    cotangent: Cotangent = loss_gradient
    half: bool = False

    def compressed(
        self,
        indices: Tensor | None = None,
        *,
        block_factor: int = 1,
        divided: bool = False,
    ) -> Compressed:
        """Of these examples (None: of all), on every rank."""
        order = torch.arange(self.task.n_data) if indices is None else indices
        parts = self.parts(order, block_factor=block_factor, divided=divided)
        tensors = ((rows, part.tensors()) for rows, part in parts)
        return Compressed(**joined(tensors, order, divided))

    def parts(
        self, indices: Tensor, *, block_factor: int = 1, divided: bool = False
    ) -> Iterator[tuple[Tensor, Compressed]]:
        """No example, and then some of these at a time, on the CPU.

        Args:
            block_factor: times as many blocks as are stored.
            divided: whether the ranks take turns, chunk by chunk.
        """
        yield indices[:0], self.compression.empty(self.roots, block_factor)
        for rows, tiles in self._tiles(indices, divided, self.compression.size):
            part = self.compression.compressed(len(rows), tiles, block_factor=block_factor)
            check_finite(part.squares, "projected gradient")
            yield rows, part

    def block_count(self, room: int) -> int:
        """How many blocks of each example are best stored in so many bytes, as some tell."""
        if not self.compression.signs:
            return 0
        n_data = self.task.n_data
        count = min(TRIED, n_data)
        sample = torch.linspace(0, n_data - 1, count).round().long()
        groups = self._tiles(sample, divided=True, size=1)
        squares = (row for rows, tiles in groups for row in block_squares(len(rows), tiles))
        blocks = sum(-(-root.numel() // BLOCK) for _, root in self.roots.values())
        return best_block_count(squares, count, blocks, room)

    def _tiles(
        self, indices: Tensor, divided: bool, size: int
    ) -> Iterator[tuple[Tensor, Iterator[Tile]]]:
        """Some examples at a time, and their w by tiles: as many as have TOGETHER numbers, of
        which each has ``size``."""
        q = self.posterior
        for chunk in chunks(
            self.task, q.mean, columns=1, label="index", indices=indices, divided=divided
        ):
            terms = loss_terms(self.task, chunk, self.cotangent)
            for rows in slices(terms[0].n_examples, TOGETHER // size):
                pairs = q.form.paired([term.part(rows) for term in terms])
                turned = (self._turned(term, basis) for term, basis in pairs)
                yield chunk.indices[rows], whitened(turned, self.roots)

    def _turned(self, term: Term, basis: Basis | None) -> Term:
        """The gradients in the posterior's basis."""
        if basis is None:
            return term
        if self.half and isinstance(term, Outer):
            half_basis = basis.to(basis.right.device, torch.bfloat16)
            return term.cast(torch.bfloat16).rotated(half_basis)
        return term.rotated(basis)


def joined(parts: Parts, order: Tensor, divided: bool) -> dict[str, Tensor]:
    """The rows of all parts; if ``divided``, of all ranks, in the order of the examples ``order``,
    which rise."""
    rows, tensors = zip(*parts, strict=True)
    whole = {name: torch.cat([part[name] for part in tensors]) for name in tensors[0]}
    if not divided:
        return whole
    places = torch.searchsorted(order, torch.cat(rows))
    return {name: ranks.gathered(t, places, len(order)) for name, t in whole.items()}


def multiplies_half(q: Posterior) -> bool:
    """Whether this device multiplies bfloat16 faster than the posterior's float32, and it has so
    many parameters that this counts."""
    mean = next(iter(q.mean.values()))
    is_large = sum(m.numel() for m in q.mean.values()) >= LARGE
    if mean.dtype != torch.float32 or not is_large:
        return False
    if mean.device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported())
    return mean.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
