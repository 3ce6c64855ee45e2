"""Elementwise arithmetic on many tensors, block by block, in memory that is used again.

A step of an optimizer is a dozen operations on every weight. On a CPU all of them run on one block,
which stays in the cache, then on the next one. An accelerator gets all weights at once.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

PIECE = 1 << 15
"""Elements of a tensor that torch works on in one thread.

It splits longer tensors over threads, and would wait for the slowest one thousands of times a step.
"""
BLOCK = 1 << 17
"""Elements per block on a CPU."""
THREADS = 8
"""The largest number of threads: more of them would wait for Python's lock."""

Value = TypeVar("Value")


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Inside, new tensors have no graph and can be trained, also in the caller's inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def group_by(values: Iterable[Value], key: Callable[[Value], Any]) -> dict[Any, list[Value]]:
    """Lists of the values that have the same ``key(value)``, in their order.

    >>> group_by([1, 2, 3, 4], lambda number: number % 2)
    {1: [1, 3], 0: [2, 4]}
    """
    groups: dict[Any, list[Value]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def for_blocks(rule: Callable[..., object], columns: Sequence[Sequence[Tensor]]) -> None:
    """Call ``rule(*block)`` for every block of ``columns``, on torch's number of threads.

    ``columns[j][i]`` is the ``j``-th quantity (weight, gradient, …) of the ``i``-th parameter; all
    tensors of one parameter have its shape and device. ``rule`` gets as many lists as there are
    columns, and writes to their tensors elementwise and in place; call it without gradients.

        >>> x = [torch.zeros(3), torch.ones(2)]
        >>> for_blocks(lambda tensors: torch._foreach_add_(tensors, 1), [x])
        >>> x
        [tensor([1., 1., 1.]), tensor([2., 2.])]
    """
    block_list = list(blocks(columns))
    threads = min(torch.get_num_threads(), THREADS, len(block_list))
    if threads < 2:
        for block in block_list:
            rule(*block)
        return
    rule_without_graph = torch.no_grad()(rule)  # no_grad acts on one thread only
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda block: rule_without_graph(*block), block_list))


def blocks(
    columns: Sequence[Sequence[Tensor]], size: int = BLOCK, piece: int = PIECE
) -> Iterator[list[list[Tensor]]]:
    """Yield ``columns`` in blocks of about ``size`` elements, each of one device and dtype.

    On a CPU, contiguous tensors are cut into views of at most ``piece`` elements; elsewhere the
    columns come back as one block. Writing to a view writes to the tensor.

        >>> x = [torch.zeros(5), torch.zeros(2), torch.zeros(1)]
        >>> [[view.numel() for view in block[0]] for block in blocks([x], size=4, piece=3)]
        [[3], [2, 2], [1]]
    """
    rows = zip(*columns, strict=True)
    by_kind = group_by(rows, lambda row: (row[0].device, row[0].dtype))
    for (device, _), group in by_kind.items():
        on_cpu = device.type == "cpu"
        block: list[tuple[Tensor, ...]] = []
        n_elements = 0
        for row in group:
            pieces = _cut(row, piece) if on_cpu else [row]
            for views in pieces:
                would_be_too_large = on_cpu and n_elements + views[0].numel() > size
                if block and would_be_too_large:
                    yield _transposed(block)
                    block = []
                    n_elements = 0
                block.append(views)
                n_elements += views[0].numel()
        yield _transposed(block)


def _cut(row: tuple[Tensor, ...], piece: int) -> Iterable[tuple[Tensor, ...]]:
    """The tensors of one parameter as views of at most ``piece`` elements.

    They stay whole where one of them is not contiguous.
    """
    can_be_cut = all(tensor.is_contiguous() for tensor in row)
    if row[0].numel() <= piece or not can_be_cut:
        return [row]
    pieces = [tensor.detach().view(-1).split(piece) for tensor in row]
    return zip(*pieces, strict=True)


def _transposed(block: list[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    """From one tuple for each parameter to one list for each quantity."""
    return [list(column) for column in zip(*block, strict=True)]


def scaled(tensors: list[Tensor], factor: float) -> list[Tensor]:
    """Each tensor times the factor; the same tensors where it is 1."""
    if factor == 1 or not tensors:
        return tensors
    return list(torch._foreach_mul(tensors, factor))


def average_squares(means: list[Tensor], tensors: list[Tensor], decay: float) -> None:
    """v ← decay · v + (1 − decay) · g², in place.

    >>> v = [torch.ones(2)]
    >>> average_squares(v, [torch.tensor([0.0, 2.0])], 0.5)
    >>> v
    [tensor([0.5000, 2.5000])]
    """
    torch._foreach_mul_(means, decay)
    torch._foreach_addcmul_(means, tensors, tensors, value=1 - decay)


class Scratch(dict[Any, Tensor]):
    """Large tensors that are used again at the next draw.

    A fresh 40 MB tensor costs the operating system ten thousand page faults, which take longer than
    the arithmetic. Only tensors on a CPU are stored: accelerators have an allocator for this.
    """

    def take(
        self, use: str, like: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, list[Tensor]]:
        """One flat tensor, and its views in the shapes of ``like``, which are on one device.

        It is the memory of the last call with the same ``use``, whose numbers are lost.

        >>> flat, views = Scratch().take("noise", [torch.zeros(2, 3), torch.zeros(4)], torch.half)
        >>> flat.shape, [tuple(view.shape) for view in views]
        (torch.Size([10]), [(2, 3), (4,)])
        """
        counts = [tensor.numel() for tensor in like]
        device = like[0].device
        on_cpu = device.type == "cpu"
        key = (use, like[0])
        flat = self.get(key) if on_cpu else None
        if flat is None or len(flat) != sum(counts):
            flat = torch.empty(sum(counts), dtype=dtype, device=device)
            if on_cpu:
                self[key] = flat
        pieces = flat.split(counts)
        return flat, [piece.view(t.shape) for piece, t in zip(pieces, like, strict=True)]
