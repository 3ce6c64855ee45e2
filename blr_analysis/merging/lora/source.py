"""The tensors of a base with a plain LoRA adapter added, computed piece by piece.

A tensor is cut into blocks of whole rows whose edges do not depend on what is asked for; a block
is W_0 + s·B·A in float32 (float64 where the base is), rounded once to the dtype of the answer.
Never more than the matrices of one tensor, and one block, are in memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from blr_analysis.files import Owned, Scratch, Source, Spec
from blr_analysis.merging.lora.changes import AdapterChange, LoraUpdate

BLOCK = 2**16  # elements of W that are computed at a time, in whole rows


class AdaptedBase(Source):
    """A base and what an adapter changes of it.

    Attributes:
        changes: by the base's names, what happens to a tensor, in words; those not named are the
            base's.
        notes: what a user should be told.
    """

    def __init__(
        self,
        name: str,
        base: Source,
        changes: Mapping[str, str],
        dtype: torch.dtype | None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.name, self.changes, self.notes = name, changes, notes
        self.specs: Mapping[str, Spec] = {
            name: Spec(spec.shape, torch.promote_types(dtype or spec.dtype, spec.dtype))
            if name in changes
            else spec
            for name, spec in base.specs.items()
        }
        self.base = base

    def words(self, name: str) -> str:
        """What the adapter does to a tensor."""
        return self.changes.get(name, "")

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        """Elements ``[start, stop)``, the same bits whatever the pieces and the threads."""
        spec = self.piece(name, start, stop)
        if name not in self.changes:
            return self.base.read(name, start, stop, Owned(scratch, (self, "base")))
        piece = scratch.array((self, "piece"), stop - start, spec.dtype)
        self.fill(name, start, piece, scratch)
        return piece

    def fill(self, name: str, start: int, piece: Tensor, scratch: Scratch) -> None:
        """Write the elements of a changed tensor from ``start`` on into ``piece``."""
        raise NotImplementedError


class Streamed(AdaptedBase):
    """A plain adapter, added as it is read."""

    def __init__(
        self,
        name: str,
        base: Source,
        file: Source,
        changes: Mapping[str, AdapterChange],
        dtype: torch.dtype | None,
        notes: tuple[str, ...],
    ) -> None:
        words = {name: change.words for name, change in changes.items()}
        super().__init__(name, base, words, dtype, notes)
        self.origin = self.file = file
        self.how = changes

    def fill(self, name: str, start: int, piece: Tensor, scratch: Scratch) -> None:
        """Cut a piece out of the blocks that it touches."""
        low_rank, stop = self.how[name].low_rank, start + len(piece)
        if low_rank is None:
            piece.copy_(self._start(name, start, stop, scratch))
            return
        real = torch.promote_types(torch.float32, self.base.specs[name].dtype)
        cols = low_rank.cols
        spans = _spans(low_rank, start, stop)
        if not spans:
            return
        above, right = spans[0][0], self._right(low_rank, scratch, real)
        left = self._left(low_rank, above, spans[-1][1], scratch, real)
        for first, last in spans:
            part = left[first - above : last - above].clone()  # placed alike for all pieces
            block = torch.mm(part, right).mul_(low_rank.scale)
            there = self._start(name, first * cols, last * cols, scratch)
            flat = block.add_(there.to(real).view_as(block)).view(-1)
            low, high = max(start, first * cols), min(stop, last * cols)
            piece[low - start : high - start] = flat[low - first * cols : high - first * cols]

    def _start(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        """What a tensor is before anything is added."""
        whole, own = self.how[name].whole, Owned(scratch, (self, "base"))
        if whole is not None:
            return self.file.read(whole, start, stop, own)
        return self.base.read(name, start, stop, own).cpu()

    def _read(self, key: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        return self.file.read(key, start, stop, Owned(scratch, (self, "file")))

    def _left(
        self, low_rank: LoraUpdate, first: int, last: int, scratch: Scratch, real: torch.dtype
    ) -> Tensor:
        """[rows, r]: rows of B, or columns of A where the base is stored transposed."""
        rank = low_rank.rank
        if not low_rank.transposed:
            b = self._read(low_rank.b, first * rank, last * rank, scratch)
            return b.view(-1, rank).to(real, copy=True)
        left = torch.empty(last - first, rank, dtype=real)
        for k in range(rank):
            row = k * low_rank.rows
            left[:, k] = self._read(low_rank.a, row + first, row + last, scratch)
        return left

    def _right(self, low_rank: LoraUpdate, scratch: Scratch, real: torch.dtype) -> Tensor:
        """[r, cols]: A, or Bᵀ where the base is stored transposed."""
        key, size = low_rank.a, low_rank.rank * low_rank.cols
        if not low_rank.transposed:
            return self._read(key, 0, size, scratch).view(low_rank.rank, -1).to(real, copy=True)
        b = self._read(low_rank.b, 0, size, scratch).view(low_rank.cols, -1)
        return b.to(real).T.clone(memory_format=torch.contiguous_format)


def _spans(low_rank: LoraUpdate, start: int, stop: int) -> list[tuple[int, int]]:
    """(first row, row after the last) of the blocks that elements [start, stop) touch."""
    if start == stop:
        return []
    rows, cols = low_rank.rows, low_rank.cols
    step = max(1, BLOCK // cols)
    first = start // cols // step * step
    return [(row, min(row + step, rows)) for row in range(first, -(-stop // cols), step)]
