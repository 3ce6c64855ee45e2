"""The tensors of a base with an adapter added, computed piece by piece.

A tensor is cut into blocks of whole rows whose edges do not depend on what is asked for; a block
is W_0 + s·B·A in float32 (float64 where the base is), rounded once to the dtype of the answer.
Never more than the matrices of one tensor, and one block, are in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping
from itertools import groupby

import torch
from torch import Tensor

from blr_analysis.errors import ModelError
from blr_analysis.files import Scratch, Source, Spec
from blr_analysis.merging.adapters.changes import Change
from blr_analysis.merging.adapters.shapes import LowRank

BLOCK = 2**16  # elements of W that are computed at a time, in whole rows


class Adapter(Source):
    """A base and what an adapter changes of it; see :func:`.adapters.open_adapter`.

    Attributes:
        changes: by the base's names, what happens to a tensor; those not named are the base's.
        notes: what a user should be told.
    """

    def __init__(
        self,
        name: str,
        changes: Mapping[str, Change],
        file: Source,
        base: Source,
        *,
        dtype: torch.dtype | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.name, self.changes, self.notes = name, changes, notes
        self.specs: Mapping[str, Spec] = {
            name: Spec(spec.shape, torch.promote_types(dtype or spec.dtype, spec.dtype))
            if name in changes
            else spec
            for name, spec in base.specs.items()
        }
        self._file, self._base = file, base
        self._lock = threading.Lock()
        self._by_column: dict[str, Tensor] = {}

    @property
    def working_bytes(self) -> int:
        """An upper bound on the memory that one reader takes beside the piece that it asks for."""
        return max((self._working(name, c) for name, c in self.changes.items()), default=0)

    def words(self, name: str) -> str:
        """What the adapter does to a tensor."""
        change = self.changes.get(name)
        return "" if change is None else change.words

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        """Elements ``[start, stop)``, the same bits whatever the pieces and the threads.

        Raises:
            ModelError: DoRA has to divide by the norm of a weight that is all zero.
        """
        spec = self.piece(name, start, stop)
        change = self.changes.get(name)
        if change is None:
            return self._base.read(name, start, stop, _Own(scratch, (self, "base")))
        piece = scratch.array((self, "piece"), stop - start, spec.dtype)
        if change.low_rank is not None:
            self._fill(name, change.low_rank, start, piece, scratch)
        elif change.shift is not None:
            key, scale = change.shift
            added = self._read(key, start, stop, scratch).to(self._real(name))
            piece.copy_(added.mul(scale).add_(self._start(name, start, stop, scratch)))
        else:
            piece.copy_(self._start(name, start, stop, scratch))
        if change.tokens is not None:
            self._replace_rows(*change.tokens, start, piece, scratch)
        return piece

    def _start(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        """What a tensor is before anything is added."""
        whole = self.changes[name].whole
        if whole is not None:
            return self._file.read(whole, start, stop, _Own(scratch, (self, "base")))
        return self._base.read(name, start, stop, _Own(scratch, (self, "base"))).cpu()

    def _read(self, key: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        return self._file.read(key, start, stop, _Own(scratch, (self, "file")))

    def _real(self, name: str) -> torch.dtype:
        """In which a tensor is computed."""
        return torch.promote_types(torch.float32, self._base.specs[name].dtype)

    def _replace_rows(
        self, key: str, rows: tuple[int, ...], start: int, piece: Tensor, scratch: Scratch
    ) -> None:
        width = self._file.specs[key].shape[1]
        for place, row in enumerate(rows):
            first = max(row * width, start)
            last = min((row + 1) * width, start + len(piece))
            if first < last:
                skip = (place - row) * width
                piece[first - start : last - start] = self._read(
                    key, first + skip, last + skip, scratch
                )

    def _fill(
        self, name: str, low_rank: LowRank, start: int, piece: Tensor, scratch: Scratch
    ) -> None:
        """A piece, cut out of the blocks that it touches."""
        stop, magnitude = start + len(piece), low_rank.magnitude
        columns = None
        if magnitude is not None and low_rank.transposed:
            columns = self._column_factor(name, low_rank, magnitude, scratch)
        for first, last, offset, block in self._blocks(name, low_rank, start, stop, scratch):
            if columns is not None:
                block.mul_(columns)
            elif magnitude is not None:
                norm = _added(block.double().square(), 1).sqrt_()
                m = self._read(magnitude, first, last, scratch)
                block.mul_(_ratio(m, norm, name, block.dtype)[:, None])
            low, high = max(start, offset), min(stop, offset + block.numel())
            piece[low - start : high - start] = block.view(-1)[low - offset : high - offset]

    def _column_factor(
        self, name: str, low_rank: LowRank, magnitude: str, scratch: Scratch
    ) -> Tensor:
        """m/‖·‖ of outputs that are columns: one pass over the whole tensor, made once."""
        with self._lock:
            if name not in self._by_column:
                square = torch.zeros(low_rank.cols, dtype=torch.float64)
                size = self._base.specs[name].numel
                for *_, block in self._blocks(name, low_rank, 0, size, scratch):
                    square.add_(_added(block.double().square(), 0))
                m = self._read(magnitude, 0, low_rank.cols, scratch)
                self._by_column[name] = _ratio(m, square.sqrt_(), name, self._real(name))
        return self._by_column[name]

    def _blocks(
        self, name: str, low_rank: LowRank, start: int, stop: int, scratch: Scratch
    ) -> Iterator[tuple[int, int, int, Tensor]]:
        """(first row, row after the last, offset in the flat tensor, W_0 + s·B·A there) of the
        blocks that [start, stop) touches."""
        rows, cols, real = low_rank.rows, low_rank.cols, self._real(name)
        for group, edges in groupby(_edges(low_rank, start, stop), key=lambda edge: edge[0]):
            spans = [(first, last) for _, first, last in edges]
            above = spans[0][0]
            left = self._left(low_rank, group, above, spans[-1][1], scratch, real)
            right = self._right(low_rank, group, scratch, real)
            for first, last in spans:
                part = left[first - above : last - above].clone()  # placed alike for all pieces
                block = torch.mm(part, right).mul_(low_rank.scale)
                offset = (group * rows + first) * cols
                there = self._start(name, offset, offset + block.numel(), scratch)
                yield first, last, offset, block.add_(there.to(real).view_as(block))

    def _left(
        self,
        low_rank: LowRank,
        group: int,
        first: int,
        last: int,
        scratch: Scratch,
        real: torch.dtype,
    ) -> Tensor:
        """[rows, r]: rows of B, or columns of A where the base is stored transposed."""
        if not low_rank.transposed:
            width = low_rank.rank * low_rank.groups
            b = self._read(low_rank.b, first * width, last * width, scratch)
            return b.view(-1, width)[:, group :: low_rank.groups].to(real).clone()
        left = torch.empty(last - first, low_rank.rank, dtype=real)
        for k in range(low_rank.rank):
            row = (group * low_rank.rank + k) * low_rank.rows
            left[:, k] = self._read(low_rank.a, row + first, row + last, scratch)
        return left

    def _right(self, low_rank: LowRank, group: int, scratch: Scratch, real: torch.dtype) -> Tensor:
        """[r, cols]: rows of A, or Bᵀ where the base is stored transposed."""
        if not low_rank.transposed:
            size = low_rank.rank * low_rank.cols
            a = self._read(low_rank.a, group * size, (group + 1) * size, scratch)
            return a.view(low_rank.rank, -1).to(real, copy=True)
        b = self._read(low_rank.b, 0, self._file.specs[low_rank.b].numel, scratch)
        return (
            b.view(low_rank.cols, -1)[:, group :: low_rank.groups]
            .to(real)
            .T.clone(memory_format=torch.contiguous_format)
        )

    def _working(self, name: str, change: Change) -> int:
        low_rank = change.low_rank
        if low_rank is None:
            return 2 * self.specs[name].nbytes if change.shift else 0
        real = self._real(name).itemsize
        block = max(BLOCK, low_rank.cols) * (3 * real + 2 * 8)
        factors = sum(
            self._file.specs[key].numel * (self._file.specs[key].dtype.itemsize + 2 * real)
            for key in (low_rank.a, low_rank.b)
        )
        return block + factors


class _Own(Scratch):
    """Part of a caller's scratch, so that what the caller read from the same base is left alone."""

    def __init__(self, outer: Scratch, owner: Hashable) -> None:
        self._outer, self._owner = outer, owner

    def take(self, key: Hashable, nbytes: int) -> Tensor:
        return self._outer.take((self._owner, key), nbytes)


def _edges(low_rank: LowRank, start: int, stop: int) -> list[tuple[int, int, int]]:
    """(group, first row, row after the last) of the blocks that elements [start, stop) touch."""
    rows, cols = low_rank.rows, low_rank.cols
    if start == stop:
        return []
    step = max(1, BLOCK // cols)
    found, row = [], start // cols
    while row * cols < stop:
        group, first = divmod(row, rows)
        first -= first % step
        last = min(first + step, rows)
        found.append((group, first, last))
        row = group * rows + last
    return found


def _added(values: Tensor, dim: int) -> Tensor:
    """The sum along a dimension, halving it again and again: additions of one element to one
    other only, so that the bits do not depend on threads or vector lengths."""
    values = values.movedim(dim, 0)
    while len(values) > 1:
        half = len(values) // 2
        total = values[:half] + values[half : 2 * half]
        if len(values) % 2:
            total[0] += values[-1]
        values = total
    return values[0]


def _ratio(magnitude: Tensor, norm: Tensor, name: str, real: torch.dtype) -> Tensor:
    if not bool(norm.all()):
        raise ModelError(
            f"{name!r}: an output of the base plus the adapter is all zero, and DoRA divides by "
            "its norm. The adapter does not belong to this base, or is damaged."
        )
    return (magnitude.view(-1).double() / norm).to(real)
