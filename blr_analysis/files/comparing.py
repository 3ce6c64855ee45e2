"""Whether two tensors are the same."""

from __future__ import annotations

import torch

from blr_analysis.files.source import Scratch, Source

PIECE = 2**20  # entries compared at a time


def same_bytes(
    source: Source, name: str, other_source: Source, other_name: str, limit: int | None = None
) -> bool:
    """Whether two tensors have the same shape, dtype and bits.

    Args:
        limit: the number of first entries that are compared; None: all.
    """
    spec = source.specs[name]
    if spec != other_source.specs[other_name]:
        return False
    scratch = Scratch()
    other_scratch = Scratch()
    end = spec.numel if limit is None else min(limit, spec.numel)
    for start in range(0, end, PIECE):
        stop = min(start + PIECE, end)
        piece = source.read(name, start, stop, scratch)
        other_piece = other_source.read(other_name, start, stop, other_scratch)
        bits = piece.contiguous().view(torch.uint8)
        other_bits = other_piece.contiguous().view(torch.uint8)
        if not torch.equal(bits, other_bits):
            return False
    return True
