"""Whether two tensors are the same."""

from __future__ import annotations

import torch

from blr_analysis.files.source import Scratch, Source

PIECE = 2**20  # entries compared at a time


def same_bytes(
    one: Source, name: str, two: Source, other_name: str, limit: int | None = None
) -> bool:
    """Whether two tensors, or their first entries, agree to the bit, in dtype and shape too."""
    spec = one.specs[name]
    if spec != two.specs[other_name]:
        return False
    first_scratch = Scratch()
    second_scratch = Scratch()
    end = spec.numel if limit is None else min(limit, spec.numel)
    for start in range(0, end, PIECE):
        stop = min(start + PIECE, end)
        first = one.read(name, start, stop, first_scratch).contiguous().view(torch.uint8)
        second = two.read(other_name, start, stop, second_scratch).contiguous().view(torch.uint8)
        if not torch.equal(first, second):
            return False
    return True
