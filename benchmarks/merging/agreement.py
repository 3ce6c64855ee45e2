"""How far two merged models are apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open


@dataclass(frozen=True)
class Difference:
    """The share of numbers that are not the same, and the largest difference between two of them.

    ``largest`` is in units of the largest number of the same tensor; rounding to bfloat16 makes
    up to 2⁻⁸ of a number.
    """

    share: float
    largest: float


def difference(one: Path, two: Path) -> Difference:
    """Compare two ``.safetensors`` files of bfloat16 tensors, tensor by tensor.

    Raises:
        ValueError: they do not hold the same tensors.
    """
    unequal = 0
    total = 0
    largest = 0.0
    with safe_open(one, "pt") as first, safe_open(two, "pt") as second:
        if set(first.keys()) != set(second.keys()):
            raise ValueError(f"{one} and {two} hold tensors of different names")
        for name in sorted(first.keys()):
            left = first.get_tensor(name)
            right = second.get_tensor(name)
            if left.shape != right.shape or {left.dtype, right.dtype} != {torch.bfloat16}:
                raise ValueError(
                    f"{name!r} is {left.dtype} {tuple(left.shape)} and {right.dtype} "
                    f"{tuple(right.shape)}"
                )
            gap = (left.float() - right.float()).abs_()
            unequal += int(torch.count_nonzero(gap))
            total += gap.numel()
            largest = max(largest, float(gap.max() / right.abs().max()))
    return Difference(unequal / total, largest)
