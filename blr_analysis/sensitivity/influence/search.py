"""Which of many stored examples are the best, without computing the values of all.

Every row is looked at in its first signs; where that leaves open whether it is among the k best,
in all of its signs and two bits of the question's numbers, then four bits, and then the value is
computed. Each level says by how much it is off, as a standard deviation; that is measured on some
rows, too, and the larger counts. A row is left out where it is SURE of them below what k others
reach at least, so that a row of some three million passes by chance.

Source: Gao & Long, "RaBitQ", 2024 (questions in few bits, compared with stored signs bit by bit).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from blr_analysis.sensitivity.influence.compressed import Compressed, Compression, Kept

BITS = 1, 2, 4  # of a question's numbers, level by level
SPARE = 64  # rows beyond k, among which the bound is first looked for
MEASURED = 64  # rows whose errors are measured
SURE = 5.0  # standard deviations

Read = Callable[[Callable[[Kept], Tensor], Tensor | None], Tensor]  # of these rows, or of all


def best(
    read: Read, compression: Compression, asked: Compressed, n: int, k: int, signs: list[int]
) -> list[tuple[Tensor, Tensor]]:
    """Values and rows ``[k, M]`` of the largest (sign 1), the smallest (−1), or both, of n rows."""

    def computed(rows: Tensor) -> Tensor:
        return read(lambda own: compression.values(own, asked), rows)

    some = torch.arange(min(n, MEASURED))
    truth = computed(some)

    def level(bits: int) -> Callable[[Tensor | None], Tensor]:
        """Values and what they are off ``[n, 2, M]``, of these rows."""
        question = compression.rounded(asked, bits)
        likeness = compression.rough if bits == 1 else compression.near

        def compute(own: Kept) -> Tensor:
            return likeness(own, question)

        wider = _wider(read(compute, some), truth)
        return lambda rows: read(compute, rows) * wider

    def left(found: Tensor, rows: Tensor) -> Tensor:
        """Those that may be among the best, by what some that are likely reach for certain."""
        likely = [v.topk(min(k + SPARE, len(v)), dim=0).indices for v in _sides(found[:, 0], signs)]
        values = computed(rows[torch.cat(likely).unique()])
        reached = [v.topk(k, dim=0).values[-1] for v in _sides(values, signs)]
        return rows[_open(found, signs, reached)]

    first, *levels = (level(bits) for bits in BITS)
    found, rows = first(None), torch.arange(n)
    for next_level in levels:
        rows = left(found, rows)
        found = next_level(rows)
    rows = left(found, rows)
    chosen = [v.topk(k, dim=0) for v in _sides(computed(rows), signs)]
    pairs = zip(signs, chosen, strict=True)
    return [(sign * top.values, rows[top.indices]) for sign, top in pairs]


def _sides(values: Tensor, signs: list[int]) -> Iterator[Tensor]:
    return (sign * values for sign in signs)


def _wider(found: Tensor, truth: Tensor) -> Tensor:
    """1 for values, and for errors by how much they are larger than said, if they are: sums of few
    numbers are less random than of many. ``[2, 1]``."""
    off = ((found[:, 0] - truth) / found[:, 1])[found[:, 1] > 0]
    ratio = off.square().mean().sqrt().nan_to_num(1.0).clamp_min(1.0)
    return torch.stack([torch.ones_like(ratio), ratio]).unsqueeze(1)


def _open(found: Tensor, signs: list[int], reached: list[Tensor]) -> Tensor:
    """Which rows may be among the best of a question."""
    sides, error = _sides(found[:, 0], signs), SURE * found[:, 1]
    each = [(v + error >= low).any(1) for v, low in zip(sides, reached, strict=True)]
    return torch.stack(each).any(0)
