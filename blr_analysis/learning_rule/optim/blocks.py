"""Which tensors are visited together, and in which memory?

An elementwise rule of ten operations reads and writes main memory ten times if each operation
runs over all parameters before the next one starts. On a CPU the rules of this package run
therefore block by block: all operations on some 2¹⁹ elements, which stay in the cache, then the
next block. An accelerator gets everything at once, for it counts kernel launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

BLOCK = 1 << 19
"""Elements per block on a CPU (measured: 2¹⁸ to 2²⁰ are about as fast, 2²⁴ three times slower)."""

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def blocks(columns: Sequence[Sequence[Tensor]], size: int = BLOCK) -> Iterator[list[list[Tensor]]]:
    """Yield ``columns`` in pieces that fit the cache.

    ``columns[j][i]`` is the ``j``-th quantity (weight, gradient, …) of the ``i``-th parameter; all
    tensors of one parameter have its shape, all tensors one device. On a CPU, contiguous tensors
    are cut into views of at most ``size`` elements and small ones are put together; elsewhere the
    columns come back as one block. Writing to a piece writes to the tensor.

        >>> x = [torch.zeros(5), torch.zeros(2), torch.zeros(1)]
        >>> [[piece.numel() for piece in block[0]] for block in blocks([x], size=3)]
        [[3], [2], [2, 1]]
    """
    if not columns or not columns[0]:
        return
    if columns[0][0].device.type != "cpu":
        yield [list(column) for column in columns]
        return
    gathered: list[tuple[Tensor, ...]] = []
    filled = 0
    for row in zip(*columns, strict=True):
        for piece in _cut(row, size):
            count = piece[0].numel()
            if gathered and filled + count > size:
                yield [list(column) for column in zip(*gathered, strict=True)]
                gathered, filled = [], 0
            gathered.append(piece)
            filled += count
    yield [list(column) for column in zip(*gathered, strict=True)]


def _cut(row: tuple[Tensor, ...], size: int) -> Iterable[tuple[Tensor, ...]]:
    if row[0].numel() <= size or not all(tensor.is_contiguous() for tensor in row):
        return [row]
    return zip(*(tensor.detach().view(-1).split(size) for tensor in row), strict=True)


def group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items with equal ``key(item)`` together, in their order.

    >>> group_by([1, 2, 3, 4], lambda number: number % 2)
    {1: [1, 3], 0: [2, 4]}
    """
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


class Buffers:
    """Large scratch tensors that are used again at the next step.

    A fresh 40 MB tensor costs the operating system ten thousand page faults, more than the
    arithmetic done in it. Only CPU memory is kept; accelerators have an allocator that does this.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, like: Sequence[Tensor], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """One flat tensor in a list, and its views shaped as ``like`` (one device).

        >>> flats, views = Buffers().take([torch.zeros(2, 3), torch.zeros(4)], torch.float64)
        >>> flats[0].shape, [tuple(view.shape) for view in views]
        (torch.Size([10]), [(2, 3), (4,)])
        """
        counts = [tensor.numel() for tensor in like]
        device = like[0].device
        free = self._free.get((sum(counts), dtype), []) if device.type == "cpu" else []
        flat = free.pop() if free else torch.empty(sum(counts), dtype=dtype, device=device)
        pieces = flat.split(counts)
        return [flat], [piece.view(t.shape) for piece, t in zip(pieces, like, strict=True)]

    def give(self, flats: Iterable[Tensor]) -> None:
        """Take ``flats`` back. Nothing else may use them from here on."""
        for flat in flats:
            if flat.device.type == "cpu":
                self._free.setdefault((flat.numel(), flat.dtype), []).append(flat)

    def clear(self) -> None:
        """Forget the free tensors."""
        self._free.clear()
