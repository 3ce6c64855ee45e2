"""Which tensors are visited together, and in which memory?

An elementwise rule of ten operations reads and writes main memory ten times if each operation
runs over all parameters before the next one starts. On a CPU the rules of this package run
therefore block by block: all operations on one block, which stays in the cache, then the next.
torch would split each of these operations over its threads and wait for the slowest of them, some
thousand times a step; on a busy machine nearly all time goes into waiting. So the pieces are too
small for torch to split, and whole blocks go to the threads. An accelerator gets everything at
once, for it counts kernel launches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

PIECE = 1 << 15
"""Elements of a tensor that torch works on without splitting them over threads."""

BLOCK = 1 << 17
"""Elements per block on a CPU."""

THREADS = 8
"""At most so many: beyond it they wait for Python's lock."""

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def for_blocks(rule: Callable[..., object], columns: Sequence[Sequence[Tensor]]) -> None:
    """Call ``rule(*block)`` for every block of ``columns``, on torch's number of threads.

    ``columns[j][i]`` is the ``j``-th quantity (weight, gradient, …) of the ``i``-th parameter; all
    tensors of one parameter have its shape, all tensors one device. ``rule`` gets as many lists as
    there are columns, and writes to their tensors elementwise and in place, without gradients.

        >>> x = [torch.zeros(3), torch.ones(2)]
        >>> for_blocks(lambda tensors: torch._foreach_add_(tensors, 1), [x])
        >>> x
        [tensor([1., 1., 1.]), tensor([2., 2.])]
    """
    waiting = deque(blocks(columns))
    threads = min(torch.get_num_threads(), THREADS, len(waiting))

    def work() -> None:
        with torch.no_grad():
            while True:
                try:
                    block = waiting.popleft()
                except IndexError:
                    return
                rule(*block)

    if threads < 2:
        work()
        return
    with ThreadPoolExecutor(threads - 1) as pool:
        helpers = [pool.submit(work) for _ in range(threads - 1)]
        work()
    for helper in helpers:
        helper.result()


def blocks(
    columns: Sequence[Sequence[Tensor]], size: int = BLOCK, piece: int = PIECE
) -> Iterator[list[list[Tensor]]]:
    """Yield ``columns`` in blocks of about ``size`` elements.

    On a CPU, contiguous tensors are cut into views of at most ``piece`` elements; elsewhere the
    columns come back as one block. Writing to a view writes to the tensor.

        >>> x = [torch.zeros(5), torch.zeros(2), torch.zeros(1)]
        >>> [[view.numel() for view in block[0]] for block in blocks([x], size=4, piece=3)]
        [[3], [2, 2], [1]]
    """
    if not columns or not columns[0]:
        return
    if columns[0][0].device.type != "cpu":
        yield [list(column) for column in columns]
        return
    gathered: list[tuple[Tensor, ...]] = []
    filled = 0
    for row in zip(*columns, strict=True):
        for views in _cut(row, piece):
            count = views[0].numel()
            if gathered and filled + count > size:
                yield [list(column) for column in zip(*gathered, strict=True)]
                gathered, filled = [], 0
            gathered.append(views)
            filled += count
    yield [list(column) for column in zip(*gathered, strict=True)]


def _cut(row: tuple[Tensor, ...], piece: int) -> Iterable[tuple[Tensor, ...]]:
    if row[0].numel() <= piece or not all(tensor.is_contiguous() for tensor in row):
        return [row]
    return zip(*(tensor.detach().view(-1).split(piece) for tensor in row), strict=True)


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
