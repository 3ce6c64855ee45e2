"""How many blocks of each gradient are stored: as many as leave the least error.

Blocks are stored exactly, but for 4 bits, and take room from the signs of the rest r, whose error
is in proportion to ‖r‖² / √K.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.sensitivity.index.blocks import BLOCK_BYTES, split_blocks
from blr_analysis.sensitivity.index.whitened import Tile

ROOM_SHARES = (1 / 16, 1 / 8, 1 / 4)  # of the room, that blocks may take


def block_squares(count: int, tiles: Iterable[Tile]) -> Tensor:
    """The squared lengths of all blocks of so many w, ``[B, blocks]``."""
    squares: list[list[Tensor]] = [[] for _ in range(count)]
    for tile in tiles:
        tile_squares = split_blocks(tile.numbers).square().sum(2)
        for example_squares, row in zip(squares[tile.examples], tile_squares, strict=True):
            example_squares.append(row)
    return torch.stack([torch.cat(example_squares) for example_squares in squares])


def block_counts(count: int, room: int) -> set[int]:
    """How many of so many blocks may be stored in so many bytes, apart from none."""
    return {min(int(share * room) // BLOCK_BYTES, count // 2) for share in ROOM_SHARES} - {0}


def best_block_count(squares: Iterable[Tensor], n: int, count: int, room: int) -> int:
    """How many of ``count`` blocks, stored in so many bytes, leave the signs the least error,
    the mean share of ‖r‖² squared, over K.

    Args:
        squares: of each of the n examples, on one of the ranks, the squared lengths of its blocks.
    """
    counts = block_counts(count, room)
    if not counts:
        return 0
    shares = torch.zeros(max(counts), dtype=torch.float64)  # of ‖w‖², in the longest 1, 2, …
    for row in squares:
        longest = row.topk(len(shares)).values.double().cumsum(0)
        whole = row.double().sum().clamp_min(torch.finfo(torch.float64).tiny)
        shares += (longest / whole).cpu()
    ranks.total([shares])
    errors = {0: 1 / room}
    for stored in counts:
        rest = float(1 - shares[stored - 1] / n)
        errors[stored] = rest**2 / (room - BLOCK_BYTES * stored)
    return min(errors, key=lambda stored: errors[stored])
