"""Vectors of as many numbers as the parameters, one for each test example, by parameter name.

In memory; or, where it does not hold them, in a file that is mapped, some rows of one matrix of all
vectors side by side: what is multiplied at once lies together, and memory holds no more than that.
Single precision is kept there as half precision of what is divided by the largest of its numbers:
each is off by one part in 2,000, and their errors cancel in a product.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from blr_analysis.backprop.terms import Term, products, slices, total
from blr_analysis.errors import StorageError
from blr_analysis.files import check_room

TOGETHER = 2**23  # numbers of all vectors that lie together
STORED = {torch.float32: torch.float16}

Shapes = Mapping[str, tuple[int, ...]]


class Held(ABC):
    """H_j, ``[M, *shape]`` by name."""

    @abstractmethod
    def put(self, start: int, name: str, values: Tensor) -> None:
        """Write H_j for j = start …, ``[B, *shape]``; ``values`` may be overwritten."""

    @abstractmethod
    def products(self, terms: Sequence[Term], dtype: torch.dtype, room: int) -> Tensor:
        """⟨G_i, H_j⟩ of gradients with one column, ``[B, M]``."""


class InMemory(Held):
    def __init__(self, shapes: Shapes, count: int, like: Tensor) -> None:
        self.vectors = {n: like.new_zeros((count, *s)) for n, s in shapes.items()}

    def put(self, start: int, name: str, values: Tensor) -> None:
        self.vectors[name][start : start + len(values)] = values

    def products(self, terms: Sequence[Term], dtype: torch.dtype, room: int) -> Tensor:
        return products(terms, self.vectors, dtype=dtype, room=room)[:, 0]


class InFile(Held):
    """The bytes of a file, matrix by matrix; of a matrix, block by block of its rows."""

    def __init__(self, shapes: Shapes, count: int, like: Tensor, path: Path) -> None:
        self._shapes, self._count = dict(shapes), count
        self._dtype = STORED.get(like.dtype, like.dtype)
        self._units = {n: like.new_ones(count) for n in shapes}
        self._starts: dict[str, int] = {}
        size = 0
        for name, shape in shapes.items():
            self._starts[name] = size
            size += count * math.prod(shape) * self._dtype.itemsize
        check_room(path, size)
        with path.open("w+b") as file:
            try:
                os.truncate(file.fileno(), size)
                if hasattr(os, "posix_fallocate"):  # a full disk: an error, no signal
                    os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise StorageError(f"{str(path)!r} takes {size:,} bytes: {error}.") from error
            self._map = mmap.mmap(file.fileno(), size)

    def _row(self, name: str) -> int:
        """Numbers in a row of the matrix that this parameter is read as, if it has rows."""
        shape = self._shapes[name]
        rows = next((n for n in shape if n > 1), 1)
        return math.prod(shape) // rows

    def _blocks(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """Some rows of it and their numbers ``[M, …]``."""
        row, each = self._row(name), math.prod(self._shapes[name])
        start = self._starts[name]
        for rows in slices(each // row, TOGETHER // (self._count * row)):
            numbers = self._count * (rows.stop - rows.start) * row
            block = torch.frombuffer(self._map, dtype=self._dtype, count=numbers, offset=start)
            yield rows, block.view(self._count, -1)
            self._let_go(start, numbers * self._dtype.itemsize)
            start += numbers * self._dtype.itemsize

    def _let_go(self, start: int, size: int) -> None:
        """The file keeps these bytes, the memory of this process does not."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, start + size - first)

    def put(self, start: int, name: str, values: Tensor) -> None:
        flat, stop = values.reshape(len(values), -1), start + len(values)
        if self._dtype != values.dtype:
            low, high = flat.aminmax(dim=1)
            largest = torch.maximum(-low, high)
            self._units[name][start:stop] = torch.where(largest > 0, largest, 1)
        units, row = self._units[name][start:stop].unsqueeze(1), self._row(name)
        for rows, block in self._blocks(name):
            block[start:stop] = flat[:, rows.start * row : rows.stop * row].div_(units)

    def products(self, terms: Sequence[Term], dtype: torch.dtype, room: int) -> Tensor:
        sums = None
        for term in terms:
            first, *others = term.names
            unit = self._units[first].to(dtype)
            beside = {  # a bias, in the unit of its weight
                n: self._whole(n).to(dtype).flatten(1) * (self._units[n].to(dtype) / unit)[:, None]
                for n in others
            }
            for part, block, rows in self._parts(term):
                stack = {first: block, **{n: v[:, rows] for n, v in beside.items()}}
                share = part.products(stack, dtype=dtype, room=room)[:, 0].mul_(unit)
                sums = share if sums is None else sums.add_(share)
        return total([]) if sums is None else sums

    def _parts(self, term: Term) -> Iterator[tuple[Term, Tensor, slice]]:
        """The term and its first parameter's vectors, row by row where both are read so."""
        name = term.names[0]
        layout = term.matrix
        if layout is None or layout.columns != self._row(name):
            yield term, self._whole(name), slice(None)
            return
        for rows, block in self._blocks(name):
            yield term.rows(rows), block.view(self._count, -1, layout.columns), rows

    def _whole(self, name: str) -> Tensor:
        """``[M, *shape]`` as they are stored."""
        blocks = [block.clone() for _, block in self._blocks(name)]
        return torch.cat(blocks, dim=1).view(self._count, *self._shapes[name])


@contextmanager
def held_in(
    folder: Path | None, shapes: Shapes, count: int, like: Tensor, *, fits: bool
) -> Iterator[Held]:
    """Vectors for so many test examples: in memory if it ``fits``, else in a file that is gone
    afterwards.

    Raises:
        StorageError: the folder is not there, or its disk has no room.
    """
    if fits:
        yield InMemory(shapes, count, like)
        return
    where = Path(tempfile.gettempdir()) if folder is None else folder
    if not where.is_dir():
        raise StorageError(f"there is no folder {str(where)!r} to put gradients in: make it.")
    with tempfile.TemporaryDirectory(dir=where, prefix="influence-") as place:
        yield InFile(shapes, count, like, Path(place, "gradients"))
